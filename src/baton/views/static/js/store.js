// What the server has sent: processes and the latest requests. Pages listen for "change".

const MAX_REQUESTS = 2000;

class Store extends EventTarget {
  constructor() {
    super();
    this.processes = new Map();
    this.requests = new Map();
    this.problem = null;
    this.hasLooked = false; // whether processes have been looked for since the view began
    this.state = "connecting";
    this.clockAheadUs = 0;
    this.source = null;
  }

  // The time of the server, which the times of requests are in.
  now() { return Date.now() * 1000 + this.clockAheadUs; }

  // The request that its client has given this id.
  named(clientId) { return [...this.requests.values()].findLast((request) => request.client_id === clientId); }

  connect() {
    this.source = new EventSource("/api/events");
    this.source.addEventListener("snapshot", (event) => this.onSnapshot(JSON.parse(event.data)));
    this.source.addEventListener("update", (event) => this.onUpdate(JSON.parse(event.data)));
    this.source.addEventListener("error", () => {
      this.setState("lost");
      // After a refusal the browser does not try again by itself.
      if (this.source.readyState === EventSource.CLOSED) setTimeout(() => this.connect(), 2000);
    });
  }

  setState(state) {
    this.state = state;
    this.dispatchEvent(new Event("state"));
  }

  onSnapshot(data) {
    this.processes = new Map();
    this.requests = new Map();
    this.setState("live");
    this.onUpdate({ ...data, removed: [], flows: [] });
  }

  onUpdate(data) {
    this.clockAheadUs = data.now_us - Date.now() * 1000;
    this.problem = data.problem;
    this.hasLooked = data.has_looked;
    for (const process of data.processes) this.processes.set(process.name, process);
    for (const name of data.removed) this.processes.delete(name);
    for (const request of data.requests) this.requests.set(request.id, request);
    for (const id of this.requests.keys()) {
      if (this.requests.size <= MAX_REQUESTS) break;
      this.requests.delete(id);
    }
    this.dispatchEvent(new CustomEvent("change", { detail: data }));
  }
}

export const store = new Store();

export async function getJson(path, options) {
  const reply = await fetch(path, options);
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(body.error?.message ?? `the server replied with status ${reply.status}`);
  return body;
}
