// A request as commands for people to run. A token is never in them: it is in the variable SPECD_TOKEN.

const OF_OPENAI = new Set([
  ...["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty"],
  ...["presence_penalty", "logprobs", "top_logprobs"],
]); // other fields are in extra_body

// Returns a command of a shell. `hasToken`: the gateway wants one.
export function curlOf(origin, path, body, hasToken) {
  const headers = ["-H 'content-type: application/json'", ...(hasToken ? ['-H "authorization: Bearer $SPECD_TOKEN"'] : [])];
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl -sS ${origin}${path} \\\n  ${headers.join(" \\\n  ")} \\\n  -d '${data}'\n`;
}

// Returns a program that prints the text as it comes: pip install openai.
export function pythonOf(origin, path, body, hasToken) {
  const isChat = path.includes("chat");
  const entries = Object.entries(body).filter(([name]) => name !== "stream");
  const own = entries.filter(([name]) => !OF_OPENAI.has(name));
  const fields = entries.filter(([name]) => OF_OPENAI.has(name)).map(([name, value]) => `    ${name}=${literal(value)},\n`);
  if (own.length) fields.push(`    extra_body=${literal(Object.fromEntries(own))},\n`);
  return [
    hasToken ? "import os\n\nfrom openai import OpenAI\n\n" : "from openai import OpenAI\n\n",
    `client = OpenAI(base_url=${literal(`${origin}/v1`)}, api_key=${hasToken ? 'os.environ["SPECD_TOKEN"]' : '"none"'})\n`,
    `chunks = client.${isChat ? "chat.completions" : "completions"}.create(\n${fields.join("")}    stream=True,\n)\n`,
    "for chunk in chunks:\n",
    `    print(chunk.choices[0].${isChat ? 'delta.content or ""' : "text"}, end="", flush=True)\n`,
  ].join("");
}

// Returns a value as Python writes it; a string of JSON is one of Python.
function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`).join(", ")}}`;
}
