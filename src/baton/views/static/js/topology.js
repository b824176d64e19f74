// The processes of the deployment in the order in which a request passes them, and what flows between them.

import { duration, h, hideTooltip, number, rate, replace, showTooltip, svg, text } from "./dom.js";
import { FlowCanvas } from "./flow_canvas.js";
import { openProcess } from "./process.js";
import { getJson, store } from "./store.js";

const STAGES = [["frontend"], ["router"], ["process"], ["encode"], ["prefill"], ["decode", "aggregated", "embed"]];
const TITLES = { frontend: "Frontend", router: "Router", process: "Process", encode: "Encode", prefill: "Prefill", decode: "Decode", aggregated: "Workers", embed: "Embed" };
const PHASES = ["prepare", "forwarded", "queued", "prefill", "moving", "decode"];
const PHASE_TITLES = { prepare: "preparing", forwarded: "forwarded", queued: "queued", prefill: "in prefill", moving: "moving KV", decode: "decoding" };
const STATES = { gone: "exited", unreachable: "does not reply", unhealthy: "unhealthy", paused: "paused", draining: "draining", starting: "starting" };
const MAX_CARDS = 12;
const STATS_INTERVAL_MS = 2000;

export function topologyPage(root) {
  const stats = new Stats();
  const columns = h("div.columns");
  const canvas = h("canvas", { "aria-hidden": "true" });
  const stage = h("div.stage.card", {}, canvas, columns, legend());
  const which = h("select.input", { "aria-label": "Deployment", onchange: () => draw() });
  const chooser = h("div.toolbar", { hidden: true }, which);
  const empty = h("div.card.empty", { hidden: true });
  replace(root, h("h1.sr", {}, "Topology"), chooser, stats.element, stage, empty);
  const nodes = new Map();
  const flows = new FlowCanvas(canvas, stage, (name) => nodes.get(name)?.element);
  let layout = "";
  let visible = false;
  let scheduled = false;
  let timer = null;

  function draw() {
    scheduled = false;
    if (!visible) return;
    const processes = chosen([...store.processes.values()], chooser, which);
    stage.hidden = !processes.length;
    empty.hidden = processes.length > 0 || store.state === "connecting";
    if (!empty.hidden && store.hasLooked) replace(empty, h("h2", {}, "No process was found"), store.problem ?? "Start one with `baton serve`; it appears here by itself.");
    else if (!empty.hidden) replace(empty, h("h2", {}, "Looking for processes"));
    const groups = grouped(processes);
    const key = JSON.stringify(groups.map((each) => [each.role, each.pool, each.members.map((member) => member.name)]));
    if (key !== layout) {
      layout = key;
      nodes.clear();
      build(columns, groups, nodes);
      flows.setGroups(groups.map((group) => ({ role: group.role, pool: group.pool, element: group.element })));
    }
    for (const process of processes) nodes.get(process.name)?.update(process);
    for (const group of groups) updateGroup(columns, group);
    stats.update(processes);
  }

  function schedule() {
    if (!scheduled) { scheduled = true; requestAnimationFrame(draw); }
  }

  store.addEventListener("change", (event) => {
    if (!visible) return;
    schedule();
    flows.add(event.detail.flows);
  });
  return {
    show() {
      visible = true;
      draw();
      stats.load();
      timer ??= setInterval(() => stats.load(), STATS_INTERVAL_MS);
      flows.resize();
    },
    hide() { visible = false; clearInterval(timer); timer = null; hideTooltip(); },
  };
}

// With several deployments on one machine, the processes of the one that is chosen; without a choice, all.
function chosen(processes, chooser, which) {
  const names = [...new Set(processes.map((process) => process.deployment))].sort();
  chooser.hidden = names.length < 2;
  if (which.options.length !== names.length + 1) {
    const before = which.value;
    replace(which, h("option", { value: "all" }, "All deployments"), names.map((name) => h("option", { value: name, selected: name === before }, name ? `Endpoint on port ${name}` : "Started by hand")));
  }
  return chooser.hidden || which.value === "all" ? processes : processes.filter((process) => process.deployment === which.value);
}

function grouped(processes) {
  const found = new Map();
  for (const process of processes) {
    const key = `${process.role} ${process.pool}`;
    if (!found.has(key)) found.set(key, { role: process.role, pool: process.pool, key, members: [] });
    found.get(key).members.push(process);
  }
  const order = (group) => { const at = STAGES.findIndex((roles) => roles.includes(group.role)); return at < 0 ? STAGES.length : at; };
  const groups = [...found.values()].map((group) => ({ ...group, stage: order(group), members: group.members.sort(byName) }));
  return groups.sort((a, b) => a.stage - b.stage || a.pool.localeCompare(b.pool));
}

const byName = (a, b) => a.name.localeCompare(b.name, "en", { numeric: true });

function build(columns, groups, nodes) {
  const byStage = new Map();
  for (const group of groups) byStage.set(group.stage, [...(byStage.get(group.stage) ?? []), group]);
  replace(columns, [...byStage.values()].map((list) => {
    const dense = list.some((group) => group.members.length > MAX_CARDS);
    return h("div", { class: dense ? "column dense" : "column" }, list.map((group) => {
      const tiles = group.members.length > MAX_CARDS;
      const makers = group.members.map((process) => (tiles ? new Tile(process) : new Card(process)));
      makers.forEach((each, index) => nodes.set(group.members[index].name, each));
      group.element = h("section.group", { class: `role-${group.role}`, "data-key": group.key, "aria-label": `${TITLES[group.role] ?? group.role} ${group.pool}` },
        h("header", {}, h("b", {}, TITLES[group.role] ?? group.role), group.pool ? h("span.chip", {}, group.pool) : null, h("span.of")),
        h("div.nodes", { class: tiles ? "tiles" : "" }, makers.map((each) => each.element)));
      return group.element;
    }));
  }));
}

function updateGroup(columns, group) {
  const element = columns.querySelector(`[data-key="${CSS.escape(group.key)}"] .of`);
  if (!element) return;
  const serving = group.members.filter((process) => process.health === "serving").length;
  text(element, serving === group.members.length ? (serving === 1 ? "" : `${serving}`) : `${serving} of ${group.members.length}`);
}

function kvUse(process) {
  return process.total_blocks ? process.used_blocks / process.total_blocks : null;
}

class Card {
  constructor(process) {
    this.count = h("span.count");
    this.what = h("span.what", { "aria-hidden": "true" });
    this.label = h("span.sr");
    this.kv = h("i");
    this.kvText = h("span");
    this.kvLine = h("span.line", { "aria-hidden": "true" }, h("span.bar", {}, this.kv), this.kvText);
    this.phases = h("span.bar");
    this.element = h("button.node", { type: "button", class: `role-${process.role}`, "aria-expanded": "false", onclick: () => openProcess(process.name, this.element) },
      this.label, h("span.line", { "aria-hidden": "true" }, h("span.dot"), h("span.name", { title: process.name }, process.short), this.count),
      this.what, this.kvLine, h("span.line", { "aria-hidden": "true" }, this.phases));
    this.lastError = 0;
  }

  update(process) {
    this.element.dataset.health = process.health;
    text(this.what, STATES[process.health] ?? "");
    const inFlight = Math.max(process.in_flight, total(process.phases));
    text(this.count, process.health === "gone" ? "" : `${inFlight}`);
    const use = kvUse(process);
    this.what.hidden = process.health === "serving";
    this.kvLine.hidden = use === null || !this.what.hidden;
    if (use !== null) {
      this.kv.style.width = `${Math.max(use * 100, use > 0 ? 2 : 0)}%`;
      text(this.kvText, `${Math.round(use * 100)}% KV`);
    }
    drawPhases(this.phases, process.phases, inFlight);
    text(this.label, describe(process));
    if (process.last_error_us > this.lastError) {
      if (this.lastError) { this.element.classList.remove("failing"); void this.element.offsetWidth; this.element.classList.add("failing"); }
    }
    this.lastError = Math.max(process.last_error_us, 1);
  }
}

class Tile {
  constructor(process) {
    this.fill = h("i");
    this.process = process;
    this.element = h("button.tile", { type: "button", class: `role-${process.role}`, "aria-expanded": "false", onclick: () => openProcess(process.name, this.element) }, this.fill);
    this.element.addEventListener("pointerenter", (event) => showTooltip(event.clientX, event.clientY, h("span", {}, describe(this.process))));
    this.element.addEventListener("pointerleave", hideTooltip);
  }

  update(process) {
    if (this.process === process && this.drawn) return;
    this.drawn = true;
    this.process = process;
    this.element.dataset.health = process.health;
    this.fill.style.height = `${Math.round((kvUse(process) ?? Math.min(1, process.in_flight / 32)) * 100)}%`;
    this.element.setAttribute("aria-label", describe(process));
  }
}

const total = (phases) => Object.values(phases).reduce((sum, each) => sum + each, 0);

function drawPhases(bar, phases, inFlight) {
  const known = PHASES.filter((phase) => phases[phase]);
  while (bar.children.length > known.length) bar.lastChild.remove();
  known.forEach((phase, index) => {
    const segment = bar.children[index] ?? bar.appendChild(h("i"));
    segment.className = `phase-${phase}`;
    segment.style.width = `${(phases[phase] / Math.max(inFlight, 8)) * 100}%`;
  });
}

function describe(process) {
  const parts = [process.short, STATES[process.health] ?? process.health, `${process.in_flight} requests`];
  const use = kvUse(process);
  if (use !== null) parts.push(`${Math.round(use * 100)}% of KV in use`);
  for (const phase of PHASES) if (process.phases[phase]) parts.push(`${process.phases[phase]} ${PHASE_TITLES[phase]}`);
  return parts.join(", ");
}

function legend() {
  const item = (key, label, round) => h("span", {}, h("i", { class: `key-${key}${round ? " round" : ""}` }), label);
  return h("div.legend", {}, item("request", "request", true), item("kv", "KV or media", true),
    h("span.push", {}, "In flight:"), item("prepare", "preparing"), item("queued", "queued"), item("prefill", "prefill"), item("moving", "moving KV"), item("decode", "decoding"));
}

class Stats {
  constructor() {
    this.tiles = ["Requests", "Tokens", "First token", "In flight", "Serving", "Failed"].map((name) => {
      const value = h("b", {}, "–");
      const sub = h("span.sub");
      const graph = svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", "aria-hidden": "true" });
      return { name, value, sub, graph, element: h("div.stat.card", {}, h("h2", {}, name), value, sub, graph) };
    });
    this.element = h("div.stats", {}, this.tiles.map((tile) => tile.element));
  }

  set(index, value, unit, sub, points) {
    const tile = this.tiles[index];
    replace(tile.value, value, unit ? h("small", {}, unit) : null);
    text(tile.sub, sub);
    if (points) drawSpark(tile.graph, points);
  }

  update(processes) {
    const workers = processes.filter((process) => !["frontend", "router"].includes(process.role));
    const serving = workers.filter((process) => process.health === "serving").length;
    const down = workers.length - serving;
    this.set(4, `${serving}`, `of ${workers.length}`, down ? `${down} not serving` : "all workers serve");
    this.tiles[4].value.style.color = down ? "var(--bad)" : "";
    const running = [...store.requests.values()].filter((request) => request.state === null);
    const waiting = workers.reduce((sum, process) => sum + process.waiting, 0);
    this.set(3, number(running.length), "", `${waiting} waiting in engines`);
  }

  async load() {
    let series;
    try { series = await getJson("/api/series"); } catch { return; }
    const of = (roles) => series.groups.filter((group) => roles.includes(group.role));
    const outer = of(["frontend"]).length ? of(["frontend"]) : of(["decode", "aggregated", "embed"]);
    const requests = summed(series, outer, (bucket) => bucket.requests);
    const failed = summed(series, outer, (bucket) => bucket.failed);
    const tokens = summed(series, of(["decode", "aggregated"]), (bucket) => bucket.tokens);
    const recent = (values) => (values.at(-2) + values.at(-3)) / 2 / series.bucket_s;
    this.set(0, rate(recent(requests)), "per s", `${number(sum(requests.slice(-61)))} in 5 min`, requests);
    this.set(1, rate(recent(tokens)), "per s", "generated", tokens);
    const latest = [...store.requests.values()].filter((request) => request.first_token_us !== null).slice(-100).map((request) => request.first_token_us).sort((a, b) => a - b);
    const at = (fraction) => latest[Math.min(latest.length - 1, Math.floor(latest.length * fraction))];
    this.set(2, ...(latest.length ? [...duration(at(0.5)).split(" ")] : ["–", ""]), latest.length ? `95% within ${duration(at(0.95))}` : "no request yet");
    const bad = sum(failed.slice(-61));
    const all = sum(requests.slice(-61));
    this.set(5, number(bad), "", all ? `${((bad / all) * 100).toFixed(bad && bad / all < 0.1 ? 1 : 0)}% in 5 min` : "in 5 min", failed);
    this.tiles[5].value.style.color = bad ? "var(--bad)" : "";
  }
}

const sum = (values) => values.reduce((all, each) => all + each, 0);

function summed(series, groups, value) {
  const count = Math.round((series.end_s - series.begin_s) / series.bucket_s);
  const values = new Array(count).fill(0);
  for (const group of groups) for (const bucket of group.buckets) values[Math.round((bucket.t - series.begin_s) / series.bucket_s)] += value(bucket);
  return values;
}

function drawSpark(graph, all) {
  const values = all.slice(-61, -1);
  const top = Math.max(...values, 1e-9) * 1.15;
  const points = values.map((value, index) => `${((index / (values.length - 1)) * 100).toFixed(1)},${(40 - (value / top) * 38).toFixed(1)}`);
  graph.replaceChildren(svg("polygon", { class: "spark-area", points: `0,40 ${points.join(" ")} 100,40` }), svg("polyline", { class: "spark", points: points.join(" ") }));
}
