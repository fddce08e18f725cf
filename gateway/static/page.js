// The page: asks, and shows the answer as it comes. Text of the model only ever becomes text nodes.

import { ApiError, chunksOf, servedModel } from "./api.js";
import { drawCharts, percent, share } from "./charts.js";

const RETRY_MS = 3000;
const EXAMPLES = {
  chat: "Explain speculative decoding in three sentences.",
  text: 'class Vector:\n    """A vector in the plane."""\n\n    def __init__(self, x, y):\n',
};
const OTHER_TEXT =
  "another text by the target alone: in 16 bits or on a GPU, rounding can decide between nearly equal tokens";

const byId = (id) => document.getElementById(id);
const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
const show = (id, text) => (byId(id).textContent = text);

let model = null;
let running = null; // the AbortController of the answer that is coming
let last = null; // the answer before, to compare with: its body, text and rate

// -- The model

async function connect() {
  const token = byId("token").value.trim();
  try {
    model = await servedModel(token);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    model = null;
    show("model", error.status === 401 && !token ? "needs a token: enter it here" : error.message);
    if (error.status === 401) byId("token").focus();
    else setTimeout(connect, RETRY_MS);
  }
  byId("model").classList.toggle("wrong", model === null);
  byId("generate").disabled = model === null || running !== null;
  if (model === null) return;
  const { chat, draft, precision } = model.specd;
  drawLegend();
  const others = Object.entries(sources()).filter(([source]) => !["draft", "prediction"].includes(source));
  const helpers = [...(draft ? [`draft ${draft}`] : []), ...others.map(([, label]) => label)].join(" and ") || "no draft";
  show("model", `${model.id} (${precision}) with ${helpers}`);
  show("prompt-label", chat ? "Message" : "Text to continue");
  if (!byId("prompt").value) byId("prompt").value = chat ? EXAMPLES.chat : EXAMPLES.text;
}

// The names and labels of the sources of draft tokens, in order: their places choose their colours.
const sources = () => model.specd.sources;

function drawLegend() {
  const items = Object.entries(sources()).map(([source, label], place) => legendItem(source, label, `source source-${place}`));
  byId("legend").replaceChildren(...items, legendItem("target", "target itself", ""));
  const boxes = Object.values(sources()).flatMap((label, place) => [box(`of-source source-${place}`), ` ${label} `]);
  byId("k-legend").replaceChildren(...boxes, box("rejected"), " rejected");
}

function legendItem(source, label, classes) {
  const item = document.createElement("li");
  const [name, count] = [document.createElement("span"), document.createElement("output")];
  Object.assign(name, { className: `${source} ${classes}`.trim(), textContent: label });
  Object.assign(count, { id: `${source}-tokens`, textContent: "0" });
  item.append(name, " ", count);
  return item;
}

function box(classes) {
  return Object.assign(document.createElement("i"), { className: `box ${classes}` });
}

function classOf(source) {
  const place = Object.keys(sources()).indexOf(source);
  return place < 0 ? source : `${source} source source-${place}`;
}

// -- One answer

function bodyOfForm() {
  const prompt = byId("prompt").value;
  return {
    ...(model.specd.chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    model: model.id,
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    draft_source: byId("draft-source").value,
    num_draft_tokens: number("k"),
  };
}

async function generate(body, compared = null) {
  running = new AbortController();
  setBusy(true);
  const answer = new Answer(body, compared);
  try {
    const path = body.messages ? "/v1/chat/completions" : "/v1/completions";
    const asked = { ...body, stream: true, token_sources: true };
    for await (const chunk of chunksOf(path, asked, byId("token").value.trim(), running.signal)) answer.take(chunk);
    answer.finish();
    if (!compared) last = answer;
  } catch (error) {
    answer.draw();
    if (running.signal.aborted) show("state", `stopped after ${answer.count} tokens`);
    else fail(error);
  } finally {
    running = null;
    setBusy(false);
  }
}

function fail(error) {
  show("state", "");
  show("error", error.message);
  byId("error").hidden = false;
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 401) byId("token").focus();
  if (error.status === 404 || error.status === 0) connect(); // another model, or none, is served by now
}

function setBusy(busy) {
  byId("generate").disabled = busy || model === null;
  byId("again").disabled = busy || last === null;
  byId("stop").disabled = !busy;
  byId("answer").setAttribute("aria-busy", busy);
  if (!busy) return;
  byId("error").hidden = true;
  show("state", "generating …");
}

// An answer as it comes. With `compared`, it is that one again by the target alone.
class Answer {
  constructor(body, compared) {
    this.body = body;
    this.compared = compared;
    this.text = "";
    this.count = 0;
    this.sources = Object.fromEntries([...Object.keys(sources()), "target"].map((source) => [source, 0]));
    this.rounds = [];
    this.first = 0; // tokens of the first round
    this.askedAt = performance.now();
    if (!compared) byId("answer").replaceChildren();
    this.draw();
  }

  take(chunk) {
    this.timings = chunk.timings ?? this.timings;
    this.body.seed ??= chunk.seed; // so that it can be asked for again
    const choice = chunk.choices[0];
    if (!choice?.tokens) return;
    if (this.count) {
      const by = (source) => choice.tokens.filter((token) => token.source === source).length;
      this.rounds.push({ ...choice.round, acceptedBySource: Object.keys(sources()).map(by) });
    } else {
      this.beganAt = performance.now(); // the first round computes the prompt, and counts for no rate
      this.first = choice.tokens.length;
      if (this.body.prompt && !this.compared) append(this.body.prompt, "prompt"); // a request that fails shows its error alone
    }
    for (const { text, source } of choice.tokens) {
      if (!this.compared) append(text, classOf(source));
      this.text += text;
      if (source in this.sources) this.sources[source] += 1;
      this.count += 1;
    }
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame); // it would draw over what is shown at the end
    this.frame = null;
    const later = this.count - this.first;
    const rate = later ? (1000 * later) / (performance.now() - this.beganAt) : 0;
    if (this.compared) {
      show("state", `the target alone: ${this.count} tokens`);
      return showRates(this.compared.rate, rate, "now");
    }
    for (const [source, count] of Object.entries(this.sources)) show(`${source}-tokens`, count);
    drawCharts(this.rounds);
    show("first", this.count ? `${(this.beganAt - this.askedAt).toFixed(0)} ms` : "–");
    show("acceptance", percent(share(this.rounds)));
    show("length", later ? (later / this.rounds.length).toFixed(2) : "–");
    showRates(rate, last?.alone ?? 0, "last time");
  }

  // Shows what the server measured, in place of what was seen here.
  finish() {
    this.draw();
    const { predicted_per_second: rate, predicted_n: tokens, speedup } = this.timings;
    if (this.compared) {
      this.compared.alone = rate;
      showRates(this.compared.rate, rate, "measured");
      const isSame = this.text === this.compared.text;
      show("state", isSame ? `the same text by the target alone, ${tokens} tokens` : OTHER_TEXT);
      return;
    }
    this.rate = rate;
    this.alone = speedup && rate / speedup;
    showRates(rate, this.alone, "estimated");
    const times = speedup ? `, ${speedup.toFixed(2)} times as fast as the target alone` : "";
    show("state", `${tokens} tokens, ${rate.toFixed(1)} a second${times}`);
  }
}

function append(text, kind) {
  const answer = byId("answer");
  const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
  if (answer.lastChild?.className === kind) answer.lastChild.append(text);
  else {
    const span = document.createElement("span");
    span.className = kind;
    span.append(text);
    answer.append(span);
  }
  if (atEnd) answer.scrollTop = answer.scrollHeight;
}

// Shows tokens a second of specd and of the target alone; 0 is not known.
function showRates(rate, alone, how) {
  const most = Math.max(rate, alone, 1);
  for (const [id, value] of [["rate", rate], ["alone", alone]]) {
    byId(`${id}-bar`).setAttribute("width", `${(100 * value) / most}%`);
    show(id, value ? value.toFixed(1) : "–");
  }
  show("alone-label", alone ? `target alone, ${how}` : "target alone");
  show("speedup", rate && alone ? (rate / alone).toFixed(2) : "–");
}

// -- The controls

byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("generate").disabled) generate(bodyOfForm());
});
byId("again").addEventListener("click", () => {
  generate({ ...last.body, num_draft_tokens: 0, draft_source: "none" }, last);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("token").addEventListener("change", connect);
byId("access").addEventListener("submit", (event) => event.preventDefault()); // by then it has changed
byId("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme;
  const isDark = dark === "dark" || (dark === "light dark" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.style.colorScheme = isDark ? "light" : "dark";
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("request").requestSubmit();
});

connect();
