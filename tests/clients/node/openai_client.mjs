// openai-node.
import OpenAI from "openai";
import { GREETING, PARIS, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, run, weather } from "./program.mjs";

const hello = [{ role: "user", content: GREETING }];
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Return the weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

const client = (server, apiKey = server.key) => new OpenAI({ baseURL: server.baseURL, apiKey, maxRetries: 0 });
const create = (server, changes = {}, key = server.key) =>
  client(server, key).chat.completions.create({ model: server.model, messages: hello, ...changes });

await run({
  chat: async (server) => (await create(server)).choices[0].message.content,
  stream: async (server) => {
    const pieces = [];
    for await (const chunk of await create(server, { stream: true })) {
      pieces.push(chunk.choices[0].delta.content ?? "");
    }
    return pieces;
  },
  unknown_model: (server) => create(server, { model: UNKNOWN_MODEL }),
  bad_parameter: (server) => create(server, { temperature: TOO_HOT }),
  wrong_key: (server) => create(server, {}, WRONG_KEY),
  error_fields: async (server) => {
    try {
      return await create(server, { temperature: TOO_HOT });
    } catch (error) {
      return { param: error.param, type: error.type, code: error.code, request_id: error.requestID };
    }
  },
  models: async (server) => {
    const names = [];
    for await (const model of client(server).models.list()) {
      names.push(model.id);
    }
    return names;
  },
  tool_loop: async (server) => {
    const called = [];
    const runner = client(server).chat.completions.runTools({
      model: server.model,
      messages: [{ role: "user", content: PARIS }],
      tools: [
        {
          type: "function",
          function: {
            ...tool.function,
            parse: JSON.parse,
            function: ({ city }) => {
              called.push(city);
              return weather(city);
            },
          },
        },
      ],
    });
    return [await runner.finalContent(), called];
  },
});
