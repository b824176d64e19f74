// The Anthropic SDK for Node.
import Anthropic from "@anthropic-ai/sdk";
import { GREETING, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, run } from "./program.mjs";

const client = (server, apiKey = server.key) => new Anthropic({ baseURL: server.url, apiKey, maxRetries: 0 });
const request = (server) => ({
  model: server.model,
  max_tokens: 64,
  messages: [{ role: "user", content: GREETING }],
});
const create = (server, changes = {}, key = server.key) =>
  client(server, key).messages.create({ ...request(server), ...changes });

await run({
  chat: async (server) => (await create(server)).content.map((block) => block.text).join(""),
  stream: async (server) => {
    const pieces = [];
    const stream = client(server).messages.stream(request(server));
    stream.on("text", (text) => pieces.push(text));
    await stream.finalMessage();
    return pieces;
  },
  unknown_model: (server) => create(server, { model: UNKNOWN_MODEL }),
  bad_parameter: (server) => create(server, { temperature: TOO_HOT }),
  wrong_key: (server) => create(server, {}, WRONG_KEY),
});
