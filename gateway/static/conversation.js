// A conversation on the page: its turns, which the browser keeps, and what can be done with each.

import { Answer } from "./answer.js";
import { keep } from "./history.js";

// The turns are the elements of a list. `actions` has what the buttons of a turn do: `edit(number)`.
export class Conversation {
  constructor(list, data, view, actions) {
    this.list = list;
    this.data = data ?? { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, system: "", turns: [] };
    this.view = view; // classOf, labelOf and isMarkdown
    this.actions = actions;
    this.answers = new Map(); // by turn
    this.list.replaceChildren();
    this.data.turns.forEach((turn) => this.append(turn));
  }

  get turns() {
    return this.data.turns;
  }

  // Returns the messages of the turns for a model, or of the first `count` of them.
  messages(count = this.turns.length) {
    const turns = this.turns.slice(0, count).map(({ role, content, reasoning }) => ({
      role,
      content,
      ...(reasoning ? { reasoning_content: reasoning } : {}),
    }));
    return this.data.system ? [{ role: "system", content: this.data.system }, ...turns] : turns;
  }

  say(content) {
    this.turns.push({ role: "user", content });
    this.append(this.turns.at(-1));
  }

  // Begins an answer, and returns it.
  begin() {
    const turn = { role: "assistant", content: "", tokens: [] };
    this.turns.push(turn);
    return this.append(turn);
  }

  // Takes an answer that came into the turn that it began, and keeps the conversation.
  finish(answer, note) {
    const turn = this.turns.at(-1);
    turn.content = answer.content;
    if (answer.reasoning) turn.reasoning = answer.reasoning;
    turn.tokens = answer.tokens.list.map(({ alternatives, ...token }) => token); // alternatives are too much to keep
    turn.note = note;
    this.list.lastElementChild.querySelector(".note").textContent = note;
    this.keep();
  }

  keep() {
    if (this.turns.length) keep(this.data);
  }

  // Drops the turns from this number on.
  cut(count) {
    this.turns.length = Math.min(count, this.turns.length);
    while (this.list.children.length > count) this.list.lastElementChild.remove();
    this.markLast();
  }

  // Shows which turn is being edited; null for no turn.
  edit(number) {
    [...this.list.children].forEach((item, place) => item.classList.toggle("replaced", number !== null && place >= number));
  }

  showAgain() {
    for (const answer of this.answers.values()) answer.show(this.view.isMarkdown());
  }

  append(turn) {
    const item = make("li", { className: turn.role });
    const number = this.list.children.length;
    const head = make("div", { className: "head" });
    head.append(make("span", { textContent: turn.role === "user" ? "You" : "Model" }));
    const said = make("div", { className: turn.role === "user" ? "said" : "answer", tabIndex: turn.role === "user" ? -1 : 0 });
    item.append(head, said);
    this.list.append(item);
    if (turn.role === "user") {
      said.textContent = turn.content;
      const edit = make("button", { type: "button", className: "small", textContent: "Edit" });
      edit.addEventListener("click", () => this.actions.edit(number));
      head.append(edit);
      return null;
    }
    said.setAttribute("aria-label", "Answer");
    head.append(make("span", { className: "note", textContent: turn.note ?? "" }));
    const answer = new Answer(said, this.view.classOf, this.view.labelOf);
    this.answers.set(turn, answer);
    for (const token of turn.tokens) answer.tokens.add(token);
    Object.assign(answer, { content: turn.content, reasoning: turn.reasoning ?? "" });
    answer.show(this.view.isMarkdown());
    this.markLast();
    return answer;
  }

  // The newest answer has the id `answer`.
  markLast() {
    const answers = this.list.querySelectorAll(".answer");
    answers.forEach((each, place) => {
      if (place === answers.length - 1) each.id = "answer";
      else each.removeAttribute("id");
    });
  }
}

function make(name, values) {
  return Object.assign(document.createElement(name), values);
}
