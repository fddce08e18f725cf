// Markdown within a paragraph: code, emphasis and links. Every search is bounded, so that no text takes long.

const DEEPEST = 6; // levels of emphasis; deeper marks are text
const LONGEST_LABEL = 1000;
const LONGEST_ADDRESS = 2000;
const MARKS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };
const ESCAPED = "\\`*_~#+-.!|<>$"; // not brackets: \( and \[ begin formulas
const PROTOCOLS = ["http:", "https:", "mailto:"];

// Returns the nodes of lines, each a part of the source with its place there. `show` returns those of a range.
export function showInline(lines, show) {
  const text = lines.map((line) => line.text).join("\n");
  return new Inline(lines, text, show).nodes(0, text.length, 0);
}

class Inline {
  constructor(lines, text, show) {
    this.lines = lines;
    this.text = text;
    this.show = show;
    this.withoutCode = new Map(); // by the end of a range and the length of a mark of code: from where on it does not end
    let start = 0;
    this.starts = lines.map((line) => [start, (start += line.text.length + 1)][0]);
  }

  nodes(from, to, depth) {
    const found = [];
    const unclosed = new Set(); // marks without an end in this range
    let plain = from;
    let at = from;
    const take = (end, nodes, next) => {
      found.push(...this.plain(plain, end), ...nodes);
      plain = at = next;
    };
    while (at < to) {
      const character = this.text[at];
      if (character === "\\" && ESCAPED.includes(this.text[at + 1]) && at + 1 < to) {
        take(at, [], at + 1);
        at += 1; // what follows is plain
      } else if (character === "`") {
        const [end, next, width] = this.codeEnd(at, to);
        if (next) take(at, [element("code", this.plain(at + width, end))], next);
        else at += width;
      } else if ("*_~".includes(character)) {
        const mark = this.markAt(at, to);
        const end = mark && depth < DEEPEST && !unclosed.has(mark) ? this.markEnd(mark, at, to) : -1;
        if (end >= 0) {
          take(at, [element(MARKS[mark], this.nodes(at + mark.length, end, depth + 1))], end + mark.length);
        } else {
          if (mark) unclosed.add(mark);
          at += mark ? mark.length : 1;
        }
      } else if (character === "[" || (character === "!" && this.text[at + 1] === "[")) {
        const link = depth < DEEPEST && this.linkAt(character === "!" ? at + 1 : at, to);
        if (link) take(at, [anchor(link.address, this.nodes(link.from, link.to, DEEPEST))], link.next);
        else at += 1;
      } else if (character === "h" && !isWord(this.text[at - 1])) {
        const address = /^https?:\/\/[^\s<>"`]+/.exec(this.text.slice(at, Math.min(to, at + LONGEST_ADDRESS)));
        const end = address ? at + address[0].replace(/[.,;:!?)'\]*_]+$/, "").length : at;
        const safe = address && safeAddress(this.text.slice(at, end));
        if (safe) take(at, [anchor(safe, this.plain(at, end))], end);
        else at += 1;
      } else at += 1;
    }
    found.push(...this.plain(plain, to));
    return found;
  }

  // Returns the nodes of a range as it is: a part for each line, and the ends of the lines between them.
  plain(from, to) {
    const found = [];
    for (let number = this.lineAt(from); number < this.lines.length; number += 1) {
      const [line, start] = [this.lines[number], this.starts[number]];
      if (start > to) break;
      const end = start + line.text.length;
      if (from < end && to > start) {
        const [first, last] = [Math.max(from, start), Math.min(to, end)];
        found.push(...this.show(line.start + first - start, line.start + last - start));
      }
      if (from <= end && end < to) found.push("\n");
    }
    return found;
  }

  lineAt(place) {
    let [low, high] = [0, this.starts.length];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= place) low = middle;
      else high = middle;
    }
    return low;
  }

  // Returns where the code that begins here ends, what is behind it (0: it does not end), and the length of its mark.
  codeEnd(at, to) {
    let width = 1;
    while (this.text[at + width] === "`") width += 1;
    const key = `${to} ${width}`;
    if (at < (this.withoutCode.get(key) ?? Infinity)) {
      for (let end = at + width; (end = this.text.indexOf("`", end)) >= 0 && end < to; ) {
        let length = 1;
        while (this.text[end + length] === "`") length += 1;
        if (length === width && end + length <= to) return [end, end + length, width];
        end += length;
      }
      this.withoutCode.set(key, at);
    }
    return [0, 0, width];
  }

  // Returns the mark that can begin an emphasis here; null if none can.
  markAt(at, to) {
    const character = this.text[at];
    const mark = this.text[at + 1] === character ? character + character : character;
    const behind = this.text[at + mark.length];
    if (!(mark in MARKS) || at + mark.length >= to || /\s/.test(behind)) return null;
    return character === "_" && isWord(this.text[at - 1]) ? null : mark;
  }

  markEnd(mark, at, to) {
    for (let end = at + mark.length; end < to; end += 1) {
      const character = this.text[end];
      if (character === "\\") end += 1;
      else if (character === "`") {
        const [, next, width] = this.codeEnd(end, to);
        end = (next || end + width) - 1;
      } else if (character === mark[0]) {
        let length = 1;
        while (this.text[end + length] === character && end + length < to) length += 1;
        const isEnd = !/\s/.test(this.text[end - 1]) && !(character === "_" && isWord(this.text[end + length]));
        if (isEnd && end > at + mark.length && (length === mark.length || length === 3)) return end + length - mark.length;
        end += length - 1;
      }
    }
    return -1;
  }

  // Returns a link to a safe address that begins here; null if there is none, and the text stays as it is.
  linkAt(at, to) {
    let open = 0;
    let close = at;
    for (const last = Math.min(to, at + LONGEST_LABEL); close < last; close += 1) {
      if (this.text[close] === "[") open += 1;
      else if (this.text[close] === "]" && --open === 0) break;
    }
    if (open !== 0 || this.text[close + 1] !== "(") return null;
    const rest = this.text.slice(close + 2, Math.min(to, close + 2 + LONGEST_ADDRESS));
    const parts = /^<?((?:[^\s()<>]|\([^\s()]*\))*)>?(?: +"[^"\n]*")?\)/.exec(rest);
    const address = parts && safeAddress(parts[1]);
    return address ? { address, from: at + 1, to: close, next: close + 2 + parts[0].length } : null;
  }
}

function safeAddress(text) {
  try {
    const address = new URL(text); // a relative one is no link
    return PROTOCOLS.includes(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

function anchor(address, nodes) {
  const link = element("a", nodes);
  return Object.assign(link, { href: address, title: address, rel: "noopener noreferrer nofollow", target: "_blank" });
}

function element(name, nodes) {
  const made = document.createElement(name);
  made.append(...nodes);
  return made;
}

const isWord = (character) => character !== undefined && /[\p{L}\p{N}]/u.test(character);
