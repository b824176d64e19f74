// The latest requests, and one of them across all processes.

import { ago, bytes, copyButton, duration, h, hideTooltip, number, percentile, replace, shortName } from "./dom.js";
import { getJson, store } from "./store.js";
import { causeOf, eventTable, gapStrip, phaseLegend, waterfall } from "./timeline.js";

const MAX_ROWS = 150;
const DRAW_MS = 500;
const BAD = ["failed", "refused", "expired", "lost"];
const SORTS = { newest: (a, b) => b.started_us - a.started_us, "slowest first token": (a, b) => (b.first_token_us ?? -1) - (a.first_token_us ?? -1), "longest gap": (a, b) => (b.gap_max_us ?? -1) - (a.gap_max_us ?? -1), longest: (a, b) => b.duration_us - a.duration_us };

// A request is slow if it missed its targets or, without targets, if it is among the slowest twentieth.
export function slowTest(requests) {
  const limit = percentile(requests.map((request) => request.first_token_us).filter((value) => value !== null), 0.95) ?? Infinity;
  return (request) => {
    const missed = (us, targetMs) => us !== null && targetMs !== null && us > targetMs * 1000;
    if (request.target_ttft_ms !== null || request.target_itl_ms !== null) return missed(request.first_token_us, request.target_ttft_ms) || missed(request.gap_us, request.target_itl_ms);
    return request.first_token_us !== null && request.first_token_us >= limit;
  };
}

export const isBad = (request) => BAD.includes(request.state);

export function requestsPage(root) {
  const filter = { kind: "all", words: "", sort: "newest", paused: false };
  const counts = {};
  const body = h("tbody");
  const rows = new Map();
  const detail = new Detail(() => { location.hash = "#/requests"; });
  const pause = h("button.button.small", { type: "button", "aria-pressed": "false", onclick: () => setPaused(!filter.paused) }, "Pause list");
  const kinds = h("div.filters", { role: "group", "aria-label": "Which requests" }, ["all", "running", "slow", "failed"].map((kind) => {
    counts[kind] = h("span.count");
    return h("button", { type: "button", "data-kind": kind, "aria-pressed": String(kind === "all"), onclick: () => choose(kind) }, kind[0].toUpperCase() + kind.slice(1), counts[kind]);
  }));
  const search = h("input.input", { type: "search", placeholder: "Trace id, worker, model, error", "aria-label": "Search in requests", oninput: () => { filter.words = search.value.trim().toLowerCase(); draw(); } });
  const sort = h("select.input", { "aria-label": "Order", onchange: () => { filter.sort = sort.value; draw(); } }, Object.keys(SORTS).map((name) => h("option", { value: name }, name[0].toUpperCase() + name.slice(1))));
  const none = h("div.empty", { hidden: true });
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Request"), h("th", { scope: "col" }, "Tokens"), h("th", { scope: "col" }, "First token"), h("th.wide", { scope: "col" }, "Gap"), h("th.wide", { scope: "col" }, "Path"), h("th", { scope: "col" }, "Total")));
  const list = h("div", {}, h("div.list.card", {}, h("div.list-scroll", { tabIndex: 0, role: "region", "aria-label": "List of requests" }, h("table.requests", {}, head, body), none)));
  replace(root, h("h1.sr", {}, "Requests"), h("div.toolbar", {}, kinds, search, sort, pause), h("div.split", {}, list, detail.element));
  let visible = false;
  let timer = null;

  function setPaused(paused) {
    filter.paused = paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Continue list" : "Pause list";
    if (!paused) draw();
  }

  function choose(kind) {
    filter.kind = kind;
    for (const button of kinds.children) button.setAttribute("aria-pressed", String(button.dataset.kind === kind));
    draw();
  }

  function draw() {
    const all = [...store.requests.values()];
    const slow = slowTest(all);
    const tests = { all: () => true, running: (request) => request.state === null, slow, failed: isBad };
    for (const [kind, test] of Object.entries(tests)) counts[kind].textContent = number(all.filter(test).length);
    const found = all.filter(tests[filter.kind]).filter((request) => matches(request, filter.words)).sort(SORTS[filter.sort]).slice(0, MAX_ROWS);
    const shown = new Set(found.map((request) => request.id));
    for (const [id, row] of rows) if (!shown.has(id)) { row.element.remove(); rows.delete(id); }
    let place = body.firstElementChild;
    for (const request of found) {
      const row = rows.get(request.id) ?? new Row(request.id);
      rows.set(request.id, row);
      row.update(request, slow(request), request.id === detail.id);
      if (row.element === place) place = place.nextElementSibling;
      else body.insertBefore(row.element, place);
    }
    none.hidden = found.length > 0;
    none.textContent = all.length ? "No request matches." : "No request yet. Send one from the chat, or to the endpoint.";
  }

  store.addEventListener("change", (event) => {
    if (visible && detail.id && event.detail.requests.some((request) => request.id === detail.id)) detail.refresh();
  });
  return {
    show(id) {
      visible = true;
      detail.open(id || null);
      draw();
      timer ??= setInterval(() => { if (!filter.paused) draw(); }, DRAW_MS);
    },
    hide() { visible = false; clearInterval(timer); timer = null; hideTooltip(); },
  };
}

function matches(request, words) {
  if (!words) return true;
  return [request.id, request.model, request.error_code, request.state, ...request.processes, ...request.pools].some((value) => value?.toLowerCase().includes(words));
}

class Row {
  constructor(id) {
    this.state = h("i.state", { "aria-hidden": "true" });
    this.stateText = h("span.sr");
    this.when = h("span.when");
    this.cells = ["td", "td", "td.wide", "td.wide", "td"].map((tag) => h(tag));
    this.link = h("button.open", { type: "button" }, this.state, this.stateText, id.slice(0, 10), this.when);
    this.element = h("tr", { onclick: () => { location.hash = `#/requests/${encodeURIComponent(id)}`; } }, h("td", {}, this.link), this.cells);
    this.seen = "";
  }

  update(request, slow, selected) {
    this.element.setAttribute("aria-selected", String(selected));
    const when = ago(request.started_us, store.now());
    if (this.when.textContent !== when) this.when.textContent = when;
    const seen = JSON.stringify([request, slow]);
    if (seen === this.seen) return;
    this.seen = seen;
    this.state.className = `state state-${request.state ?? "running"}`;
    this.stateText.textContent = `${request.state ?? "running"} request `;
    const [tokens, first, gap, path, total] = this.cells;
    tokens.textContent = `${number(request.prompt_tokens)} → ${number(request.completion_tokens)}`;
    first.textContent = duration(request.first_token_us);
    first.className = slow ? "slow" : "";
    gap.textContent = duration(request.gap_us);
    replace(path, h("span.path", { title: request.processes.map(shortName).join(" → ") }, request.processes.map((name) => h("i", { class: `role-${store.processes.get(name)?.role ?? "frontend"}` }))));
    replace(total, request.error_code ? h("span.chip.bad", {}, request.error_code) : duration(request.duration_us));
  }
}

class Detail {
  constructor(onClose) {
    this.id = null;
    this.loading = false;
    this.onClose = onClose;
    this.element = h("article.detail.card.none", { "aria-label": "Request", "aria-live": "off" });
    this.timer = null;
  }

  open(id) {
    if (id === this.id && id !== null) return;
    this.id = id;
    this.element.classList.toggle("none", id === null);
    if (id === null) replace(this.element, h("div.empty", {}, h("h2", {}, "Select a request"), "Its way through every process appears here."));
    else this.refresh();
  }

  async refresh() {
    if (this.loading || this.id === null) return;
    this.loading = true;
    const id = this.id;
    try {
      const trace = await getJson(`/api/requests/${encodeURIComponent(id)}`);
      if (id === this.id) this.draw(trace);
    } catch (error) {
      if (id === this.id) replace(this.element, this.back(), h("div.empty", {}, error.message));
    } finally {
      this.loading = false;
    }
    if (id !== this.id) this.refresh();
  }

  back() { return h("button.button.small.back", { type: "button", onclick: this.onClose }, "← All requests"); }

  draw(trace) {
    const opened = this.element.querySelector("details")?.open;
    const scroll = this.element.scrollTop;
    replace(this.element, requestHead(trace, this.back()), requestBody(trace));
    const details = this.element.querySelector("details");
    if (opened && details) details.open = true;
    this.element.scrollTop = scroll;
  }
}

function requestHead(trace, back) {
  const request = store.requests.get(trace.id);
  const state = request ? request.state : trace.hops[0].state;
  const kind = state === null ? "accent" : state === "completed" ? "good" : ["cancelled", "unknown"].includes(state) ? "warn" : "bad";
  return h("div", {}, h("div.detail-head", {}, back, h("h2", {}, request?.model ?? trace.hops[0].model ?? "Request"), h("span.chip", { class: kind }, state ?? "running"), request?.retries ? h("span.chip.warn", {}, `${request.retries} retried`) : null, (request?.pools ?? []).map((pool) => h("span.chip", {}, `pool ${pool}`))),
    h("div.trace-id", {}, h("span.muted", {}, "Trace"), h("code", {}, trace.trace_id), copyButton(trace.trace_id, "Copy the trace id")));
}

// What the inspector and the chat show of a request.
export function requestBody(trace) {
  const request = store.requests.get(trace.id);
  const hops = trace.hops;
  const failed = causeOf(hops.filter((hop) => hop.error));
  const answering = [...hops].reverse().find((hop) => hop.gaps_us.length && ["decode", "aggregated"].includes(hop.role)) ?? hops.find((hop) => hop.gaps_us.length);
  return [
    failed ? h("div.callout", { role: "note" }, h("b", {}, failed.error.code), ` in ${shortName(failed.process)}: ${failed.error.message}`) : null,
    request ? numbers(request) : null,
    waterfall(hops, trace.now_us),
    phaseLegend(hops, trace.now_us),
    answering ? gapStrip(answering.gaps_us, answering.outputs_per_gap, request?.target_itl_ms) : null,
    eventTable(hops),
  ];
}

function numbers(request) {
  const target = (ms) => (ms ? h("small", {}, ` of ${ms} ms`) : null);
  const speed = request.gap_us ? `${(1e6 / request.gap_us).toFixed(0)} tok/s` : null;
  const fact = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, ...value));
  return h("dl.numbers", {},
    fact("First token", duration(request.first_token_us), target(request.target_ttft_ms)),
    fact("Token gap", duration(request.gap_us), target(request.target_itl_ms) ?? (speed ? h("small", {}, ` ${speed}`) : null)),
    fact("Queued", duration(request.queue_us)),
    fact("Prompt", number(request.prompt_tokens), request.cached_tokens ? h("small", {}, ` ${number(request.cached_tokens)} cached`) : null),
    fact("Output", number(request.completion_tokens), h("small", {}, " tokens")),
    request.kv_bytes ? fact("Moved", bytes(request.kv_bytes)) : null,
    fact("Total", duration(request.duration_us)));
}
