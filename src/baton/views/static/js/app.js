// The frame of all pages: which one is shown, the theme, the connection, and keys.

import { hideTooltip, text } from "./dom.js";
import { chatPage } from "./chat.js";
import { closeDrawer } from "./process.js";
import { latencyPage } from "./latency.js";
import { requestsPage } from "./requests.js";
import { store } from "./store.js";
import { topologyPage } from "./topology.js";

const PAGES = { topology: topologyPage, requests: requestsPage, latency: latencyPage, chat: chatPage };
const KEYS = { 1: "topology", 2: "requests", 3: "latency", 4: "chat" };
const shown = { name: null };
const pages = {};

function page(name) {
  pages[name] ??= PAGES[name](document.getElementById(`page-${name}`));
  return pages[name];
}

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const target = Object.hasOwn(PAGES, name) ? name : "topology";
  if (shown.name !== target) {
    if (shown.name) page(shown.name).hide();
    shown.name = target;
    for (const each of Object.keys(PAGES)) document.getElementById(`page-${each}`).hidden = each !== target;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.dataset.page === target) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${target[0].toUpperCase()}${target.slice(1)} · Baton`;
    hideTooltip();
    closeDrawer();
    scrollTo(0, 0);
  }
  page(target).show(rest.map(decodeURIComponent).join("/"));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("themechange"));
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  setTheme(chosen() ?? (system.matches ? "dark" : "light"));
  system.addEventListener("change", () => { if (!chosen()) setTheme(system.matches ? "dark" : "light"); });
  document.getElementById("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", theme); } catch { /* a browser that keeps nothing */ }
    setTheme(theme);
  });
}

function showState() {
  const live = document.getElementById("live");
  live.dataset.state = store.state;
  text(live.lastElementChild, { live: "live", lost: "connection lost", connecting: "connecting" }[store.state]);
}

function showDeployment() {
  const models = new Set([...store.processes.values()].map((process) => process.model).filter(Boolean));
  text(document.getElementById("deployment"), [...models].slice(0, 3).join(", "));
}

startTheme();
addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in KEYS) location.hash = `#/${KEYS[event.key]}`;
  if (event.key === "Escape") closeDrawer();
});
store.addEventListener("state", showState);
store.addEventListener("change", showDeployment);
route();
store.connect();
