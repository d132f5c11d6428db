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
  const { keys, prompt } = panel.sample;
  if (!keys || !panel.prompt) return [];
  return keys[t].map(([position, weight]) => {
    const inside = position - prompt.length;
    return { weight, away: t + prompt.length - 1 - position, token: inside < 0 ? panel.prompt[position] : panel.tokens[inside],
             id: inside < 0 ? prompt[position] : panel.sample.tokens[inside] };
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

function showDetail() {
  const box = find("detail"), active = state.active;
  box.classList.toggle("empty", !active);
  if (!active) {
    box.replaceChildren(make("p", "", "Point at a token, or move with the arrow keys, for its numbers. Click it to see where its credit comes from."));
    return;
  }
  const { panel, t } = active, { sample } = panel, credit = creditOf(sample);
  const close = make("button", "", "Close");
  close.id = "close";
  close.type = "button";
  close.addEventListener("click", () => { box.classList.add("empty"); });
  const content = [close, make("h3", "", tokenText(sample.tokens[t])),
    make("p", "", "Token " + t + " of " + sample.tokens.length + ", " + sample.label + (chosen(sample, t) ? "" : ", not chosen by the policy"))];
  if (state.pinned) content.push(...origin(state.pinned.panel, state.pinned.t));
  const numbers = make("table");
  page.quantities.forEach((quantity, index) => {
    const values = seriesOf(sample, quantity.key, credit);
    if (!values) return;
    const row = rowOf(quantity.label, number(values[t], quantity.scale === "diverging"));
    if (index === state.quantity) row.className = "now";
    numbers.append(row);
    if (quantity.key === "logp" && values[t] !== null) numbers.append(rowOf("Probability", number(Math.exp(values[t]))));
  });
  content.push(make("h4", "", page.operators.length ? page.operators[state.operator].label : "Numbers"), numbers);
  if (page.operators.length > 1) {
    const others = make("table");
    page.operators.forEach((operator, index) => {
      const theirs = sample.credit[index];
      const row = rowOf(operator.label, theirs ? number(theirs.advantages[t], true) : DASH);
      if (index === state.operator) row.className = "now";
      others.append(row);
    });
    content.push(make("h4", "", "Its advantage under each operator"), others);
  }
  const keys = keysOf(panel, t);
  if (keys.length) {
    const table = make("table", "wide", make("thead", "", make("tr", "", make("th", "", "Key"), make("th", "", "Share"), make("th", "", "Back"))));
    for (const { weight, away, id } of keys) table.append(rowOf(tokenText(id), number(weight), String(away)));
    content.push(make("h4", "", "Where its heads look"), table, make("p", "", "Mean over the heads that were read, at the position before the token. Back: tokens before that position; 0 is itself."));
  }
  box.replaceChildren(...content);
}

/** Where the advantage of a pinned token comes from. */
function origin(panel, t) {
  const { sample } = panel, credit = creditOf(sample), row = kernelRow(sample, credit, t);
  const heading = make("h4", "", "Where the advantage of token " + t + " (", tokenText(sample.tokens[t]), ") comes from");
  if (!row) {
    const why = credit ? "This operator came as advantages alone: how it carries credit was not given." : "This operator gave this response no credit.";
    return [heading, make("p", "", why)];
  }
  if (!chosen(sample, t)) return [heading, make("p", "", "The policy did not choose this token: it gets no credit, and credit passes through it unchanged.")];
  const terms = termsOf(sample, credit, row), content = [heading];
  const choice = make("div", "choice");
  for (const [label, value] of [["Terms K \u00b7 \u03b4", true], ["Share K", false]]) {
    if (value && !terms) continue;
    const button = make("button", "", label);
    button.type = "button";
    button.setAttribute("aria-pressed", String(value === (state.terms && terms !== null)));
    button.addEventListener("click", () => { state.terms = value; recolour(); });
    choice.append(button);
  }
  content.push(choice);
  const by = terms || row, order = Array.from(by.keys()).filter((u) => u >= t && by[u] !== 0).sort((a, b) => Math.abs(by[b]) - Math.abs(by[a]) || a - b);
  const head = ["From token", "K", ...(terms ? ["\u03b4", "K \u00b7 \u03b4"] : [])];
  const table = make("table", "wide", make("thead", "", make("tr", "", ...head.map((text) => make("th", "", text)))));
  for (const u of order.slice(0, 6)) {
    const cells = terms ? [number(row[u]), number(credit.deltas[u], true), number(terms[u], true)] : [number(row[u])];
    table.append(rowOf(make("span", "", u + " ", tokenText(sample.tokens[u])), ...cells));
  }
  content.push(table);
  const rest = order.slice(6);
  if (terms) {
    const sum = terms.reduce((a, b) => a + b, 0), left = rest.reduce((a, u) => a + terms[u], 0);
    content.push(make("p", "", (rest.length ? rest.length + " further tokens add " + number(left, true) + ". " : "") + "The terms add up to " + number(sum, true) + "."));
  } else if (rest.length) content.push(make("p", "", rest.length + " further tokens."));
  return content;
}

function speak(panel, t) {
  const { sample } = panel, credit = creditOf(sample), quantity = page.quantities[state.quantity];
  const values = quantity ? seriesOf(sample, quantity.key, credit) : null;
  const text = page.vocabulary[sample.tokens[t]][1].map(([piece]) => piece).join("");
  find("spoken").textContent = "Token " + t + ", " + text + (values ? ", " + quantity.label + " " + number(values[t], true) : "");
}
