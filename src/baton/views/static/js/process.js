// The panel of one process: what it is, what it does, its last errors, and the commands that it takes.

import { ago, bytes, h, replace, uptime } from "./dom.js";
import { getJson, store } from "./store.js";

const REFRESH_MS = 2000;
const ARMED_MS = 4000;
const drawer = document.getElementById("drawer");
const opened = { name: null, from: null, timer: null, outcome: null };

// What each button sends. Those that end or hold up requests ask a second time.
const COMMANDS = [
  { label: "Drain", command: "pause", body: { mode: "drain" }, confirm: true, hint: "Finish running requests, take no new ones" },
  { label: "Pause", command: "pause", body: { mode: "keep" }, confirm: true, hint: "Stop between two steps; requests keep their KV" },
  { label: "Continue", command: "continue", body: {}, hint: "Continue after a pause" },
  { label: "Clear cache", command: "cache/clear", body: {}, hint: "Free every KV block that could be reused" },
  { label: "Release memory", command: "memory/release", body: {}, confirm: true, hint: "Return weights and KV to the machine" },
  { label: "Resume memory", command: "memory/resume", body: {}, hint: "Allocate weights and KV again" },
  { label: "Profile 50 steps", command: "profile/start", body: { directory: "/tmp/baton-profile", steps: 50 }, hint: "Written to /tmp/baton-profile on the machine of the process" },
  { label: "Stop profile", command: "profile/stop", body: {}, hint: "Write the profile now" },
];

export function openProcess(name, from) {
  closeDrawer();
  Object.assign(opened, { name, from, outcome: null });
  from?.setAttribute("aria-expanded", "true");
  drawer.hidden = false;
  document.body.classList.add("with-drawer");
  replace(drawer, h("p.muted", {}, "Loading…"));
  refresh(true);
  opened.timer = setInterval(() => refresh(false), REFRESH_MS);
}

export function closeDrawer() {
  if (opened.name === null) return;
  clearInterval(opened.timer);
  drawer.hidden = true;
  document.body.classList.remove("with-drawer");
  opened.from?.setAttribute("aria-expanded", "false");
  if (drawer.contains(document.activeElement)) opened.from?.focus();
  opened.name = null;
}

async function refresh(first) {
  const name = opened.name;
  let details;
  try {
    details = await getJson(`/api/processes/${name.split("/").map(encodeURIComponent).join("/")}/about`);
  } catch (error) {
    details = { name, about: null, problem: error.message, controllable: false };
  }
  if (opened.name !== name) return;
  const focused = drawer.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  // A select that is open, or a button that waits for its second click, stays as it is.
  if (!first && drawer.querySelector("[data-armed]")) return;
  show(details);
  const target = focused ? drawer.querySelector(`[data-key="${focused}"]`) : first ? drawer.querySelector("[data-key=close]") : null;
  target?.focus({ preventScroll: true });
}

function show({ name, about, problem, controllable, url }) {
  const known = store.processes.get(name);
  const health = known?.health ?? "gone";
  const kind = { serving: "good", paused: "warn", draining: "warn", starting: "warn" }[health] ?? "bad";
  const process = about?.process ?? known ?? {};
  drawer.className = `drawer role-${process.role}`;
  replace(drawer,
    h("header", {}, h("div", {}, h("h2", {}, known?.short ?? name), h("div.chips", {}, h("span.chip", { class: kind }, health), h("span.chip", {}, process.role ?? ""), known?.pool ? h("span.chip", {}, `pool ${known.pool}`) : null)),
      h("button.icon-button", { type: "button", "aria-label": "Close", "data-key": "close", onclick: closeDrawer }, "✕")),
    problem ? h("p.outcome.bad", { role: "alert" }, health === "gone" ? "The process has exited." : `No report: ${problem}`) : null,
    health === "gone" && !problem ? h("p.outcome.bad", { role: "alert" }, "The process has exited. A supervisor that runs starts it again.") : null,
    section("Process", facts({
      Model: process.model, Engine: process.engine, Address: url, Process: process.pid ? `${process.pid} on ${process.host}` : null,
      "Runs for": process.started_unix_s ? uptime(store.now() / 1e6 - process.started_unix_s) : null, "In flight": about ? String(about.in_flight) : null,
    })),
    about?.load?.length ? section("Load", about.load.map(rank)) : null,
    about ? commandSection(name, about, controllable) : null,
    about ? section("Last errors", errorList(about.last_errors)) : null,
    about && Object.keys(about.transfers).length ? section("Fetched from other workers", facts(Object.fromEntries(Object.entries(about.transfers).map(([way, size]) => [way, bytes(size)])))) : null,
    about && Object.keys(about.rooms).length ? section("Rooms", facts(Object.fromEntries(Object.entries(about.rooms).map(([state, count]) => [state, String(count)])))) : null,
    about && Object.keys(about.settings).length ? section("Settings that differ from their defaults", facts(flat(about.settings))) : null,
    about && Object.keys(about.capabilities).length ? section("Capabilities", capabilities(about.capabilities)) : null);
}

const section = (title, ...content) => h("section", {}, h("h3", {}, title), ...content);

function facts(values) {
  const known = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl.facts", {}, known.map(([name, value]) => [h("dt", {}, name), h("dd", { class: name === "Address" ? "mono" : "" }, value)]));
}

function flat(settings, prefix = "") {
  return Object.assign({}, ...Object.entries(settings).map(([name, value]) => (value && typeof value === "object" && !Array.isArray(value) ? flat(value, `${prefix}${name}.`) : { [prefix + name]: String(value) })));
}

function rank(load, _, all) {
  const use = load.total_blocks ? load.used_blocks / load.total_blocks : 0;
  const title = all.length > 1 ? `Rank ${load.rank}: ` : "";
  return [
    h("div.meter", { role: "img", "aria-label": `${Math.round(use * 100)}% of KV blocks in use` }, h("i", { style: { width: `${use * 100}%` } })),
    h("span.muted", {}, `${title}${load.used_blocks} of ${load.total_blocks} KV blocks, ${load.running} running, ${load.waiting} waiting`),
  ];
}

function commandSection(name, about, controllable) {
  const offered = COMMANDS.filter((each) => about.commands.includes(each.command));
  if (!offered.length) return null;
  if (!controllable) return section("Commands", h("p.muted", {}, "The view has no token of this process: set BATON_CONTROL_TOKEN."));
  return section("Commands", h("div.commands", {}, offered.map((each) => commandButton(name, each))), h("div", { role: "status" }, opened.outcome));
}

function commandButton(name, each) {
  const button = h("button.button.small", { type: "button", title: each.hint, "data-key": each.label }, each.label);
  button.addEventListener("click", () => {
    if (each.confirm && !("armed" in button.dataset)) {
      button.dataset.armed = "";
      button.classList.add("danger");
      button.textContent = `Really ${each.label.toLowerCase()}?`;
      setTimeout(() => { delete button.dataset.armed; button.classList.remove("danger"); button.textContent = each.label; }, ARMED_MS);
      return;
    }
    delete button.dataset.armed;
    execute(name, each, button);
  });
  return button;
}

async function execute(name, each, button) {
  button.disabled = true;
  opened.outcome = h("p.outcome", {}, `${each.label}…`);
  drawer.querySelector("[role=status]")?.replaceChildren(opened.outcome);
  const path = `/api/processes/${name.split("/").map(encodeURIComponent).join("/")}/commands/${each.command}`;
  try {
    const outcome = await getJson(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(each.body) });
    opened.outcome = h("p.outcome.good", {}, outcome.message, outcome.path ? ` (${outcome.path})` : "");
  } catch (error) {
    opened.outcome = h("p.outcome.bad", {}, error.message);
  }
  if (opened.name === name) refresh(false);
}

function errorList(errors) {
  if (!errors.length) return h("p.muted", {}, "None.");
  return h("ul.errors", {}, [...errors].reverse().slice(0, 8).map((error) => h("li", {}, h("b", {}, error.code), ` ${ago(error.unix_us, store.now())}`, h("br"), error.message)));
}

function capabilities(values) {
  const shown = Object.entries(flat(values)).filter(([, value]) => value !== "false" && value !== "null" && value !== "");
  return h("div.chips", {}, shown.map(([name, value]) => h("span.chip", {}, value === "true" ? name.replaceAll("_", " ") : `${name.replaceAll("_", " ")}: ${value}`)));
}

