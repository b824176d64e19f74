// Latency and throughput over the last minutes, by role and pool, against the targets of the router.

import { Chart } from "./chart.js";
import { duration, h, number, percentile, rate, replace } from "./dom.js";
import { getJson, store } from "./store.js";

const REFRESH_MS = 2000;
const LATENCIES = [["first_token", "First token", "median, and the band to 95%"], ["gap", "Token gap", "time between two tokens"], ["queue", "Queue", "waiting for the engine"], ["kv", "KV transfer", "from the claim to the last block"]];
const WINDOWS = { "5 min": 300, "15 min": 900 };

export function latencyPage(root) {
  const hidden = new Set();
  let seconds = 300;
  let timer = null;
  let known = "";
  const charts = Object.fromEntries(LATENCIES.map(([kind, title, about]) => [kind, new Chart(title, about, (us) => duration(us))]));
  charts.requests = new Chart("Requests", "finished per second", (value) => rate(value));
  charts.tokens = new Chart("Tokens", "generated per second", (value) => rate(value));
  const keys = h("div.series-keys", { role: "group", "aria-label": "Roles and pools" });
  const windows = h("div.filters", { role: "group", "aria-label": "Time shown" }, Object.entries(WINDOWS).map(([name, value]) => h("button", { type: "button", "aria-pressed": String(value === seconds), onclick: (event) => {
    seconds = value;
    for (const button of windows.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
    load();
  } }, name)));
  const pools = h("section.pools.card", { tabIndex: 0, "aria-label": "Targets" });
  replace(root, h("h1.sr", {}, "Latency and throughput"), h("div.toolbar", {}, windows, keys), h("div.plots", {}, Object.values(charts).map((chart) => chart.element)), pools);

  async function load() {
    let series;
    try { series = await getJson(`/api/series?merged=${seconds > 300 ? 6 : 3}`); } catch { return; }
    const groups = named(series.groups);
    drawKeys(groups);
    const shown = groups.filter((group) => !hidden.has(group.name));
    const begin = Math.max(series.begin_s, series.end_s - seconds);
    const frame = { begin, end: series.end_s, bucket: series.bucket_s };
    const requests = [...store.requests.values()];
    const targets = { first_token: commonTarget(requests, "target_ttft_ms"), gap: commonTarget(requests, "target_itl_ms") };
    const within = (group) => group.buckets.filter((bucket) => bucket.t >= begin);
    for (const [kind] of LATENCIES) {
      const list = shown.map((group) => ({ ...group, points: within(group).filter((bucket) => bucket[kind]).map((bucket) => [bucket.t, ...bucket[kind]]) })).filter((each) => each.points.length);
      charts[kind].update({ ...frame, series: list, target: targets[kind] });
    }
    const perSecond = (field, roles) => shown.filter((group) => roles.includes(group.role)).map((group) => ({ ...group, points: within(group).filter((bucket) => bucket.t < series.end_s - series.bucket_s).map((bucket) => [bucket.t, bucket[field] / series.bucket_s]) }));
    charts.requests.update({ ...frame, series: perSecond("requests", shown.map((group) => group.role)) });
    charts.tokens.update({ ...frame, series: perSecond("tokens", ["decode", "aggregated"]) });
    drawPools(pools, shown, within, requests);
  }

  function drawKeys(groups) {
    const now = JSON.stringify(groups.map((group) => group.name));
    if (now === known) return;
    known = now;
    replace(keys, groups.map((group) => {
      const button = h("button", { type: "button", "aria-pressed": String(!hidden.has(group.name)), class: group.dashed ? "dashed" : "", style: { "--series": `var(--${group.color})` }, onclick: () => {
        if (hidden.has(group.name)) hidden.delete(group.name); else hidden.add(group.name);
        button.setAttribute("aria-pressed", String(!hidden.has(group.name)));
        load();
      } }, h("i"), group.name);
      return button;
    }));
  }

  return {
    show() { load(); timer ??= setInterval(load, REFRESH_MS); },
    hide() { clearInterval(timer); timer = null; },
  };
}

// The second pool of a role has the role's colour too, dashed.
function named(groups) {
  const seen = {};
  return groups.map((group) => {
    const count = (seen[group.role] = (seen[group.role] ?? 0) + 1);
    return { ...group, name: group.pool ? `${group.role} ${group.pool}` : group.role, color: group.role === "worker" ? "aggregated" : group.role, dashed: count % 2 === 0 };
  });
}

// The target that most of the latest requests had, in µs.
function commonTarget(requests, field) {
  const found = requests.map((request) => request[field]).filter((value) => value !== null);
  return found.length ? percentile(found, 0.5) * 1000 : null;
}

function drawPools(element, groups, within, requests) {
  const head = ["", "Requests", "Failed", "First token", "95%", "Token gap", "95%", "Queue", "First token met", "Token gap met"];
  const rows = groups.map((group) => {
    const buckets = within(group);
    const of = (kind, index) => percentile(buckets.filter((bucket) => bucket[kind]).map((bucket) => bucket[kind][index]), 0.5);
    const total = buckets.reduce((sum, bucket) => sum + bucket.requests, 0);
    const failed = buckets.reduce((sum, bucket) => sum + bucket.failed, 0);
    const [ttft, itl] = met(requests, group);
    return h("tr", { style: { "--series": `var(--${group.color})` } }, h("td", {}, h("i"), group.name), h("td", {}, number(total)), h("td", {}, failed ? h("span.chip.bad", {}, number(failed)) : "0"),
      h("td", {}, duration(of("first_token", 0))), h("td.muted", {}, duration(of("first_token", 1))), h("td", {}, duration(of("gap", 0))), h("td.muted", {}, duration(of("gap", 1))), h("td", {}, duration(of("queue", 0))), h("td", {}, metChip(ttft)), h("td", {}, metChip(itl)));
  });
  const targets = requests.some((request) => request.target_ttft_ms !== null || request.target_itl_ms !== null);
  replace(element, h("h2", {}, "Which pool met its targets"), h("p.muted", {}, targets ? "Shares of the latest requests that were within the targets that the router had for them." : "No router has set targets for these requests. With a global router, `--default-ttft-ms` and `--default-itl-ms` set them."),
    h("table", {}, h("thead", {}, h("tr", {}, head.map((title, index) => h("th", { scope: "col" }, index ? title : h("span.sr", {}, "Role and pool"))))), h("tbody", {}, rows)));
}

function met(requests, group) {
  const through = requests.filter((request) => request.state === "completed" && (group.pool ? request.pools.includes(group.pool) : true) && request.processes.some((name) => store.processes.get(name)?.role === group.role));
  const share = (target, value) => {
    const judged = through.filter((request) => request[target] !== null && request[value] !== null);
    return judged.length ? judged.filter((request) => request[value] <= request[target] * 1000).length / judged.length : null;
  };
  return [share("target_ttft_ms", "first_token_us"), share("target_itl_ms", "gap_us")];
}

function metChip(share) {
  if (share === null) return h("span.muted", {}, "–");
  const kind = share >= 0.95 ? "good" : share >= 0.8 ? "warn" : "bad";
  return h("span.chip", { class: kind }, `${Math.floor(share * 100)}%`);
}
