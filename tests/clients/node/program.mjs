// What the client programs share: each prints what a user of its client sees, by part, as one line of JSON.
export const GREETING = "Hello, world.";
export const PARIS = "What is the weather in Paris?";
export const UNKNOWN_MODEL = "no-such-model";
export const WRONG_KEY = "wrong-key";
export const TOO_HOT = 2.5;

export const weather = (city) => `sunny in ${city}`;

async function attempt(part, server) {
  try {
    return (await part(server)) ?? null;
  } catch (error) {
    return { raised: error.name, status: error.status ?? error.statusCode ?? null, text: String(error.message) };
  }
}

export async function run(parts) {
  const server = JSON.parse(process.argv[2]);
  server.baseURL = `${server.url}/v1`;
  const results = {};
  for (const [name, part] of Object.entries(parts)) {
    results[name] = await attempt(part, server);
  }
  console.log(JSON.stringify(results));
}
