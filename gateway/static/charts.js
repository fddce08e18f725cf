// The two charts, of rounds: each has the numbers of `proposed` and `accepted` tokens, and of the latter by source.

const SVG = "http://www.w3.org/2000/svg";
const RECENT = 8; // rounds of the thin line
const SHOWN = 48; // rounds of the bars
const LEAST = 8; // of the bars' scale

const byId = (id) => document.getElementById(id);

export const share = (rounds) => {
  const proposed = rounds.reduce((sum, round) => sum + round.proposed, 0);
  const accepted = rounds.reduce((sum, round) => sum + round.accepted, 0);
  return proposed ? accepted / proposed : null;
};

export const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);

export function drawCharts(rounds) {
  drawAcceptance(rounds);
  drawLengths(rounds.slice(-SHOWN));
}

function drawAcceptance(rounds) {
  const proposals = rounds.filter((round) => round.proposed);
  const all = [];
  const recent = [];
  let [proposed, accepted] = [0, 0];
  proposals.forEach((round, index) => {
    proposed += round.proposed;
    accepted += round.accepted;
    const x = (100 * index) / Math.max(proposals.length - 1, 1);
    all.push([x, 100 - (100 * accepted) / proposed]);
    recent.push([x, 100 - 100 * share(proposals.slice(Math.max(index + 1 - RECENT, 0), index + 1))]);
  });
  byId("acceptance-line").setAttribute("points", all.map((point) => point.join()).join(" "));
  byId("recent-line").setAttribute("points", recent.map((point) => point.join()).join(" "));
  const words = proposed ? `${percent(accepted / proposed)} of ${proposed} proposed tokens accepted` : "no proposals yet";
  byId("acceptance-chart").setAttribute("aria-label", `acceptance: ${words}`);
}

function drawLengths(rounds) {
  const most = Math.max(LEAST, ...rounds.map((round) => round.proposed));
  const bars = rounds.flatMap((round, index) => [bar(index, round.proposed / most, "rejected"), ...accepted(round, index, most)]);
  byId("k-bars").replaceChildren(...bars);
  byId("k-most").textContent = most;
  const words = rounds.map((round) => round.proposed).join(", ") || "no rounds yet";
  byId("k-chart").setAttribute("aria-label", `k by round: ${words}`);
}

// The bars of the sources stand one on the other: the tallest is drawn first.
function accepted(round, index, most) {
  let height = 0;
  return round.acceptedBySource
    .map((tokens, place) => bar(index, (height += tokens) / most, `of-source source-${place}`))
    .reverse();
}

function bar(index, height, kind) {
  const rect = document.createElementNS(SVG, "rect");
  const place = { x: (100 * index) / SHOWN, y: 100 - 100 * height, width: 80 / SHOWN, height: 100 * height, class: kind };
  for (const [name, value] of Object.entries(place)) rect.setAttribute(name, value);
  return rect;
}
