// Data, numbers and scales of the inspect page. The four files of this folder are one script, in one scope.

// Everything that is shown comes from here and reaches the page as text nodes only.
const page = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const DASH = "\u2014", MINUS = "\u2212";
const OF_OPERATORS = { advantage: "advantages", gate: "gates" };
const state = { quantity: 0, operator: 0, active: null, pinned: null, terms: true, hits: [], hit: -1 };
const panels = [];

function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function number(value, signed = false, digits = 4) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value), extreme = size !== 0 && (size < 1e-4 || size >= 1e6);
  let text = extreme ? size.toExponential(2) : String(Number(size.toPrecision(digits)));
  if (value < 0) text = MINUS + text;
  else if (signed && value > 0) text = "+" + text;
  return text;
}

// Numbers of a response ---------------------------------------------------------------------------------------

const creditOf = (sample) => sample.credit[state.operator] || null;
const chosen = (sample, t) => sample.trained === null || sample.trained[t] === 1;

function seriesOf(sample, key, credit) {
  if (Object.hasOwn(OF_OPERATORS, key)) return (credit && credit[OF_OPERATORS[key]]) || null;
  return Object.hasOwn(sample.series, key) ? sample.series[key] : null;
}

/** Row t of the transport kernel, K[t, u] for every u, or null where the operator did not say how it carries. */
function kernelRow(sample, credit, t) {
  const size = sample.tokens.length, row = new Float64Array(size);
  if (!credit || !(credit.decays || credit.weights)) return null;
  if (!chosen(sample, t)) return row;
  if (credit.decays) {
    for (let u = t, product = 1; u < size; u++) {
      if (!chosen(sample, u)) continue;
      row[u] = product;
      product *= credit.decays[u] ?? 0;
    }
    return row;
  }
  for (let u = 0, count = 0, total = 0; u < size; u++) {
    if (!chosen(sample, u)) continue;
    count += 1;
    total += credit.weights[u] ?? 0;
    if (u >= t) row[u] = total > 0 ? (count * (credit.weights[t] ?? 0)) / total : 1;
  }
  return row;
}

function termsOf(sample, credit, row) {
  return credit.deltas ? row.map((share, u) => share * (credit.deltas[u] ?? 0)) : null;
}

const span = (values) => ({
  low: values.reduce((a, b) => Math.min(a, b), Infinity),
  high: values.reduce((a, b) => Math.max(a, b), -Infinity),
});

// Scales --------------------------------------------------------------------------------------------------------

const scales = new Map();

/** What the ends of a scale stand for: the 2nd and 98th percentile over all responses, so that outliers do not
 * bleach the rest; of the size, where the scale has two sides. */
function scaleOf(quantity, operator) {
  const name = Object.hasOwn(OF_OPERATORS, quantity.key) ? quantity.key + " " + operator : quantity.key;
  if (!scales.has(name)) {
    const all = [];
    for (const sample of page.samples) {
      const values = seriesOf(sample, quantity.key, sample.credit[operator]);
      if (values) values.forEach((value, t) => { if (value !== null && chosen(sample, t)) all.push(value); });
    }
    const size = quantity.scale === "diverging" ? Math.abs : (value) => value;
    const ordered = Float64Array.from(all, (value) => size(value)).sort();
    const at = (share) => ordered[Math.min(ordered.length - 1, Math.max(0, Math.ceil(share * ordered.length) - 1))];
    const last = ordered.length ? ordered[ordered.length - 1] : 0;
    if (quantity.scale === "diverging") scales.set(name, { low: 0, high: (ordered.length && at(0.98)) || last || 1 });
    else scales.set(name, { low: ordered.length ? at(0.02) : 0, high: ordered.length ? at(0.98) : 1 });
  }
  return scales.get(name);
}

function classFor(value, kind, scale) {
  if (value === null || value === undefined) return "na";
  const step = (share) => Math.round(Math.min(1, Math.max(0, share)) * page.levels);
  if (kind === "diverging") {
    const level = step(Math.abs(value) / scale.high);
    return level === 0 ? "na" : (value > 0 ? "p" : "n") + level;
  }
  const width = scale.high - scale.low;
  let share = width > 0 ? (value - scale.low) / width : 0.5;
  if (kind === "falling") share = 1 - share;
  const level = step(share);
  return level === 0 ? "na" : "s" + level;
}
