// OpenAI for JavaScript: `npm install openai`. OPENAI_BASE_URL and OPENAI_API_KEY name the server, the argument its model.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";

// As `import OpenAI from "openai"`, but found beside the caller's working directory.
const { OpenAI, BadRequestError } = createRequire(path.join(process.cwd(), "package.json"))("openai");

const client = new OpenAI();
const model = process.argv[2];
const messages = [{ role: "user", content: "What is a Pod?" }];
const lamp = {
  type: "function",
  function: {
    name: "switch_lamp",
    description: "Switch a lamp on or off",
    parameters: { type: "object", properties: { on: { type: "boolean" } }, required: ["on"] },
  },
};

assert.equal((await client.models.list()).data[0].id, model);

const answer = await client.chat.completions.create({ model, messages, max_completion_tokens: 32 });
assert.ok(answer.usage.completion_tokens > 0);
console.log("chat:", answer.choices[0].message.content);

let text = "";
let usage = null;
const options = { model, messages, max_completion_tokens: 32, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(options)) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.ok(usage.completion_tokens > 0);
console.log("stream:", text);

const runner = client.chat.completions.stream({ model, messages, tools: [lamp], tool_choice: "required" });
const called = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;
assert.equal(called.name, "switch_lamp");
console.log("tool:", called.name, called.arguments);

const schema = { type: "object", properties: { raining: { type: "boolean" } }, required: ["raining"] };
const response_format = { type: "json_schema", json_schema: { name: "sky", schema } };
const structured = await client.chat.completions.create({ model, messages, response_format });
assert.equal(typeof JSON.parse(structured.choices[0].message.content).raining, "boolean");
console.log("response_format:", structured.choices[0].message.content);

const completion = await client.completions.create({ model, prompt: "A Pod is", max_tokens: 8 });
console.log("completion:", completion.choices[0].text);

const embeddings = await client.embeddings.create({ model, input: ["one", "two"] });
assert.equal(embeddings.data.length, 2);
console.log("embeddings:", embeddings.data[0].embedding.length, "numbers each");

await assert.rejects(client.completions.create({ model, prompt: "x", max_tokens: -1 }), BadRequestError);
