// The Vercel AI SDK with its provider for endpoints that speak the OpenAI API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { GREETING, PARIS, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, run, weather } from "./program.mjs";

const provider = (server, apiKey = server.key) =>
  createOpenAICompatible({ name: "baton", baseURL: server.baseURL, apiKey, includeUsage: true });
const generate = (server, changes = {}, key = server.key) =>
  generateText({ model: provider(server, key)(server.model), prompt: GREETING, maxRetries: 0, ...changes });

await run({
  chat: async (server) => (await generate(server)).text,
  stream: async (server) => {
    const pieces = [];
    for await (const piece of streamText({
      model: provider(server)(server.model),
      prompt: GREETING,
      maxRetries: 0,
    }).textStream) {
      pieces.push(piece);
    }
    return pieces;
  },
  unknown_model: (server) => generate(server, { model: provider(server)(UNKNOWN_MODEL) }),
  bad_parameter: (server) => generate(server, { temperature: TOO_HOT }),
  wrong_key: (server) => generate(server, {}, WRONG_KEY),
  streamed_error: async (server) => {
    let seen = null;
    const result = streamText({
      model: provider(server)(UNKNOWN_MODEL),
      prompt: GREETING,
      maxRetries: 0,
      onError: ({ error }) => {
        seen = error;
      },
    });
    await result.consumeStream();
    throw seen;
  },
  usage: async (server) => {
    const { usage, finishReason } = await generate(server, { maxOutputTokens: 5 });
    return [usage.outputTokens, finishReason];
  },
  tool_loop: async (server) => {
    const called = [];
    const { text } = await generate(server, {
      prompt: PARIS,
      stopWhen: stepCountIs(3),
      tools: {
        get_weather: tool({
          description: "Return the weather in a city.",
          inputSchema: jsonSchema({
            type: "object",
            properties: { city: { type: "string" } },
            required: ["city"],
          }),
          execute: async ({ city }) => {
            called.push(city);
            return weather(city);
          },
        }),
      },
    });
    return [text, called];
  },
});
