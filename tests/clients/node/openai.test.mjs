// openai-node against a gateway at SPECD_URL, whose model says what tests/gateway/arranged_model.py arranges.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const HELLO = "Hello! How can I help you today?";
const SUNNY = "It is sunny in Zürich: 21 °C.";
const client = new OpenAI({ baseURL: process.env.SPECD_URL, apiKey: "none", maxRetries: 0 });

function asked(script, fields = {}) {
  return { model: "arranged", temperature: 0, messages: [{ role: "user", content: script }], ...fields };
}

function weatherTool(calls) {
  const parameters = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } };
  const call = (given) => {
    calls.push(given);
    return "sunny, 21";
  };
  return { type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: call } };
}

test("models", async () => {
  const models = (await client.models.list()).data;
  assert.deepEqual(models.map((model) => model.id), ["arranged"]);
  assert.equal((await client.models.retrieve("arranged")).id, "arranged");
});

test("chat, whole", async () => {
  const { choices, usage } = await client.chat.completions.create(asked("hello"));
  assert.equal(choices[0].message.content, HELLO);
  assert.equal(choices[0].finish_reason, "stop");
  assert.ok(usage.completion_tokens > 5);
});

test("chat, streamed, with usage and log-probabilities", async () => {
  const fields = { stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: 2 };
  let text = "";
  let said = "";
  let last;
  for await (const chunk of await client.chat.completions.create(asked("hello", fields))) {
    text += chunk.choices[0]?.delta.content ?? "";
    said += (chunk.choices[0]?.logprobs?.content ?? []).map((token) => token.token).join("");
    last = chunk;
  }
  assert.equal(text, HELLO);
  assert.equal(said, `${HELLO}<|end|>`);
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.total_tokens, last.usage.prompt_tokens + last.usage.completion_tokens);
});

for (const stream of [false, true]) {
  test(`the loop of an agent, ${stream ? "streamed" : "whole"}`, async () => {
    const calls = [];
    const runner = client.chat.completions.runTools({ ...asked("weather", { stream }), tools: [weatherTool(calls)] });
    assert.equal(await runner.finalContent(), SUNNY);
    assert.deepEqual(calls, [{ city: "Zürich", days: 3 }]);
  });
}

test("completions, whole and streamed", async () => {
  const fields = { model: "arranged", prompt: "<|say:hello|>", temperature: 0, max_tokens: 64, logprobs: 1 };
  const { choices } = await client.completions.create(fields);
  assert.equal(choices[0].text, HELLO);
  assert.equal(choices[0].logprobs.tokens.join(""), `${HELLO}<|end|>`);
  let text = "";
  for await (const chunk of await client.completions.create({ ...fields, stream: true })) text += chunk.choices[0].text;
  assert.equal(text, HELLO);
});

test("responses, whole, streamed, and with a tool", async () => {
  const fields = { model: "arranged", temperature: 0 };
  const whole = await client.responses.create({ ...fields, input: "hello" });
  assert.equal(whole.output_text, HELLO);

  const stream = client.responses.stream({ ...fields, input: "hello" });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  assert.equal((await stream.finalResponse()).output_text, HELLO);
  assert.equal(text, HELLO);

  const tools = [{ type: "function", name: "get_weather", parameters: { type: "object", properties: {} }, strict: false }];
  const asking = [{ role: "user", content: "ponder" }];
  const first = await client.responses.create({ ...fields, input: asking, tools });
  const call = first.output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Zürich", days: 3 });
  const result = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
  const second = await client.responses.create({ ...fields, input: [...asking, ...first.output, result], tools });
  assert.equal(second.output_text, SUNNY);
});

test("errors", async () => {
  const isError = (kind, fields) => (error) => {
    assert.ok(error instanceof kind, `${error}`);
    for (const [name, value] of Object.entries(fields)) assert.equal(error[name], value);
    return true;
  };
  await assert.rejects(
    client.chat.completions.create(asked("hello", { top_p: 7 })),
    isError(OpenAI.BadRequestError, { status: 400, param: "top_p", type: "invalid_request_error" }),
  );
  await assert.rejects(
    client.chat.completions.create({ ...asked("hello"), model: "another" }),
    isError(OpenAI.NotFoundError, { status: 404, code: "model_not_found" }),
  );
  await assert.rejects(
    client.completions.create({ model: "arranged", prompt: "x".repeat(5000) }),
    isError(OpenAI.BadRequestError, { code: "context_length_exceeded" }),
  );
});

test("a stream that is left ends", async () => {
  const stream = await client.chat.completions.create(asked("hello", { stream: true }));
  for await (const chunk of stream) {
    assert.equal(chunk.choices[0].delta.role, "assistant");
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});
