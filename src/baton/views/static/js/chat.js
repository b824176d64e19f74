// Talks to the deployment through its own OpenAI endpoint, and shows what each answer does on its way.

import { answer } from "./chat_stream.js";
import { copyButton, duration, h, hideTooltip, replace, shortName, svg } from "./dom.js";
import { formatted } from "./markdown.js";
import { requestBody } from "./requests.js";
import { getJson, store } from "./store.js";

const MAX_PICTURE_BYTES = 20 << 20;
const MODEL_TRIES = 20;
const MODEL_RETRY_MS = 250;
const CANCEL_TRIES = 40;
const CANCEL_RETRY_MS = 250;
const COMPUTES = ["prefill", "decode", "aggregated", "embed"];
const SUGGESTIONS = ["Explain prefill and decode in three sentences.", "Write a haiku about a relay race."];

export function chatPage(root) {
  const talk = new Conversation();
  replace(root, h("h1.sr", {}, "Chat"), h("div.chat", {}, talk.element, talk.beside.element));
  return {
    show() { talk.loadModels(); talk.beside.watch(true); },
    hide() { talk.beside.watch(false); hideTooltip(); },
  };
}

class Conversation {
  constructor() {
    this.turns = [];
    this.pictures = [];
    this.running = null;
    this.beside = new Beside();
    this.list = h("div.messages", { role: "log", "aria-label": "Conversation", tabIndex: 0 }, this.welcome());
    this.thumbnails = h("div.pictures", { hidden: true });
    this.input = h("textarea", { rows: 1, placeholder: "Message", "aria-label": "Message", onkeydown: (event) => this.onKey(event), oninput: () => this.fit(), onpaste: (event) => this.onPaste(event) });
    this.file = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => { this.attach([...this.file.files]); this.file.value = ""; } });
    const clip = svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, svg("rect", { x: 3, y: 4, width: 14, height: 12, rx: 2 }), svg("circle", { cx: 7.5, cy: 8.5, r: 1.4 }), svg("path", { d: "m4 15 4.5-4 3 2.5 2.5-2.5 3 3" }));
    this.send = h("button.button.primary", { type: "button", onclick: () => (this.running ? this.stop() : this.submit()) }, "Send");
    this.problem = h("p.outcome.bad", { role: "alert", hidden: true });
    this.element = h("section.talk.card", { "aria-label": "Conversation" }, this.list, h("div.composer", {}, this.problem, this.thumbnails,
      h("div.row", {}, h("button.icon-button", { type: "button", "aria-label": "Attach a picture", title: "Attach a picture, or paste one", onclick: () => this.file.click() }, clip), this.file, this.input, this.send)));
    this.element.addEventListener("dragover", (event) => { event.preventDefault(); this.element.classList.add("dragging"); });
    this.element.addEventListener("dragleave", () => this.element.classList.remove("dragging"));
    this.element.addEventListener("drop", (event) => { event.preventDefault(); this.element.classList.remove("dragging"); this.attach([...event.dataTransfer.files]); });
  }

  welcome() {
    return h("div.welcome", {}, h("h2", {}, "Ask the model something"), h("p", {}, "The answer streams here; beside it you see which workers it passes, and when."),
      h("div.suggestions", {}, SUGGESTIONS.map((text) => h("button.button", { type: "button", onclick: () => { this.input.value = text; this.submit(); } }, text))));
  }

  // The frontend may not be known yet when the page opens.
  async loadModels(tries = 0) {
    if (![...store.processes.values()].some((process) => process.role === "frontend") && tries < MODEL_TRIES) {
      setTimeout(() => this.loadModels(tries + 1), MODEL_RETRY_MS);
      return;
    }
    try {
      const { data } = await getJson("/api/models");
      this.beside.setModels(data.map((model) => model.id));
    } catch (error) {
      this.complain(`The models of the endpoint cannot be listed: ${error.message}`);
    }
  }

  complain(message) {
    this.problem.hidden = !message;
    this.problem.textContent = message ?? "";
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!this.running) this.submit(); }
    if (event.key === "Escape" && this.running) this.stop();
  }

  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight + 2}px`;
  }

  onPaste(event) {
    const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
    if (files.length) { event.preventDefault(); this.attach(files); }
  }

  attach(files) {
    for (const file of files) {
      if (!file.type.startsWith("image/")) { this.complain(`${file.name} is not a picture.`); continue; }
      if (file.size > MAX_PICTURE_BYTES) { this.complain(`${file.name} is larger than 20 MB.`); continue; }
      const reader = new FileReader();
      reader.addEventListener("load", () => { this.pictures.push(reader.result); this.drawPictures(); });
      reader.readAsDataURL(file);
    }
    this.input.focus();
  }

  drawPictures() {
    this.thumbnails.hidden = !this.pictures.length;
    replace(this.thumbnails, this.pictures.map((url, index) => h("figure", {}, h("img", { src: url, alt: `Attached picture ${index + 1}` }), h("button", { type: "button", "aria-label": `Remove picture ${index + 1}`, onclick: () => { this.pictures.splice(index, 1); this.drawPictures(); } }, "×"))));
  }

  submit() {
    const text = this.input.value.trim();
    if (!text && !this.pictures.length) return;
    this.complain(null);
    const pictures = this.pictures.splice(0);
    this.drawPictures();
    this.input.value = "";
    this.fit();
    if (!this.turns.length) replace(this.list);
    const content = pictures.length ? [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }] : text;
    this.turns.push({ role: "user", content });
    this.list.append(h("div.message.user", {}, h("div.bubble", {}, pictures.map((url) => h("img", { src: url, alt: "Picture in the question" })), text)));
    this.run();
  }

  async run() {
    const turn = new Answer((id) => { for (const each of this.list.querySelectorAll(".selected")) each.classList.remove("selected"); turn.element.classList.add("selected"); this.beside.follow(id); });
    this.list.append(turn.element);
    this.running = turn;
    this.send.textContent = "Stop";
    this.send.classList.replace("primary", "danger");
    const follows = () => this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 80;
    this.list.scrollTop = this.list.scrollHeight;
    const draw = () => { const stay = follows(); turn.draw(); if (stay) this.list.scrollTop = this.list.scrollHeight; };
    try {
      await answer(this.beside.body(this.turns), turn, draw);
      this.turns.push({ role: "assistant", content: turn.text });
    } catch (error) {
      if (turn.stoppedUs === null) turn.fail(error.message);
      if (turn.text) this.turns.push({ role: "assistant", content: turn.text });
      else this.turns.pop();
    }
    turn.end();
    draw();
    this.running = null;
    this.send.textContent = "Send";
    this.send.classList.replace("danger", "primary");
    this.input.focus();
  }

  stop() { this.running?.stop(); }
}

// One answer: its text, the id of its request, and how a stop reached the processes.
class Answer {
  constructor(onNamed) {
    this.onNamed = onNamed;
    this.text = "";
    this.thinking = "";
    this.requestId = null;
    this.controller = new AbortController();
    this.startedMs = performance.now();
    this.firstMs = null;
    this.endedMs = null;
    this.tokens = null;
    this.stoppedUs = null;
    this.problem = null;
    this.bubble = h("div.bubble");
    this.below = h("div.below");
    this.stopped = h("div.stopped", { role: "status", hidden: true });
    this.element = h("div.message.assistant", {}, this.bubble, this.stopped, this.below);
    this.draw();
  }

  get signal() { return this.controller.signal; }

  named(id) { this.requestId = id; this.onNamed(id); }

  add(text, thinking) {
    if (this.firstMs === null && (text || thinking)) this.firstMs = performance.now();
    this.text += text ?? "";
    this.thinking += thinking ?? "";
  }

  fail(message) { this.problem = message; }

  end() { this.endedMs = performance.now(); }

  stop() {
    this.stoppedUs = store.now();
    this.controller.abort();
    this.stopped.hidden = false;
    replace(this.stopped, "Stopped. Waiting for the cancel to reach the engine…");
    this.watchCancel(0);
  }

  // Ask until every process has reported the end of the request, one that computes among them: it may report later.
  async watchCancel(tries) {
    let hops = [];
    const request = store.named(this.requestId);
    if (request) {
      try { hops = (await getJson(`/api/requests/${encodeURIComponent(request.id)}`)).hops; } catch { /* the view is not reached */ }
    }
    const ended = hops.filter((hop) => hop.state !== null);
    const reached = ended.filter((hop) => hop.state === "cancelled");
    if (ended.length) replace(this.stopped, reached.length ? "Cancel reached" : "The answer had ended before the cancel", reached.map((hop) => h("span", {}, `${shortName(hop.process)} after ${duration(Math.max(0, hop.started_us + hop.duration_us - this.stoppedUs))}`)));
    if (ended.length === hops.length && ended.some((hop) => COMPUTES.includes(hop.role))) return;
    if (tries < CANCEL_TRIES) setTimeout(() => this.watchCancel(tries + 1), CANCEL_RETRY_MS);
    else if (!ended.length) replace(this.stopped, "Stopped. No process has reported the end of the request.");
  }

  draw() {
    const thinking = this.thinking ? h("span.thinking", {}, this.thinking) : null;
    replace(this.bubble, thinking, formatted(this.text), this.endedMs === null ? h("span.cursor", { "aria-hidden": "true" }) : null, this.problem ? h("div.callout", { role: "alert" }, this.problem) : null);
    const facts = [];
    if (this.firstMs !== null) facts.push(`first token ${duration((this.firstMs - this.startedMs) * 1000)}`);
    if (this.endedMs !== null && this.tokens) facts.push(`${this.tokens} tokens, ${(this.tokens / Math.max(0.001, (this.endedMs - this.startedMs) / 1000)).toFixed(1)} per second`);
    replace(this.below, facts.map((fact) => h("span", {}, fact)), this.requestId && this.endedMs !== null ? h("button", { type: "button", onclick: () => this.onNamed(this.requestId) }, "Show its timeline") : null);
  }
}

// Parameters, and the timeline of one answer.
class Beside {
  constructor() {
    this.id = null;
    this.loading = false;
    this.visible = false;
    this.model = h("select.input", { id: "model" });
    const field = (label, input, wide) => h("label.field", { class: wide ? "wide" : "" }, label, input);
    const numberInput = (value, min, max, step) => h("input.input", { type: "number", value, min, max, step, placeholder: "default" });
    this.maxTokens = numberInput("256", 1, 100_000, 1);
    this.temperature = numberInput("", 0, 2, 0.1);
    this.topP = numberInput("", 0.01, 1, 0.01);
    this.seed = numberInput("", 0, 2 ** 31, 1);
    this.system = h("textarea.input", { rows: 2, placeholder: "none" });
    this.timeline = h("section.card", { "aria-label": "Timeline of the answer" }, h("h2", {}, "Timeline"), h("p.muted", {}, "The way of an answer through the deployment appears here while it runs."));
    this.element = h("aside.beside", { "aria-label": "Parameters and timeline", tabIndex: 0 }, this.timeline, h("section.card", {}, h("h2", {}, "Parameters"), h("div.parameters", {}, field("Model", this.model, true), field("Max tokens", this.maxTokens), field("Temperature", this.temperature), field("Top p", this.topP), field("Seed", this.seed), field("System prompt", this.system, true))));
    store.addEventListener("change", (event) => { if (this.visible && event.detail.requests.some((request) => request.client_id === this.id)) this.refresh(); });
  }

  setModels(names) {
    const chosen = this.model.value;
    replace(this.model, names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
  }

  watch(visible) { this.visible = visible; }

  body(turns) {
    const given = { max_tokens: this.maxTokens, temperature: this.temperature, top_p: this.topP, seed: this.seed };
    const parameters = Object.fromEntries(Object.entries(given).filter(([, input]) => input.value !== "").map(([name, input]) => [name, Number(input.value)]));
    const system = this.system.value.trim();
    return { model: this.model.value, messages: [...(system ? [{ role: "system", content: system }] : []), ...turns], stream: true, stream_options: { include_usage: true }, ...parameters };
  }

  follow(id) {
    this.id = id;
    this.refresh();
  }

  async refresh() {
    const id = this.id;
    const request = store.named(id);
    if (this.loading || !request) return; // until the processes have reported it
    this.loading = true;
    try {
      const trace = await getJson(`/api/requests/${encodeURIComponent(request.id)}`);
      const open = this.timeline.querySelector("details")?.open;
      if (id === this.id) {
        replace(this.timeline, h("h2", {}, "Timeline"), requestBody(trace), h("div.trace-id", {}, h("span.muted", {}, "Trace"), h("code", {}, trace.trace_id), copyButton(trace.trace_id, "Copy the trace id")));
        if (open) this.timeline.querySelector("details").open = true;
      }
    } catch { /* the view is not reached, or the request is forgotten */ } finally {
      this.loading = false;
    }
  }
}
