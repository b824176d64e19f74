// Draws what moves between processes, behind them: a line while it is warm, and a dot for each hand-off.
// It draws only while something moves, and nothing moves for people who have asked for less motion.

const MAX_PARTICLES = 240;
const MAX_LINES = 300;
const COOL_MS = 5000;
const CALLS = { frontend: ["router", "process", "encode", "prefill", "decode", "aggregated", "embed"], router: ["prefill", "decode", "aggregated"], process: ["prefill", "decode", "aggregated"], encode: ["prefill", "aggregated"], prefill: ["decode"] };

export class FlowCanvas {
  constructor(canvas, stage, elementOf) {
    this.canvas = canvas;
    this.stage = stage;
    this.elementOf = elementOf;
    this.particles = [];
    this.lines = new Map();
    this.groups = [];
    this.running = false;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.colors = {};
    new ResizeObserver(() => this.resize()).observe(stage);
    addEventListener("themechange", () => { this.readColors(); this.start(); });
    this.readColors();
  }

  readColors() {
    const style = getComputedStyle(document.documentElement);
    this.colors = { request: style.getPropertyValue("--accent").trim(), kv: style.getPropertyValue("--phase-move").trim(), base: style.getPropertyValue("--line-strong").trim() };
  }

  setGroups(groups) {
    this.groups = groups;
    this.start();
  }

  resize() {
    const ratio = Math.min(devicePixelRatio || 1, 2);
    this.canvas.width = this.stage.clientWidth * ratio;
    this.canvas.height = this.stage.clientHeight * ratio;
    this.ratio = ratio;
    this.start();
  }

  // Each flow is [source, target, kind, count, bytes].
  add(flows) {
    const now = performance.now();
    for (const [source, target, kind, count, size] of flows) {
      const moved = kind !== "request";
      const key = `${source}>${target}>${moved}`;
      this.lines.delete(key);
      this.lines.set(key, { source, target, moved, at: now });
      if (this.lines.size > MAX_LINES) this.lines.delete(this.lines.keys().next().value);
      if (this.still.matches) continue;
      for (let index = 0; index < Math.min(count, 4) && this.particles.length < MAX_PARTICLES; index += 1) {
        const radius = moved ? Math.min(7, 2.6 + Math.log10(1 + size / count / 1e5)) : 2.6;
        this.particles.push({ source, target, moved, radius, begin: now + Math.random() * 260, ms: moved ? 950 : 750 });
      }
    }
    if (flows.length) this.start();
  }

  start() {
    if (this.running) return;
    this.running = true;
    requestAnimationFrame((now) => this.frame(now));
  }

  frame(now) {
    const context = this.canvas.getContext("2d");
    context.setTransform(this.ratio ?? 1, 0, 0, this.ratio ?? 1, 0, 0);
    context.clearRect(0, 0, this.stage.clientWidth, this.stage.clientHeight);
    const boxes = new Boxes(this.stage);
    this.drawBase(context, boxes);
    this.drawLines(context, boxes, now);
    this.drawParticles(context, boxes, now);
    this.running = false;
    if (document.hidden || !this.stage.offsetParent) this.particles = [];
    else if (this.particles.length || this.lines.size) this.start();
  }

  drawBase(context, boxes) {
    context.strokeStyle = this.colors.base;
    context.globalAlpha = 0.8;
    context.lineWidth = 1;
    for (const source of this.groups) {
      for (const target of this.groups) {
        if (!this.isConnected(source, target)) continue;
        const curve = curveBetween(boxes.of(source.element), boxes.of(target.element));
        if (curve) strokeCurve(context, curve);
      }
    }
    context.globalAlpha = 1;
  }

  // Whether to show a connection before anything has passed it: from each role to the next ones that there are.
  isConnected(source, target) {
    if (!(CALLS[source.role] ?? []).includes(target.role)) return false;
    if (source.role === "prefill" && source.pool !== target.pool) return false;
    const behind = ["router", "process"].find((role) => this.groups.some((group) => group.role === role));
    return source.role !== "frontend" || !behind || target.role === behind || target.role === "encode";
  }

  drawLines(context, boxes, now) {
    for (const [key, line] of this.lines) {
      const age = (now - line.at) / COOL_MS;
      const curve = age < 1 && this.curve(boxes, line);
      if (age >= 1) { this.lines.delete(key); continue; }
      if (!curve) continue;
      context.strokeStyle = line.moved ? this.colors.kv : this.colors.request;
      context.globalAlpha = 0.42 * (1 - age);
      context.lineWidth = line.moved ? 2 : 1.3;
      strokeCurve(context, curve);
    }
    context.globalAlpha = 1;
  }

  drawParticles(context, boxes, now) {
    this.particles = this.particles.filter((each) => now < each.begin + each.ms);
    for (const particle of this.particles) {
      const progress = (now - particle.begin) / particle.ms;
      const curve = progress > 0 && this.curve(boxes, particle);
      if (!curve) continue;
      const [x, y] = pointOn(curve, ease(progress));
      context.fillStyle = particle.moved ? this.colors.kv : this.colors.request;
      context.globalAlpha = 0.22;
      circle(context, x, y, particle.radius * 2.3);
      context.globalAlpha = 1;
      circle(context, x, y, particle.radius);
    }
  }

  curve(boxes, { source, target }) {
    const [from, to] = [this.elementOf(source), this.elementOf(target)];
    return from && to ? curveBetween(boxes.of(from), boxes.of(to)) : null;
  }
}

// The places of elements in the stage, each read once per frame.
class Boxes {
  constructor(stage) {
    this.origin = stage.getBoundingClientRect();
    this.known = new Map();
  }

  of(element) {
    if (!element) return null;
    if (!this.known.has(element)) {
      const box = element.getBoundingClientRect();
      this.known.set(element, { left: box.left - this.origin.left, right: box.right - this.origin.left, top: box.top - this.origin.top, bottom: box.bottom - this.origin.top });
    }
    return this.known.get(element);
  }
}

function curveBetween(from, to) {
  if (!from || !to || from.right - from.left === 0) return null;
  const middle = (box) => [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  if (to.left >= from.right - 4) {
    const [x0, y0, x1, y1] = [from.right, middle(from)[1], to.left, middle(to)[1]];
    const reach = Math.max(30, (x1 - x0) / 2);
    return [x0, y0, x0 + reach, y0, x1 - reach, y1, x1, y1];
  }
  if (to.top >= from.bottom - 4) {
    const [x0, y0, x1, y1] = [middle(from)[0], from.bottom, middle(to)[0], to.top];
    const reach = Math.max(16, (y1 - y0) / 2);
    return [x0, y0, x0, y0 + reach, x1, y1 - reach, x1, y1];
  }
  const [[x0, y0], [x1, y1]] = [middle(from), middle(to)];
  return [x0, y0, x0 + 60, y0, x1 + 60, y1, x1, y1];
}

function strokeCurve(context, [x0, y0, ax, ay, bx, by, x1, y1]) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(ax, ay, bx, by, x1, y1);
  context.stroke();
}

function pointOn([x0, y0, ax, ay, bx, by, x1, y1], t) {
  const u = 1 - t;
  const [a, b, c, d] = [u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t];
  return [a * x0 + b * ax + c * bx + d * x1, a * y0 + b * ay + c * by + d * y1];
}

function circle(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, Math.PI * 2);
  context.fill();
}

const ease = (t) => (t < 0.5 ? 2 * t * t : 1 - (2 - 2 * t) ** 2 / 2);
