// The numbers of a generation: tokens by source, rounds, and tokens a second.

import { drawCharts, percent, share } from "./charts.js";

const byId = (id) => document.getElementById(id);
const show = (id, text) => (byId(id).textContent = text);

// A generation as it comes. With `compared`, it is that one again by the target alone, and only its rate is shown.
export class Progress {
  constructor(sources, compared, before) {
    this.sources = sources; // names of the sources of draft tokens
    this.compared = compared;
    this.before = before; // the generation before, for the rate of the target alone
    this.text = "";
    this.count = 0;
    this.counts = Object.fromEntries([...sources, "target"].map((source) => [source, 0]));
    this.rounds = [];
    this.first = 0; // tokens of the first round
    this.askedAt = performance.now();
  }

  take(choice) {
    if (this.count) {
      const by = (source) => choice.tokens.filter((token) => token.source === source).length;
      this.rounds.push({ ...choice.round, acceptedBySource: this.sources.map(by) });
    } else {
      this.beganAt = performance.now(); // the first round computes the prompt, and counts for no rate
      this.first = choice.tokens.length;
    }
    for (const { text, source } of choice.tokens) {
      this.text += text;
      if (source in this.counts) this.counts[source] += 1;
      this.count += 1;
    }
  }

  draw() {
    const later = this.count - this.first;
    const rate = later ? (1000 * later) / (performance.now() - this.beganAt) : 0;
    if (this.compared) {
      show("state", `the target alone: ${this.count} tokens`);
      return showRates(this.compared.rate, rate, "now");
    }
    for (const [source, count] of Object.entries(this.counts)) show(`${source}-tokens`, count);
    drawCharts(this.rounds);
    show("first", this.count ? `${(this.beganAt - this.askedAt).toFixed(0)} ms` : "–");
    show("acceptance", percent(share(this.rounds)));
    show("length", later ? (later / this.rounds.length).toFixed(2) : "–");
    showRates(rate, this.before?.alone ?? 0, "last time");
  }

  // Shows the server's own measurements. Returns the words for them.
  finish(timings) {
    this.draw();
    const { predicted_per_second: rate, predicted_n: tokens, speedup } = timings;
    if (this.compared) {
      this.compared.alone = rate;
      showRates(this.compared.rate, rate, "measured");
      return this.text === this.compared.text ? `the same text by the target alone, ${tokens} tokens` : OTHER_TEXT;
    }
    this.rate = rate;
    this.alone = speedup && rate / speedup;
    showRates(rate, this.alone, "estimated");
    const times = speedup ? `, ${speedup.toFixed(2)} times as fast as the target alone` : "";
    return `${tokens} tokens, ${rate.toFixed(1)} a second${times}`;
  }
}

const OTHER_TEXT =
  "another text by the target alone: in 16 bits or on a GPU, rounding can decide between nearly equal tokens";

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
