// A plot over time: for each series a line and a band above it, a dashed line for the target, and a cursor.

import { h, hideTooltip, showTooltip, svg } from "./dom.js";

const LEFT = 54;
const BOTTOM = 20;
const HEIGHT = 210;

export class Chart {
  constructor(title, subtitle, format) {
    this.format = format;
    this.graph = svg("svg", { role: "img", "aria-label": title });
    this.subtitle = h("span", {}, subtitle);
    this.element = h("section.plot.card", {}, h("header", {}, h("h2", {}, title), this.subtitle), this.graph);
    this.data = null;
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.graph.addEventListener("pointermove", (event) => this.point(event));
    this.graph.addEventListener("pointerleave", () => { hideTooltip(); this.cursor?.setAttribute("visibility", "hidden"); });
  }

  // `series` is a list of {name, color, points: [[t, low, high]]}; a missing bucket ends a line.
  update(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const width = this.graph.clientWidth;
    if (!this.data || !width) return;
    const { begin, end, bucket, series, target } = this.data;
    const values = series.flatMap((each) => each.points.flatMap(([, low, high]) => [low, high ?? 0]));
    const top = niceTop(Math.max(...values, target ? target * 1.12 : 0, 1e-6));
    const x = (t) => LEFT + ((t - begin) / (end - begin)) * (width - LEFT - 4);
    const y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - BOTTOM - 8);
    this.scale = { x, begin, end, width };
    const parts = [...gridLines(top, y, width, this.format), ...timeMarks(begin, end, x)];
    for (const each of series) {
      for (const run of runs(each.points, bucket)) {
        const line = run.map(([t, low]) => `${x(t + bucket / 2).toFixed(1)},${y(low).toFixed(1)}`);
        if (run[0][2] !== undefined) {
          const high = run.map(([t, , value]) => `${x(t + bucket / 2).toFixed(1)},${y(value).toFixed(1)}`);
          parts.push(styled(svg("polygon", { class: "band", points: [...line, ...high.reverse()].join(" ") }), each));
        }
        parts.push(styled(run.length > 1 ? svg("polyline", { class: "line", points: line.join(" "), "stroke-dasharray": each.dashed ? "7 4" : "none" }) : dot(line[0]), each));
      }
    }
    if (target) {
      parts.push(svg("line", { class: "target", x1: LEFT, x2: width - 4, y1: y(target), y2: y(target) }));
      const label = svg("text", { class: "target-label", x: width - 6, y: y(target) - 5, "text-anchor": "end" });
      label.textContent = `target ${this.format(target)}`;
      parts.push(label);
    }
    this.cursor = svg("line", { class: "cursor", y1: 8, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.graph.replaceChildren(...parts, this.cursor);
  }

  point(event) {
    if (!this.scale) return;
    const { begin, end, width, x } = this.scale;
    const at = begin + ((event.offsetX - LEFT) / (width - LEFT - 4)) * (end - begin);
    const bucket = this.data.bucket;
    const t = Math.floor(at / bucket) * bucket;
    const found = this.data.series.map((each) => [each, each.points.find((point) => point[0] === t)]).filter(([, point]) => point);
    this.cursor.setAttribute("x1", x(t + bucket / 2));
    this.cursor.setAttribute("x2", x(t + bucket / 2));
    this.cursor.setAttribute("visibility", found.length ? "visible" : "hidden");
    if (!found.length) return hideTooltip();
    showTooltip(event.clientX, event.clientY, h("div", {}, h("b", {}, clock(t)), h("dl", {}, found.map(([each, [, low, high]]) => [h("dt", {}, each.name), h("dd", {}, high === undefined ? this.format(low) : `${this.format(low)}, 95% ${this.format(high)}`)]))));
    return undefined;
  }
}

function styled(element, series) {
  element.style.setProperty("--series", `var(--${series.color})`);
  if (series.dashed) element.setAttribute("data-dashed", "");
  return element;
}

function dot(point) {
  const [cx, cy] = point.split(",");
  return svg("circle", { class: "line", cx, cy, r: 2 });
}

// Points without a bucket missing between them.
function runs(points, bucket) {
  const found = [];
  for (const point of points) {
    const last = found.at(-1)?.at(-1);
    if (last && point[0] - last[0] <= bucket * 3) found.at(-1).push(point);
    else found.push([point]);
  }
  return found;
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((each) => each >= value * 1.02) ?? power * 10;
}

function gridLines(top, y, width, format) {
  return [0, 0.25, 0.5, 0.75, 1].flatMap((part) => {
    const label = svg("text", { x: LEFT - 8, y: y(top * part) + 4, "text-anchor": "end" });
    label.textContent = part ? format(top * part) : "0";
    return [svg("line", { class: "grid", x1: LEFT, x2: width - 4, y1: y(top * part), y2: y(top * part) }), label];
  });
}

const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

function timeMarks(begin, end, x) {
  const step = end - begin > 600 ? 180 : 60;
  const marks = [];
  for (let t = Math.ceil(begin / step) * step; t < end - step / 6; t += step) {
    const label = svg("text", { x: x(t), y: HEIGHT - 4, "text-anchor": "middle" });
    label.textContent = clock(t).slice(0, 5);
    marks.push(label);
  }
  return marks;
}

