// An answer as it comes, and as the page shows it: as Markdown or as it is, its reasoning folded.

import { blocksOf } from "./markdown.js";
import { Tokens } from "./tokens.js";

// The text of an answer in an element, which it fills.
export class Answer {
  constructor(element, classOf, labelOf) {
    this.element = element;
    this.tokens = new Tokens(classOf, labelOf);
    this.content = ""; // without reasoning
    this.reasoning = "";
    this.isMarkdown = false;
    this.prefix = ""; // a text that it continues
    this.restart();
  }

  get text() {
    return this.tokens.text;
  }

  // Shows the whole text again, in this form.
  show(isMarkdown) {
    this.isMarkdown = isMarkdown;
    this.restart();
    this.draw();
  }

  restart() {
    this.element.replaceChildren();
    if (this.prefix) this.element.append(Object.assign(document.createElement("span"), { className: "prompt", textContent: this.prefix }));
    this.element.classList.toggle("markdown", this.isMarkdown);
    this.settled = null; // where what is still to be drawn begins in the text
    this.unsettled = []; // elements that more text can change
    this.fold = null;
  }

  // Draws what has come since the last time. Earlier parts stay as they are, so that a long text costs no more.
  draw() {
    const scrolled = this.element.closest(".scrolled");
    const isAtEnd = scrolled && scrolled.scrollHeight - scrolled.scrollTop - scrolled.clientHeight < 40;
    const begin = this.contentStart();
    if (this.settled === null || begin !== this.begin) {
      this.restart();
      this.begin = this.settled = begin;
    }
    if (begin > 0) this.drawReasoning(begin);
    if (this.isMarkdown) {
      for (const element of this.unsettled) element.remove();
      const blocks = blocksOf(this.text, this.settled, this.tokens.show);
      this.element.append(...blocks.map(({ element }) => element));
      this.unsettled = blocks.slice(-1).map(({ element }) => element);
      this.settled = blocks.at(-1)?.start ?? this.settled;
    } else {
      this.element.append(...this.tokens.show(this.settled, this.text.length));
      this.settled = this.text.length;
    }
    if (isAtEnd) scrolled.scrollTop = scrolled.scrollHeight;
  }

  drawReasoning(end) {
    if (this.fold?.end === end) return;
    this.fold?.element.remove();
    const element = document.createElement("details");
    element.className = "reasoning";
    element.open = end === this.text.length; // until the answer itself begins
    const summary = Object.assign(document.createElement("summary"), { textContent: "Reasoning" });
    element.append(summary, ...this.tokens.show(0, end));
    this.element.prepend(element);
    this.fold = { element, end };
  }

  // Returns where the content begins in the text, behind the reasoning and its marker.
  contentStart() {
    if (!this.reasoning) return 0;
    if (this.known !== undefined) return this.known;
    const content = this.content.trimStart();
    const found = content ? this.text.lastIndexOf(content) : -1;
    if (found < this.reasoning.trim().length) return this.text.length;
    if (content.length > 20) this.known = found; // a shorter one could be elsewhere too
    return found;
  }
}
