// The tokens of a text: their colours, and what is known of the one under the pointer or the cursor.

const byId = (id) => document.getElementById(id);
const places = new WeakMap(); // of the elements of tokens: the text and the number of the token in it

// The tokens of one text. Each has `text` and `source`; `logprob`, `alternatives`, `margin` and `nearTie` if they are known.
export class Tokens {
  constructor(classOf, labelOf) {
    this.classOf = classOf; // of a source
    this.labelOf = labelOf;
    this.list = [];
    this.ends = []; // where each ends in the text
    this.text = "";
  }

  add(token) {
    this.list.push(token);
    this.text += token.text;
    this.ends.push(this.text.length);
  }

  // Returns the nodes of a range of the text, one for each token in it.
  show = (from, to) => {
    const nodes = [];
    for (let number = this.numberAt(from), at = from; at < to; number += 1) {
      const end = Math.min(this.ends[number], to);
      if (end <= at) continue; // it has no text
      const token = this.list[number];
      const span = document.createElement("span");
      span.className = `token ${this.classOf(token.source)}${token.nearTie ? " near-tie" : ""}`;
      span.append(this.text.slice(at, end));
      places.set(span, { tokens: this, number });
      nodes.push(span);
      at = end;
    }
    return nodes;
  };

  // Returns the number of the token that has this place of the text.
  numberAt(place) {
    let [low, high] = [0, this.ends.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

let current = null; // the element of the token that is described

export function hideTip() {
  current?.classList.remove("current");
  current = null;
  byId("tip").hidden = true;
}

function showTip(element) {
  const { tokens, number } = places.get(element);
  const token = tokens.list[number];
  hideTip();
  current = element;
  element.classList.add("current");
  const lines = [`${JSON.stringify(token.text)}, token ${number + 1}`, `source: ${tokens.labelOf(token.source)}`];
  if (token.logprob !== undefined) lines.push(`log-probability ${token.logprob.toFixed(3)} (${percent(token.logprob)})`);
  if (token.nearTie) lines.push("near tie: rounding could have chosen another token");
  if (token.margin !== undefined) lines.push(`margin ${token.margin.toPrecision(2)}`);
  const tip = byId("tip");
  tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  if (token.alternatives?.length) tip.append(tableOf(token.alternatives));
  tip.hidden = false;
  placeTip();
}

function placeTip() {
  if (!current) return;
  const [tip, element] = [byId("tip"), current];
  const box = element.getClientRects()[0] ?? element.getBoundingClientRect();
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - tip.offsetHeight - 6)}px`;
}

function tableOf(alternatives) {
  const table = document.createElement("table");
  for (const { text, logprob } of alternatives) {
    const row = table.insertRow();
    row.insertCell().textContent = JSON.stringify(text);
    row.insertCell().textContent = percent(logprob);
  }
  return table;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

// Makes the tokens within an element tell about themselves: under the pointer, at a touch, and by the arrow keys.
export function describeTokensIn(element) {
  const tokenOf = (event) => (event.target instanceof Element ? event.target.closest(".token") : null);
  const describe = (event) => {
    const token = tokenOf(event);
    if (token === current) return;
    if (token && places.has(token)) showTip(token);
    else hideTip();
  };
  element.addEventListener("pointerover", describe);
  element.addEventListener("click", describe);
  element.addEventListener("pointerleave", hideTip);
  element.addEventListener("scroll", placeTip, true);
  element.addEventListener("focusout", hideTip);
  element.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const answer = event.target.closest(".answer");
    if (!step || answer !== event.target) return;
    const all = [...answer.querySelectorAll(".token")].filter((token) => token.getClientRects().length);
    if (!all.length) return;
    event.preventDefault();
    const next = all[Math.max(0, Math.min(all.indexOf(current) + step, all.length - 1))];
    next.scrollIntoView({ block: "nearest" });
    showTip(next);
  });
}
