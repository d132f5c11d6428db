// Colour --------------------------------------------------------------------------------------------------------

function paint(token, name) {
  if (token.name === name) return;
  token.element.classList.replace(token.name, name);
  token.name = name;
}

function colourPanel(panel) {
  const { sample, tokens } = panel, credit = creditOf(sample), quantity = page.quantities[state.quantity];
  const pinned = state.pinned && state.pinned.panel === panel ? state.pinned.t : null;
  const row = pinned === null ? null : kernelRow(sample, credit, pinned);
  const terms = row && state.terms ? termsOf(sample, credit, row) : null;
  panel.box.classList.toggle("pinning", row !== null);
  panel.row = null;
  tokens.forEach((token, t) => token.element.classList.toggle("before", row !== null && t < pinned));
  if (row) {
    const shown = terms || row, most = shown.reduce((greatest, x) => Math.max(greatest, Math.abs(x)), 0);
    const scale = { low: 0, high: most || 1 };
    panel.row = { kind: terms ? "diverging" : "sequential", scale };
    tokens.forEach((token, t) => paint(token, t < pinned ? "na" : classFor(shown[t], panel.row.kind, scale)));
    return;
  }
  const values = seriesOf(sample, quantity.key, credit), scale = scaleOf(quantity, state.operator);
  tokens.forEach((token, t) => {
    paint(token, values && chosen(sample, t) ? classFor(values[t], quantity.scale, scale) : "na");
  });
}

function recolour() {
  panels.forEach(colourPanel);
  showLegend();
  showDetail();
}

function changeOperator() {
  panels.forEach((panel) => { showCurves(panel); showSummary(panel); });
  recolour();
}

function steps(kind) {
  const names = [];
  if (kind === "diverging") for (let i = page.levels; i > 0; i--) names.push("n" + i);
  names.push("na");
  for (let i = 1; i <= page.levels; i++) names.push((kind === "diverging" ? "p" : "s") + i);
  return make("span", "steps", ...names.map((name) => make("i", name)));
}

function showLegend() {
  const quantity = page.quantities[state.quantity], operator = page.operators[state.operator];
  const row = state.pinned ? state.pinned.panel.row : null;
  const scale = row ? row.scale : scaleOf(quantity, state.operator), form = row ? row.kind : quantity.scale;
  const { low, high } = {
    diverging: { low: -scale.high, high: scale.high },
    falling: { low: scale.high, high: scale.low },
    sequential: scale,
  }[form];
  const ends = [number(low, form === "diverging"), number(high, form === "diverging")];
  find("ramp").replaceChildren(ends[0], steps(form), ends[1]);
  find("ramp").setAttribute("aria-label", "Colour scale from " + ends[0] + " to " + ends[1]);
  find("quantity-name").textContent = quantity.label + ".";
  find("quantity-sentence").textContent = quantity.sentence;
  find("operator-name").textContent = operator ? operator.label + "." : "";
  find("operator-sentence").textContent = operator ? operator.sentence : "";
  if (!row) return;
  const { panel, t } = state.pinned;
  const what = row.kind === "diverging" ? "Terms of the advantage of token" : "Share of later credit that reaches token";
  find("quantity-name").textContent = what + " " + t + ".";
  find("quantity-sentence").textContent = "Coloured in " + panel.sample.label + "; Esc or a second click goes back.";
}

// One response --------------------------------------------------------------------------------------------------

function tokenElement(id) {
  const element = make("span", "t na");
  element.dir = "auto";
  for (const [text, mark] of page.vocabulary[id][1]) element.append(mark ? make("span", "m", text) : text);
  return element;
}

function fill(box, ids) {
  return ids.map((id) => {
    const element = tokenElement(id);
    box.append(element, make("wbr"));
    if (page.vocabulary[id][0].endsWith("\n")) box.append(make("br"));
    return { element, name: "na" };
  });
}

function buildPanel(sample, index, prompt) {
  const box = make("div", "tokens"), summary = make("small"), curves = make("div", "curves");
  box.tabIndex = 0;
  box.dir = "ltr";
  box.setAttribute("role", "listbox");
  box.setAttribute("aria-label", "Tokens of " + sample.label);
  const panel = { sample, index, box, summary, curves, prompt, tokens: fill(box, sample.tokens), cursors: [] };
  panel.tokens.forEach((token, t) => {
    token.element.id = "r" + index + "t" + t;
    token.element.setAttribute("role", "option");
    token.element.dataset.t = t;
    if (!chosen(sample, t)) token.element.classList.add("off");
  });
  const tokenAt = (event) => {
    const element = event.target.closest(".t");
    return element ? Number(element.dataset.t) : null;
  };
  box.addEventListener("pointerover", (event) => {
    const t = tokenAt(event);
    if (t !== null && event.pointerType === "mouse") activate(panel, t);
  });
  box.addEventListener("click", (event) => {
    const t = tokenAt(event);
    if (t !== null) { activate(panel, t); pin(panel, t); }
  });
  box.addEventListener("focus", () => {
    if (!state.active || state.active.panel !== panel) activate(panel, 0);
  });
  box.addEventListener("keydown", (event) => move(panel, event));
  panels.push(panel);
  return make("article", "panel", make("header", "", make("h3", "", sample.label), summary), curves, box);
}

function showSummary(panel) {
  const { sample } = panel, credit = creditOf(sample), parts = [];
  if (sample.reward !== null) parts.push("reward " + number(sample.reward));
  parts.push(sample.tokens.length + (sample.tokens.length === 1 ? " token" : " tokens"));
  if (credit) {
    const known = credit.advantages.filter((value, t) => value !== null && chosen(sample, t));
    const { low, high } = span(known), same = high - low <= 1e-6 * Math.max(1, Math.abs(high));
    if (!known.length) parts.push("no advantage");
    else if (same) parts.push("each token's advantage " + number(high, true));
    else parts.push("advantages from " + number(low, true) + " to " + number(high, true));
  } else if (page.operators.length) parts.push("this operator gave it no credit");
  panel.summary.textContent = parts.join(" \u00b7 ");
}

function showCurves(panel) {
  const { sample } = panel, credit = creditOf(sample), first = sample.tokens.findIndex((_, t) => chosen(sample, t));
  const retention = credit && credit.decays && first >= 0 ? Array.from(kernelRow(sample, credit, first)) : null;
  const shown = [
    ["Value V", seriesOf(sample, "value", credit)],
    ["Gate", seriesOf(sample, "gate", credit)],
    ["Retention", retention && retention.map((share, t) => (chosen(sample, t) ? share : null))],
  ];
  panel.cursors = [];
  panel.curves.replaceChildren();
  for (const [name, values] of shown) {
    if (values && values.length > 1) panel.curves.append(...curve(panel, name, values));
  }
  moveCursors(panel);
}

function curve(panel, name, values) {
  const known = values.filter((value) => value !== null), last = values.length - 1;
  const { low, high } = span(known);
  const range = known.length ? number(low, false, 3) + " to " + number(high, false, 3) : DASH;
  const svg = draw("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" });
  svg.setAttribute("aria-label", name + " along the response, " + range);
  const y = (value) => (high > low ? 92 - (84 * (value - low)) / (high - low) : 50);
  let stretch = [];
  const finish = () => {
    if (stretch.length) svg.append(draw("polyline", { class: "line", points: stretch.join(" ") }));
    stretch = [];
  };
  values.forEach((value, t) => {
    if (value === null) finish();
    else stretch.push(((1000 * t) / last).toFixed(1) + "," + y(value).toFixed(1));
  });
  finish();
  const cursor = draw("line", { class: "cursor", y1: 0, y2: 100, x1: -9, x2: -9 });
  svg.append(cursor);
  panel.cursors.push(cursor);
  const place = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.round(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * last);
  };
  svg.addEventListener("pointermove", (event) => activate(panel, place(event)));
  svg.addEventListener("click", (event) => { activate(panel, place(event)); pin(panel, place(event)); });
  return [make("span", "", name, make("br"), range), svg];
}

function moveCursors(panel) {
  const here = state.active && state.active.panel === panel;
  const x = here ? (1000 * state.active.t) / Math.max(1, panel.tokens.length - 1) : -9;
  for (const cursor of panel.cursors) { cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); }
}
