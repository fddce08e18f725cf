// The page: asks, and shows the answer as it comes. Text of the model only ever becomes text nodes.

import { Answer } from "./answer.js";
import { ApiError, chunksOf, loadModel, servedModels } from "./api.js";
import { curlOf, pythonOf } from "./commands.js";
import { Conversation } from "./conversation.js";
import { conversations, forget, forgetAll } from "./history.js";
import { Progress } from "./progress.js";
import { bodyOf, pathOf, streamed, tokensOf } from "./request.js";
import { describeTokensIn, hideTip } from "./tokens.js";

const RETRY_MS = 3000;
const STATES_MS = 3000;
const EXAMPLES = {
  chat: "Explain speculative decoding in three sentences.",
  text: 'class Vector:\n    """A vector in the plane."""\n\n    def __init__(self, x, y):\n',
};

const byId = (id) => document.getElementById(id);
const show = (id, text) => (byId(id).textContent = text);
const token = () => byId("token").value.trim();

let models = []; // those that are served
let model = null; // the one that is asked
let shownAs = null; // whether the page is shown for a model that chats
let running = null; // the AbortController of the answer that is coming
let last = null; // the answer before: its body and its progress, to compare with, and to copy
let conversation = null;
let editing = null; // the number of the turn that the next message replaces

// -- The model

async function connect() {
  try {
    models = await servedModels(token());
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    models = [];
    show("model", error.status === 401 && !token() ? "needs a token: enter it here" : error.message);
    if (error.status === 401) byId("token").focus();
    else setTimeout(connect, RETRY_MS);
  }
  byId("model").classList.toggle("wrong", !models.length);
  listModels();
  const isLoaded = ({ status }) => status?.value === "loaded";
  choose(models.find(({ id }) => id === model?.id) ?? models.find(isLoaded) ?? models[0] ?? null);
}

function listModels() {
  const options = models.map(({ id, status }) => {
    const state = { unloaded: " (not loaded)", loading: " (loading)", downloading: " (loading)" }[status?.value] ?? "";
    return Object.assign(document.createElement("option"), { value: id, textContent: id + state });
  });
  byId("model-choice").replaceChildren(...options);
  byId("chooser").hidden = models.length < 2;
  if (model !== null) byId("model-choice").value = model.id;
}

// Shows the states of several models as they are now, unless the reader chooses among them.
async function showStates() {
  const chooser = byId("model-choice");
  if (!models.some(({ status }) => status) || document.hidden || document.activeElement === chooser) return;
  const now = await servedModels(token()).catch(() => []);
  const chosen = now.find(({ id }) => id === model?.id);
  if (!chosen || running || document.activeElement === chooser) return;
  const isOther = JSON.stringify(chosen.specd) !== JSON.stringify(model.specd);
  models = now;
  model = chosen;
  listModels();
  if (isOther) choose(chosen);
}

// Loads a model of which the name alone is known: only then is it known whether it chats. Returns whether it is there.
async function load() {
  const { signal } = (running = new AbortController());
  setBusy(true);
  const say = (stage) => show("state", `loading ${model.id}${stage && `, ${stage}`} …`);
  say("");
  try {
    await loadModel(model.id, token(), signal, say);
    models = await servedModels(token());
    show("state", "");
    return true;
  } catch (error) {
    if (signal.aborted) show("state", `does not wait for ${model.id}`);
    else fail(error);
    return false;
  } finally {
    running = null;
    listModels();
    choose(models.find(({ id }) => id === model.id) ?? null);
  }
}

const isUnknown = () => model.specd.chat === undefined;

function choose(chosen) {
  model = chosen;
  setBusy(running !== null);
  if (model === null) return;
  byId("model-choice").value = model.id;
  drawLegend();
  const { chat, draft, precision } = model.specd;
  if (isUnknown()) {
    show("model", `${model.id}, which has not been loaded yet`);
    if (shownAs === null) showKind(false);
    return;
  }
  const others = Object.entries(sources()).filter(([source]) => !["draft", "prediction"].includes(source));
  const helpers = [...(draft ? [`draft ${draft}`] : []), ...others.map(([, label]) => label)].join(" and ") || "no draft";
  show("model", `${model.id} (${precision}) with ${helpers}`);
  if (chat !== shownAs) showKind(chat);
}

// Shows the page for a model that chats, or for one that completes texts.
function showKind(chat) {
  shownAs = chat;
  document.body.classList.toggle("chat", chat);
  show("prompt-label", chat ? "Message" : "Text to continue");
  show("reply-title", chat ? "Conversation" : "Answer");
  show("generate", chat ? "Send" : "Generate");
  show("keys", chat ? "Enter sends, Shift and Enter begins a line, Esc stops" : "Ctrl or ⌘ and Enter generates, Esc stops");
  for (const id of ["turns", "past", "system-part", "regenerate"]) byId(id).hidden = !chat;
  byId("completion").hidden = chat;
  byId("completion").replaceChildren();
  byId("prompt").rows = chat ? 3 : 5;
  const [reply, request] = [byId("reply"), byId("request")];
  if (chat) request.before(reply); // so that Tab goes the way that is seen
  else reply.before(request);
  last = null;
  const before = byId("prompt").value;
  if (!before || Object.values(EXAMPLES).includes(before)) byId("prompt").value = chat ? EXAMPLES.chat : EXAMPLES.text;
  if (chat) open(conversations()[0]);
  else newCompletion();
  setBusy(running !== null);
}

// The names and labels of the sources of draft tokens, in order: their places choose their colours.
const sources = () => model?.specd.sources ?? {};

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

const labelOf = (source) => (source === "target" ? "the target itself" : (sources()[source] ?? source));
const view = { classOf, labelOf, isMarkdown: () => byId("markdown").checked };

// -- Conversations

function open(data) {
  conversation = new Conversation(byId("turns"), data, view, { edit });
  byId("system").value = conversation.data.system;
  byId("system-part").open = Boolean(conversation.data.system);
  edit(null);
  listConversations();
  setBusy(running !== null);
  byId("turns").scrollTop = byId("turns").scrollHeight;
}

function listConversations() {
  const kept = conversations();
  if (!kept.some(({ id }) => id === conversation.data.id)) kept.unshift(conversation.data);
  const options = kept.map(({ id, turns }) => {
    const textContent = turns[0]?.content.slice(0, 60) ?? "new";
    return Object.assign(document.createElement("option"), { value: id, textContent });
  });
  byId("conversation").replaceChildren(...options);
  byId("conversation").value = conversation.data.id;
}

// Lets the next message replace the turn of this number, and those behind it; null lets it follow.
function edit(number) {
  if (number !== null && running) return;
  editing = number;
  conversation.edit(number);
  show("state", number === null ? "" : "the message replaces this turn and those behind it; Esc keeps them");
  if (number === null) return;
  byId("prompt").value = conversation.turns[number].content;
  byId("prompt").focus();
}

function send() {
  const content = byId("prompt").value;
  if (editing !== null) conversation.cut(editing);
  edit(null);
  conversation.data.system = byId("system").value.trim();
  const body = bodyOf(model, { messages: [...conversation.messages(), { role: "user", content }] });
  conversation.say(content);
  byId("prompt").value = "";
  generate(body, conversation.begin(), content);
}

function regenerate() {
  const { turns } = conversation;
  if (turns.at(-1)?.role === "assistant") conversation.cut(turns.length - 1);
  conversation.data.system = byId("system").value.trim();
  generate(bodyOf(model, { messages: conversation.messages() }), conversation.begin());
}

function newCompletion() {
  const element = document.createElement("pre");
  Object.assign(element, { id: "answer", className: "answer", tabIndex: 0 });
  element.setAttribute("aria-label", "Answer");
  byId("completion").replaceChildren(element);
  return new Answer(element, classOf, labelOf);
}

// -- One answer

// Generates into an answer; without one, the last answer again by the target alone. `said` is the message, if it is new.
async function generate(body, answer = null, said = null) {
  running = new AbortController();
  setBusy(true);
  const progress = new Progress(Object.keys(sources()), answer ? null : last.progress, last?.progress);
  const state = { timings: null, frame: null };
  const draw = () => {
    cancelAnimationFrame(state.frame); // it would draw over what is shown at the end
    state.frame = null;
    answer?.draw();
    progress.draw();
  };
  if (answer) last = { body, progress };
  draw();
  let note = "";
  try {
    const say = (notice) => show("state", `${notice} …`);
    for await (const chunk of chunksOf(pathOf(body), streamed(body), token(), running.signal, say)) {
      if (!progress.count) show("state", "generating …"); // and no longer loading
      state.timings = chunk.timings ?? state.timings;
      body.seed ??= chunk.seed; // so that it can be asked for again
      take(chunk.choices[0], body, answer, progress);
      state.frame ??= requestAnimationFrame(draw);
    }
    draw();
    note = progress.finish(state.timings);
    show("state", note);
  } catch (error) {
    draw();
    note = running.signal.aborted ? `stopped after ${progress.count} tokens` : "broken off";
    if (running.signal.aborted) show("state", note);
    else fail(error);
  } finally {
    running = null;
    if (answer && body.messages) settle(answer, note, progress, said);
    setBusy(false);
  }
}

function take(choice, body, answer, progress) {
  if (choice?.delta) {
    if (answer) answer.content += choice.delta.content ?? "";
    if (answer) answer.reasoning += choice.delta.reasoning_content ?? "";
  }
  if (!choice?.tokens) return;
  if (answer && body.prompt && !progress.count) answer.prefix = body.prompt; // a request that fails shows its error alone
  if (answer?.prefix && !progress.count) answer.restart();
  progress.take(choice);
  if (answer) tokensOf(choice).forEach((each) => answer.tokens.add(each));
}

// Keeps an answer in the conversation. One without any token leaves the message to be sent again.
function settle(answer, note, progress, said) {
  if (progress.count) conversation.finish(answer, note);
  else {
    conversation.cut(conversation.turns.length - (said === null ? 1 : 2));
    if (said !== null && !byId("prompt").value) byId("prompt").value = said;
  }
  listConversations();
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
  byId("again").disabled = busy || !last?.progress.rate;
  byId("regenerate").disabled = busy || model === null || !conversation?.turns.length;
  byId("stop").disabled = !busy;
  for (const id of ["copy-curl", "copy-python"]) byId(id).disabled = model === null;
  for (const id of ["conversation", "new", "delete", "delete-all", "model-choice"]) byId(id).disabled = busy;
  byId("answer")?.setAttribute("aria-busy", busy);
  if (!busy) return;
  byId("error").hidden = true;
  show("state", "generating …");
}

// -- Copies

// Copies what the form would send now; with an empty message, what was sent last.
function copyAs(commandOf) {
  const prompt = byId("prompt").value;
  const isChat = model.specd.chat;
  const messages = () => [...conversation.messages(editing ?? undefined), { role: "user", content: prompt }];
  const body = prompt || !last ? bodyOf(model, isChat ? { messages: messages() } : { prompt }) : last.body;
  const given = Object.fromEntries(Object.entries(body).filter(([, value]) => value !== undefined));
  copy(commandOf(location.origin, pathOf(body), given, Boolean(token())));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    show("state", "copied");
  } catch { // there is no clipboard without TLS but on this machine
    byId("code-text").value = text;
    byId("code").showModal();
    byId("code-text").select();
  }
}

// -- The controls

byId("request").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (byId("generate").disabled || (isUnknown() && !(await load()))) return;
  if (model.specd.chat) send();
  else generate(bodyOf(model, { prompt: byId("prompt").value }), newCompletion());
});
byId("again").addEventListener("click", () => {
  generate({ ...last.body, num_draft_tokens: 0, draft_source: "none" });
});
byId("regenerate").addEventListener("click", regenerate);
byId("stop").addEventListener("click", () => running?.abort());
byId("copy-curl").addEventListener("click", () => copyAs(curlOf));
byId("copy-python").addEventListener("click", () => copyAs(pythonOf));
byId("close-code").addEventListener("click", () => byId("code").close());
byId("turns").addEventListener("click", ({ target }) => {
  if (target instanceof Element && target.matches(".copy-code")) copy(target.closest(".code").querySelector("code").textContent);
});
byId("token").addEventListener("change", connect);
byId("access").addEventListener("submit", (event) => event.preventDefault()); // by then it has changed
byId("model-choice").addEventListener("change", ({ target }) => {
  choose(models.find(({ id }) => id === target.value));
  target.blur();
  if (isUnknown()) load();
});
byId("conversation").addEventListener("change", ({ target }) => open(conversations().find(({ id }) => id === target.value)));
byId("new").addEventListener("click", () => open(undefined));
byId("delete").addEventListener("click", () => {
  forget(conversation.data.id);
  open(conversations()[0]);
});
byId("delete-all").addEventListener("click", () => {
  if (!confirm("Delete all conversations that this browser keeps?")) return;
  forgetAll();
  open(undefined);
});
byId("markdown").addEventListener("change", () => conversation?.showAgain());
byId("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme;
  const isDark = dark === "dark" || (dark === "light dark" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.style.colorScheme = isDark ? "light" : "dark";
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (running) running.abort();
    else if (editing !== null) edit(null);
    hideTip();
  }
  if (event.key !== "Enter" || event.isComposing) return;
  const sends = event.target === byId("prompt") && shownAs && !event.shiftKey;
  if (!sends && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  byId("request").requestSubmit();
});
for (const id of ["turns", "completion"]) describeTokensIn(byId(id));

connect();
setInterval(showStates, STATES_MS);
