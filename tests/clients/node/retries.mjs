// Asks a gateway at SPECD_URL until it is answered, as openai-node does by itself, and prints the statuses that it saw.
import OpenAI from "openai";

const statuses = [];
const client = new OpenAI({
  baseURL: process.env.SPECD_URL,
  apiKey: "none",
  maxRetries: 30,
  fetch: async (...request) => {
    const response = await fetch(...request);
    statuses.push(response.status);
    return response;
  },
});
const { choices } = await client.chat.completions.create({
  model: "arranged",
  temperature: 0,
  messages: [{ role: "user", content: "hello" }],
});
console.log(JSON.stringify({ statuses, text: choices[0].message.content }));
