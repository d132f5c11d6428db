// The chosen token ----------------------------------------------------------------------------------------------

let outlined = [];

function activate(panel, t) {
  const before = state.active;
  if (before && before.panel === panel && before.t === t) return;
  if (before) {
    before.panel.tokens[before.t].element.classList.remove("active");
    if (before.panel !== panel) { state.active = null; moveCursors(before.panel); }
  }
  state.active = { panel, t };
  const element = panel.tokens[t].element;
  element.classList.add("active");
  panel.box.setAttribute("aria-activedescendant", element.id);
  for (const other of outlined) other.classList.remove("key");
  outlined = keysOf(panel, t).map(({ token }) => token.element);
  for (const other of outlined) other.classList.add("key");
  moveCursors(panel);
  showDetail();
}

function keysOf(panel, t) {
  const { keys, prompt, tokens } = panel.sample;
  if (!keys || !panel.prompt) return [];
  return keys[t].map(([position, weight]) => {
    const inside = position - prompt.length, away = t - 1 - inside;
    return inside < 0
      ? { weight, away, token: panel.prompt[position], id: prompt[position] }
      : { weight, away, token: panel.tokens[inside], id: tokens[inside] };
  });
}

function pin(panel, t) {
  const same = state.pinned && state.pinned.panel === panel && state.pinned.t === t;
  if (state.pinned) state.pinned.panel.tokens[state.pinned.t].element.classList.remove("pinned");
  const before = state.pinned ? state.pinned.panel : null;
  state.pinned = same ? null : { panel, t };
  if (!same) panel.tokens[t].element.classList.add("pinned");
  if (before && before !== panel) colourPanel(before);
  colourPanel(panel);
  showLegend();
  showDetail();
}

function unpin() {
  if (state.pinned) pin(state.pinned.panel, state.pinned.t);
}

function tokenText(id) {
  const code = make("bdi", "code");
  for (const [text, mark] of page.vocabulary[id][1]) code.append(mark ? make("span", "m", text) : text);
  return code;
}

function rowOf(label, ...values) {
  const heading = make("th", "", label);
  heading.scope = "row";
  return make("tr", "", heading, ...values.map((value) => make("td", "", value)));
}

function tableOf(heads, rows) {
  const table = make("table", "wide");
  table.append(make("thead", "", make("tr", "", ...heads.map((text) => make("th", "", text)))), ...rows);
  return table;
}

function showDetail() {
  const box = find("detail"), active = state.active;
  box.classList.toggle("empty", !active);
  if (!active) {
    const hint =
      "Point at a token, or move with the arrow keys, for its numbers. Click it to see where its credit comes from.";
    box.replaceChildren(make("p", "", hint));
    return;
  }
  const { panel, t } = active, { sample } = panel, close = make("button", "", "Close");
  close.id = "close";
  close.type = "button";
  close.addEventListener("click", () => { box.classList.add("empty"); });
  const place = "Token " + t + " of " + sample.tokens.length + ", " + sample.label;
  box.replaceChildren(
    close,
    make("h3", "", tokenText(sample.tokens[t])),
    make("p", "", place + (chosen(sample, t) ? "" : ", not chosen by the policy")),
    ...(state.pinned ? origin(state.pinned.panel, state.pinned.t) : []),
    ...numbersOf(sample, t),
    ...underEachOperator(sample, t),
    ...lookedAt(panel, t),
  );
}

function numbersOf(sample, t) {
  const table = make("table"), credit = creditOf(sample);
  page.quantities.forEach((quantity, index) => {
    const values = seriesOf(sample, quantity.key, credit);
    if (!values) return;
    const row = rowOf(quantity.label, number(values[t], quantity.scale === "diverging"));
    if (index === state.quantity) row.className = "now";
    table.append(row);
    if (quantity.key === "logp" && values[t] !== null) table.append(rowOf("Probability", number(Math.exp(values[t]))));
  });
  return [make("h4", "", page.operators.length ? page.operators[state.operator].label : "Numbers"), table];
}

function underEachOperator(sample, t) {
  if (page.operators.length < 2) return [];
  const table = make("table");
  page.operators.forEach((operator, index) => {
    const credit = sample.credit[index];
    const row = rowOf(operator.label, credit ? number(credit.advantages[t], true) : DASH);
    if (index === state.operator) row.className = "now";
    table.append(row);
  });
  return [make("h4", "", "Its advantage under each operator"), table];
}

function lookedAt(panel, t) {
  const rows = keysOf(panel, t).map(({ weight, away, id }) => rowOf(tokenText(id), number(weight), String(away)));
  if (!rows.length) return [];
  const meaning =
    "Mean over the heads that were read, at the position before the token. Back: tokens before that position; 0 is " +
    "itself.";
  return [make("h4", "", "Where its heads look"), tableOf(["Key", "Share", "Back"], rows), make("p", "", meaning)];
}

/** Where the advantage of a pinned token comes from. */
function origin(panel, t) {
  const { sample } = panel, credit = creditOf(sample), row = kernelRow(sample, credit, t);
  const token = tokenText(sample.tokens[t]);
  const heading = make("h4", "", "Where the advantage of token " + t + " (", token, ") comes from");
  const only = (text) => [heading, make("p", "", text)];
  if (!credit) return only("This operator gave this response no credit.");
  if (!row) return only("This operator came as advantages alone: how it carries credit was not given.");
  if (!chosen(sample, t)) {
    return only("The policy did not choose this token: it gets no credit, which passes through it unchanged.");
  }
  const terms = termsOf(sample, credit, row), by = terms || row;
  const order = Array.from(by.keys()).filter((u) => u >= t && by[u] !== 0);
  order.sort((a, b) => Math.abs(by[b]) - Math.abs(by[a]) || a - b);
  const rows = order.slice(0, 6).map((u) => {
    const cells = terms ? [number(credit.deltas[u], true), number(terms[u], true)] : [];
    return rowOf(make("span", "", u + " ", tokenText(sample.tokens[u])), number(row[u]), ...cells);
  });
  const table = tableOf(["From token", "K", ...(terms ? ["\u03b4", "K \u00b7 \u03b4"] : [])], rows);
  return [heading, choiceOf(terms !== null), table, make("p", "", summaryOf(terms, order.slice(6)))];
}

function choiceOf(hasTerms) {
  const box = make("div", "choice");
  for (const [label, value] of [["Terms K \u00b7 \u03b4", true], ["Share K", false]]) {
    if (value && !hasTerms) continue;
    const button = make("button", "", label);
    button.type = "button";
    button.setAttribute("aria-pressed", String(value === (state.terms && hasTerms)));
    button.addEventListener("click", () => { state.terms = value; recolour(); });
    box.append(button);
  }
  return box;
}

function summaryOf(terms, rest) {
  if (!terms) return rest.length ? rest.length + " further tokens." : "";
  const total = (values) => number(values.reduce((a, b) => a + b, 0), true);
  const further = rest.length ? rest.length + " further tokens add " + total(rest.map((u) => terms[u])) + ". " : "";
  return further + "The terms add up to " + total(Array.from(terms)) + ".";
}

function speak(panel, t) {
  const { sample } = panel, quantity = page.quantities[state.quantity];
  const values = seriesOf(sample, quantity.key, creditOf(sample));
  const text = page.vocabulary[sample.tokens[t]][1].map(([piece]) => piece).join("");
  const said = values ? ", " + quantity.label + " " + number(values[t], true) : "";
  find("spoken").textContent = "Token " + t + ", " + text + said;
}
