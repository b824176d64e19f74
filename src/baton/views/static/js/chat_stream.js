// Sends a chat completion request and reads its stream of server-sent events.

// The request gets its id here, so that it can be followed, and its cancel, before the answer begins.
export async function answer(body, turn, draw) {
  const requestId = newRequestId();
  turn.named(requestId);
  const reply = await fetch("/api/chat", { method: "POST", headers: { "Content-Type": "application/json", "X-Request-Id": requestId }, body: JSON.stringify(body), signal: turn.signal });
  if (!reply.ok) throw new Error(await problemOf(reply));
  for await (const data of events(reply.body)) {
    if (data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message ?? "the answer failed");
    const delta = chunk.choices?.[0]?.delta;
    if (delta) turn.add(delta.content, delta.reasoning_content);
    if (chunk.usage) turn.tokens = chunk.usage.completion_tokens;
    draw();
  }
}

export function newRequestId() {
  return "view-" + Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function problemOf(reply) {
  const body = await reply.json().catch(() => null);
  return body?.error?.message ?? `the endpoint replied with status ${reply.status}`;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split(/\r?\n\r?\n/);
    buffer = blocks.pop();
    for (const block of blocks) {
      const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data) yield data;
    }
  }
}
