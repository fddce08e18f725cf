// Markdown as DOM nodes. No text becomes HTML, no image is loaded, and only http, https and mailto become links.
//
// All that is shown is a part of the source as it is, so each token of an answer keeps its colour: `show(from, to)`
// returns the nodes of a range of the source. A text that is still coming is Markdown too: a fence may be open.

import { showInline } from "./inline.js";

const DEEPEST = 8; // levels of quotes and lists; deeper ones are text
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const INDENTED = /^(?: {4}|\t)/;
const CELL = /^\s*:?-+:?\s*$/;

// Returns the elements of a source from `start` on, each with the place in the source where it begins.
export function blocksOf(source, start, show) {
  const lines = [];
  for (let at = start; at < source.length; ) {
    const next = source.indexOf("\n", at);
    const end = next < 0 ? source.length : next;
    lines.push({ start: at, text: source.slice(at, end) });
    at = end + 1;
  }
  return blocks(lines, 0, show);
}

function blocks(lines, depth, show) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const read = [fence, heading, rule, quote, list, table, indented].find((reader) => begins(reader, lines, at, depth));
    const [element, next] = (read ?? paragraph)(lines, at, depth, show);
    found.push({ element, start: lines[at].start });
    at = next;
  }
  return found;
}

function begins(reader, lines, at, depth) {
  const { text } = lines[at];
  switch (reader) {
    case fence: return FENCE.test(text);
    case heading: return HEADING.test(text);
    case rule: return RULE.test(text);
    case quote: return depth < DEEPEST && QUOTE.test(text);
    case list: return depth < DEEPEST && ITEM.test(text);
    case table: return isTable(lines, at);
    case indented: return INDENTED.test(text);
  }
}

// -- The readers: each returns an element and the number of the line behind it

function fence(lines, at, depth, show) {
  const [, marker, info] = FENCE.exec(lines[at].text);
  const closing = new RegExp(`^ {0,3}${marker[0]}{${marker.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end].text)) end += 1;
  const language = info.trim().split(/\s/)[0].slice(0, 40);
  return [codeOf(lines.slice(at + 1, end), language, show), Math.min(end + 1, lines.length)];
}

function indented(lines, at, depth, show) {
  let end = at + 1;
  while (end < lines.length && (INDENTED.test(lines[end].text) || isBlank(lines[end]))) end += 1;
  while (isBlank(lines[end - 1])) end -= 1;
  const body = lines.slice(at, end).map((line) => without(line, INDENTED.exec(line.text)?.[0].length ?? 0));
  return [codeOf(body, "", show), end];
}

function codeOf(lines, name, show) {
  const code = make("code");
  for (const { start, text } of lines) code.append(...show(start, start + text.length), "\n");
  const language = make("span", { textContent: name });
  const copy = make("button", { type: "button", className: "copy-code", textContent: "Copy code" });
  const bar = make("div", { className: "bar-of-code" });
  bar.append(language, copy);
  const pre = make("pre", { tabIndex: 0 });
  pre.append(code);
  const block = make("div", { className: "code" });
  block.append(bar, pre);
  return block;
}

function heading(lines, at, depth, show) {
  const { start, text } = lines[at];
  const marker = HEADING.exec(text);
  let end = text.trimEnd().length;
  while (end > marker[0].length && text[end - 1] === "#") end -= 1;
  const element = make(`h${Math.min(marker[1].length + 2, 6)}`); // the page has h1 and h2
  element.append(...showInline([trimmed(start + marker[0].length, text.slice(marker[0].length, end))], show));
  return [element, at + 1];
}

function rule(lines, at) {
  return [make("hr"), at + 1];
}

function quote(lines, at, depth, show) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end].text)) end += 1;
  const element = make("blockquote");
  const inner = lines.slice(at, end).map((line) => without(line, QUOTE.exec(line.text)[0].length));
  element.append(...elementsOf(blocks(inner, depth + 1, show)));
  return [element, end];
}

function list(lines, at, depth, show) {
  const [, , marker] = ITEM.exec(lines[at].text);
  const isNumbered = /\d/.test(marker);
  const element = make(isNumbered ? "ol" : "ul");
  if (isNumbered) element.start = Number.parseInt(marker, 10);
  let next = at;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next].text);
    if (!item || /\d/.test(item[2]) !== isNumbered || RULE.test(lines[next].text)) break;
    const [indent, width] = [item[1].length, Math.min(item[0].length, item[1].length + item[2].length + 4)];
    const inner = [without(lines[next], width)];
    for (next += 1; next < lines.length && belongs(lines, next, indent); next += 1) {
      inner.push(without(lines[next], Math.min(indentOf(lines[next]), width)));
    }
    const li = make("li");
    li.append(...elementsOf(blocks(inner, depth + 1, show)));
    element.append(li);
  }
  return [element, next];
}

// Whether a line continues an item with a marker at this indent. A blank line does if what follows it does.
function belongs(lines, at, indent) {
  const line = lines[at];
  if (isBlank(line)) {
    let next = at + 1;
    while (next < lines.length && isBlank(lines[next])) next += 1;
    if (next === lines.length) return false;
    const item = ITEM.exec(lines[next].text);
    return indentOf(lines[next]) > indent + 1 || item !== null;
  }
  if (indentOf(line) > indent + 1) return true;
  return !ITEM.test(line.text) && !startsBlock(lines, at) && !isBlank(lines[at - 1]);
}

function table(lines, at, depth, show) {
  const [head, body] = [make("thead"), make("tbody")];
  head.append(row(lines[at], "th", show));
  let next = at + 2;
  for (; next < lines.length && lines[next].text.includes("|"); next += 1) body.append(row(lines[next], "td", show));
  const element = make("table");
  element.append(head, body);
  const frame = make("div", { className: "table", tabIndex: 0 });
  frame.append(element);
  return [frame, next];
}

function row(line, kind, show) {
  const tr = make("tr");
  for (const cell of cellsOf(line)) {
    const element = make(kind);
    element.append(...showInline([cell], show));
    tr.append(element);
  }
  return tr;
}

function paragraph(lines, at, depth, show) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines, end)) end += 1;
  const element = make("p");
  element.append(...showInline(lines.slice(at, end).map(({ start, text }) => ({ start, text: text.trimEnd() })), show));
  return [element, end];
}

// -- Lines

function startsBlock(lines, at) {
  const { text } = lines[at];
  const item = ITEM.exec(text);
  const isItem = item !== null && item[3] && (!/\d/.test(item[2]) || Number.parseInt(item[2], 10) === 1);
  return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || isItem || isTable(lines, at);
}

function isTable(lines, at) {
  if (!lines[at].text.includes("|") || at + 1 >= lines.length) return false;
  const under = lines[at + 1];
  if (!under.text.includes("-")) return false;
  const cells = cellsOf(under);
  return cells.length === cellsOf(lines[at]).length && cells.every(({ text }) => CELL.test(text));
}

function cellsOf({ start, text }) {
  const cells = [];
  let from = 0;
  for (let at = 0; at <= text.length; at += 1) {
    if (at < text.length && (text[at] !== "|" || text[at - 1] === "\\")) continue;
    cells.push(trimmed(start + from, text.slice(from, at)));
    from = at + 1;
  }
  if (!cells[0].text) cells.shift();
  if (cells.length && !cells.at(-1).text) cells.pop();
  return cells;
}

function trimmed(start, text) {
  const behind = text.trimStart();
  return { start: start + text.length - behind.length, text: behind.trimEnd() };
}

const without = ({ start, text }, width) => ({ start: start + Math.min(width, text.length), text: text.slice(width) });
const indentOf = ({ text }) => text.length - text.trimStart().length;
const isBlank = ({ text }) => !text.trim();
const elementsOf = (found) => found.map(({ element }) => element);
const make = (name, values = {}) => Object.assign(document.createElement(name), values);
