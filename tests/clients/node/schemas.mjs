// Prints JSON schemas of the answers that OpenAI and Anthropic document. Their Node packages are generated from the
// providers' own OpenAPI documents, and their types, unlike those of the Python packages, tell a field that may be
// missing from one that may be null.
import { createGenerator } from "ts-json-schema-generator";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const modules = join(dirname(fileURLToPath(import.meta.url)), "node_modules");
const SOURCES = [
  ["openai/resources/chat/completions/completions.d.ts", ["ChatCompletion", "ChatCompletionChunk"]],
  ["openai/resources/completions.d.ts", ["Completion"]],
  ["openai/resources/embeddings.d.ts", ["CreateEmbeddingResponse"]],
  ["openai/resources/models.d.ts", ["Model"]],
  ["openai/resources/shared.d.ts", ["ErrorObject"]],
  ["openai/resources/responses/responses.d.ts", ["Response", "ResponseStreamEvent"]],
  ["@anthropic-ai/sdk/resources/messages/messages.d.ts", ["Message", "RawMessageStreamEvent"]],
  ["@anthropic-ai/sdk/resources/shared.d.ts", ["ErrorResponse"]],
];

const schemas = {};
for (const [file, types] of SOURCES) {
  const generator = createGenerator({
    path: join(modules, file),
    skipTypeCheck: true,
    additionalProperties: true,
    jsDoc: "none",
    topRef: false,
  });
  const owner = file.startsWith("openai/") ? "openai" : "anthropic";
  for (const type of types) {
    schemas[`${owner}.${type}`] = generator.createSchema(type);
  }
}
console.log(JSON.stringify(schemas));
