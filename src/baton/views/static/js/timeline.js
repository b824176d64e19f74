// One request as a timeline across all its hops: bars for what each process did, marks for what happened.

import { bytes, duration, h, hideTooltip, percentile, shortName, showTooltip, svg } from "./dom.js";

// What a process was doing until each event.
const UNTIL = { admitted: "prepare", media_fetched: "media", encoded: "encode", submitted: "prepare", queued: "prepare", first_step: "queue", prefill_chunk: "prefill", kv_claimed: "prepare", kv_moved: "move", forwarded: "prepare", pool_selected: "route", retried: "retry" };
const TITLES = { prepare: "preparing", media: "fetching media", encode: "encoding media", queue: "queued", prefill: "prefill", move: "receiving KV", decode: "decoding", wait: "waiting", stream: "streaming", hold: "KV held for decode", route: "selecting a pool", retry: "failed attempt" };
const LEGEND = ["prepare", "media", "encode", "queue", "prefill", "move", "decode", "hold"];
const INSTANTS = ["kv_offered"];
const GENERATES = ["decode", "aggregated", "worker", "embed"];
const FLAT = ["wait", "stream", "hold"];

// The bars of a hop, in µs since its start.
export function segments(hop, nowUs) {
  const end = hop.state === null ? Math.max(hop.duration_us ?? 0, nowUs - hop.started_us) : hop.duration_us;
  const events = hop.events.filter(([, phase]) => !INSTANTS.includes(phase));
  const found = [];
  let at = 0;
  let chunk = 0;
  let reached = "received";
  for (const [offset, phase, detail] of events) {
    if (phase === "received") continue;
    const kind = phase === "finished" ? after(hop, reached) : phase === "first_token" ? beforeFirstToken(hop, reached) : UNTIL[phase] ?? "prepare";
    if (offset > at) found.push({ kind, begin: at, end: offset, detail, phase, odd: kind === "prefill" && chunk % 2 === 1 });
    if (phase === "prefill_chunk") chunk += 1;
    at = Math.max(at, offset);
    reached = phase;
  }
  if (end > at && reached !== "finished") found.push({ kind: after(hop, reached), begin: at, end, detail: {}, phase: "", open: hop.state === null });
  return { bars: found, end: Math.max(end, at) };
}

function beforeFirstToken(hop, reached) {
  if (["forwarded", "pool_selected", "retried"].includes(reached)) return "wait";
  if (reached === "kv_claimed") return "move";
  if (hop.role === "decode") return "decode";
  return ["first_step", "prefill_chunk"].includes(reached) ? "prefill" : "wait";
}

function after(hop, reached) {
  if (reached === "first_token") return GENERATES.includes(hop.role) ? "decode" : hop.role === "prefill" ? "hold" : "stream";
  if (["submitted", "queued"].includes(reached)) return "queue";
  if (["first_step", "prefill_chunk"].includes(reached)) return hop.role === "decode" ? "decode" : "prefill";
  if (reached === "kv_claimed") return "move";
  if (reached === "kv_moved") return GENERATES.includes(hop.role) ? "queue" : "hold";
  if (["forwarded", "pool_selected", "retried"].includes(reached)) return "wait";
  return "prepare";
}

const isBad = (hop) => ["failed", "refused", "expired", "lost"].includes(hop.state);

// The hop where a request failed first: the others report the same, or that this one has failed.
export function causeOf(hops) {
  const failed = hops.filter((hop) => hop.error || hop.state === "lost");
  const end = (hop) => hop.started_us + (hop.duration_us ?? 0);
  return failed.sort((a, b) => end(a) - end(b))[0] ?? null;
}

// The whole request: axis, a lane for each hop, and arrows for KV and media.
export function waterfall(hops, nowUs) {
  const begin = Math.min(...hops.map((hop) => hop.started_us));
  const parts = hops.map((hop) => segments(hop, nowUs));
  const total = Math.max(1, ...hops.map((hop, index) => hop.started_us - begin + parts[index].end));
  const place = (us) => `${((us / total) * 100).toFixed(3)}%`;
  const element = h("div.waterfall", { role: "group", "aria-label": "Timeline", style: { "--tick": `${(tick(total) / total) * 100}%` } }, axis(total));
  const cause = causeOf(hops);
  const lanes = [];
  hops.forEach((hop, index) => {
    const shift = hop.started_us - begin;
    const lane = h("div.lane", { class: `role-${hop.role}` }, parts[index].bars.map((bar) => segmentElement(bar, shift, total, place, hop)), marks(hop, shift, place));
    lanes.push(lane);
    element.append(h("div.lane-label", { class: `role-${hop.role}`, title: hop.process }, h("i"), h("span", {}, laneName(hop))), lane);
    if (isBad(hop) && (hop === cause || !hop.error || hop.error.message !== cause?.error?.message)) element.append(h("div.lane-note", {}, hop.error ? `${hop.error.code}: ${hop.error.message}` : "The process ended before the request did."));
  });
  drawLinks(element, hops, lanes, begin, total);
  return element;
}

// A round distance between the marks of the axis, of which there are at most seven.
function tick(total) {
  const power = 10 ** Math.floor(Math.log10(total / 6));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => total / step <= 6.5);
}

// A router serves each role by itself, so one request may pass it twice.
const laneName = (hop) => (hop.role === "router" && hop.served_role !== "router" ? `${shortName(hop.process)}: ${hop.served_role}` : shortName(hop.process));

function axis(total) {
  const step = tick(total);
  const places = Array.from({ length: Math.floor(total / step) + 1 }, (_, index) => index * step);
  return h("div.axis", { "aria-hidden": "true" }, places.map((at) => h("span", { class: at / total > 0.93 ? "late" : "", style: { left: `${(at / total) * 100}%` } }, at ? duration(at) : "0")));
}

function segmentElement(bar, shift, total, place, hop) {
  const share = (bar.end - bar.begin) / total;
  const flat = FLAT.includes(bar.kind);
  const classes = [`seg-${bar.kind}`, flat ? "flat" : "", bar.odd ? "odd" : "", bar.open ? "open-ended" : "", share < 0.05 ? "narrow" : ""].filter(Boolean).join(" ");
  const label = flat || share < (bar.kind === "prefill" ? 0.05 : 0.14) ? "" : barLabel(bar);
  const element = h("div.segment", { class: classes, style: { left: place(shift + bar.begin), width: place(bar.end - bar.begin) } }, label);
  const about = () => h("div", {}, h("b", {}, TITLES[bar.kind]), ` in ${shortName(hop.process)}`, detailList({ took: duration(bar.end - bar.begin), from: duration(bar.begin), ...readable(bar.detail) }));
  element.addEventListener("pointermove", (event) => showTooltip(event.clientX, event.clientY, about()));
  element.addEventListener("pointerleave", hideTooltip);
  return element;
}

function barLabel(bar) {
  if (bar.kind === "move" && bar.detail?.bytes) return `${bar.detail.transport ?? "KV"} ${bytes(bar.detail.bytes)}`;
  if (bar.kind === "prefill" && bar.detail?.tokens) return `${bar.detail.tokens}`;
  return TITLES[bar.kind];
}

function detailList(values) {
  return h("dl", {}, Object.entries(values).map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
}

export function readable(detail) {
  return Object.fromEntries(Object.entries(detail ?? {}).filter(([, value]) => value !== null).map(([name, value]) => {
    if (name === "bytes" || name.endsWith("_bytes")) return [name, bytes(value)];
    if (name.endsWith("_us")) return [name.slice(0, -3), duration(value)];
    if (name.endsWith("_ms")) return [name.slice(0, -3), `${value} ms`];
    return [name, typeof value === "object" ? JSON.stringify(value) : value];
  }));
}

function marks(hop, shift, place) {
  const found = hop.events.filter(([, phase]) => phase === "first_token").slice(0, 1).map(([at]) => h("div.mark.first_token", { title: `first token after ${duration(at)}`, style: { left: place(shift + at) } }));
  if (isBad(hop)) found.push(h("div.mark.error", { title: hop.error?.message ?? hop.state, style: { left: place(shift + (hop.duration_us ?? 0)) } }));
  if (hop.state === "cancelled") found.push(h("div.mark.cancel", { title: `cancelled after ${duration(hop.duration_us)}`, style: { left: place(shift + hop.duration_us) } }));
  return found;
}

// Arrows from the worker that computed KV, or encoded media, to the one that fetched it.
function drawLinks(element, hops, lanes, begin, total) {
  const links = [];
  hops.forEach((hop, index) => {
    const moved = hop.events.find(([, phase]) => phase === "kv_moved");
    const sources = hop.role === "decode" ? ["prefill"] : ["encode"];
    const from = moved ? hops.findLastIndex((other) => sources.includes(other.role)) : -1;
    if (from >= 0) links.push([from, index, (hop.started_us - begin + moved[0]) / total]);
  });
  if (!links.length) return;
  const overlay = svg("svg", { class: "links", "aria-hidden": "true" });
  element.append(overlay);
  const draw = () => {
    const origin = element.getBoundingClientRect();
    if (!origin.width) return;
    overlay.setAttribute("width", origin.width);
    overlay.setAttribute("height", origin.height);
    overlay.style.left = "0";
    overlay.style.top = "0";
    overlay.replaceChildren(...links.map(([from, to, at]) => {
      const [a, b] = [lanes[from].getBoundingClientRect(), lanes[to].getBoundingClientRect()];
      const x = a.left - origin.left + at * a.width;
      const [y0, y1] = from < to ? [a.bottom - origin.top - 9, b.top - origin.top + 9] : [a.top - origin.top + 9, b.bottom - origin.top - 9];
      return svg("path", { d: `M${x - 9},${y0} C${x - 9},${(y0 + y1) / 2} ${x},${(y0 + y1) / 2} ${x},${y1}` });
    }));
  };
  new ResizeObserver(draw).observe(element);
}

export function phaseLegend(hops, nowUs) {
  const used = new Set(hops.flatMap((hop) => segments(hop, nowUs).bars.map((bar) => bar.kind)));
  return h("div.phase-legend", {}, LEGEND.filter((kind) => used.has(kind)).map((kind) => h("span", {}, h("i", { class: `seg-${kind}` }), TITLES[kind])));
}

// The gaps between tokens as a strip: one column for each, high ones in another colour. `taken` has the time of
// `perGap` outputs each.
export function gapStrip(taken, perGap, targetMs) {
  if (!taken.length) return null;
  const gaps = taken.map((each) => each / perGap);
  const [median, high, most] = [percentile(gaps, 0.5), percentile(gaps, 0.95), Math.max(...gaps)];
  const summary = `median ${duration(median)}, 95% within ${duration(high)}, longest ${duration(most)}`;
  const canvas = h("canvas", { role: "img", "aria-label": `Time between tokens: ${summary}` });
  const draw = () => drawGaps(canvas, gaps, median, most, targetMs);
  new ResizeObserver(draw).observe(canvas);
  addEventListener("themechange", draw);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const index = Math.min(gaps.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * gaps.length)));
    showTooltip(event.clientX, event.clientY, h("div", {}, h("b", {}, duration(gaps[index])), ` before output ${index * perGap + 2}`));
  });
  canvas.addEventListener("pointerleave", hideTooltip);
  const merged = perGap > 1 ? `, means of ${perGap} each` : "";
  return h("div.gaps", {}, h("header", {}, h("span", {}, `Token gaps${merged}`), h("span", {}, summary)), canvas);
}

function drawGaps(canvas, gaps, median, most, targetMs) {
  const ratio = Math.min(devicePixelRatio || 1, 2);
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const limit = targetMs ? targetMs * 1000 : median * 2.5;
  const top = Math.max(Math.min(most, median * 8), limit * 1.15);
  const step = width / gaps.length;
  gaps.forEach((gap, index) => {
    const size = Math.max(2, (Math.min(gap, top) / top) * (height - 4));
    context.fillStyle = gap > limit ? color("--phase-retry") : color("--phase-decode");
    context.fillRect(index * step, height - size, Math.max(1, step - (step > 3 ? 1 : 0)), size);
  });
  if (targetMs) {
    const y = height - (limit / top) * (height - 4);
    context.strokeStyle = color("--text");
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
  }
}

// All events as a table, which says in words what the bars show.
export function eventTable(hops) {
  const begin = Math.min(...hops.map((hop) => hop.started_us));
  const rows = hops.flatMap((hop) => hop.events.map(([at, phase, detail]) => ({ at: hop.started_us - begin + at, phase, detail, process: hop.process })));
  rows.sort((a, b) => a.at - b.at);
  return h("details", {}, h("summary", {}, `All ${rows.length} events`), h("table.events-table", {},
    h("thead", {}, h("tr", {}, ["After", "Process", "Event", "Details"].map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, h("td", {}, duration(row.at)), h("td", {}, shortName(row.process)), h("td", {}, row.phase.replaceAll("_", " ")),
      h("td.muted", {}, Object.entries(readable(row.detail)).map(([name, value]) => `${name} ${value}`).join(", ")))))));
}

