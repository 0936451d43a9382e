// Streams one chat request with the official SDK and prints what it added up to, and how the chunks came.
import OpenAI from "openai";

const [baseURL, body] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const runner = client.chat.completions.stream(JSON.parse(body));
const ids = new Set();
let chunks = 0;
for await (const chunk of runner) {
  ids.add(chunk.id);
  chunks += 1;
}
const completion = await runner.finalChatCompletion();
console.log(JSON.stringify({ chunks, ids: ids.size, choice: completion.choices[0], usage: completion.usage }));
