// Keyboard ------------------------------------------------------------------------------------------------------

function goTo(panel, t) {
  activate(panel, t);
  panel.tokens[t].element.scrollIntoView({ block: "nearest" });
  speak(panel, t);
}

/** The token above or below: the nearest on the next line that differs, as the text is laid out now. */
function onOtherLine(panel, t, direction) {
  const box = (u) => panel.tokens[u].element.getClientRects()[0] || panel.tokens[u].element.getBoundingClientRect();
  const from = box(t), middle = from.left + from.width / 2;
  let best = t, line = null, distance = Infinity;
  for (let u = t + direction; u >= 0 && u < panel.tokens.length; u += direction) {
    const here = box(u);
    if (Math.abs(here.top - from.top) < from.height / 2) continue;
    if (line === null) line = here.top;
    if (Math.abs(here.top - line) >= from.height / 2) break;
    const away = Math.abs(here.left + here.width / 2 - middle);
    if (away < distance) { best = u; distance = away; }
  }
  return best;
}

function move(panel, event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const last = panel.tokens.length - 1, t = state.active && state.active.panel === panel ? state.active.t : 0;
  const target = {
    ArrowRight: () => Math.min(last, t + 1), ArrowLeft: () => Math.max(0, t - 1), Home: () => 0, End: () => last,
    ArrowDown: () => onOtherLine(panel, t, 1), ArrowUp: () => onOtherLine(panel, t, -1),
  }[event.key];
  if (target) { event.preventDefault(); goTo(panel, target()); }
  else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); activate(panel, t); pin(panel, t); }
}

function cycle(name, by) {
  const select = find(name);
  if (select.options.length < 2) return;
  select.selectedIndex = (select.selectedIndex + by + select.options.length) % select.options.length;
  select.dispatchEvent(new Event("change"));
  find("spoken").textContent = select.options[select.selectedIndex].textContent;
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "Escape") { unpin(); return; }
  if (event.target.closest("input, select, textarea")) return;
  const action = {
    "/": () => find("search").focus(), q: () => cycle("quantity", 1), Q: () => cycle("quantity", -1),
    o: () => cycle("operator", 1), O: () => cycle("operator", -1), n: () => stepHit(1), N: () => stepHit(-1),
    t: changeTheme, "?": () => { find("help").open = !find("help").open; },
  }[event.key];
  if (action) { event.preventDefault(); action(); }
});

// Search --------------------------------------------------------------------------------------------------------

function search(wanted) {
  for (const hit of state.hits) for (const element of elementsOf(hit)) element.classList.remove("hit", "hit-now");
  state.hits = [];
  state.hit = -1;
  if (wanted) {
    const pattern = new RegExp(wanted.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "giu");
    for (const panel of panels) findIn(panel, pattern);
    for (const hit of state.hits) for (const element of elementsOf(hit)) element.classList.add("hit");
  }
  showMatches(wanted);
}

function elementsOf({ panel, from, to }) {
  return panel.tokens.slice(from, to + 1).map((token) => token.element);
}

function findIn(panel, pattern) {
  const starts = [];
  let text = "";
  for (const id of panel.sample.tokens) { starts.push(text.length); text += page.vocabulary[id][0]; }
  let t = 0;
  for (const match of text.matchAll(pattern)) {
    const end = match.index + match[0].length;
    while (t + 1 < starts.length && starts[t + 1] <= match.index) t += 1;
    let to = t;
    while (to + 1 < starts.length && starts[to + 1] < end) to += 1;
    state.hits.push({ panel, from: t, to });
  }
}

function showMatches(wanted) {
  const count = state.hits.length;
  const place = state.hit < 0 ? "" : state.hit + 1 + " of ";
  find("matches").textContent = !wanted ? "" : count === 0 ? "no match" : place + count;
  find("previous").disabled = find("next").disabled = count === 0;
}

function stepHit(by) {
  const count = state.hits.length;
  if (!count) return;
  const mark = (on) => {
    const hit = state.hits[state.hit];
    if (hit) for (const element of elementsOf(hit)) element.classList.toggle("hit-now", on);
  };
  mark(false);
  state.hit = state.hit < 0 ? (by > 0 ? 0 : count - 1) : (state.hit + by + count) % count;
  mark(true);
  const hit = state.hits[state.hit];
  activate(hit.panel, hit.from);
  hit.panel.tokens[hit.from].element.scrollIntoView({ block: "center" });
  showMatches(find("search").value);
}

// The page ------------------------------------------------------------------------------------------------------

function changeTheme() {
  const root = document.documentElement, now = root.dataset.theme || "system";
  const next = { system: "light", light: "dark", dark: "system" }[now];
  if (next === "system") delete root.dataset.theme;
  else root.dataset.theme = next;
  find("theme").textContent = "Theme: " + next;
}

function promptOf(sample) {
  const box = make("details", "prompt", make("summary", "", "Prompt"));
  let tokens = null;
  if (sample.prompt) {
    const inner = make("div", "tokens");
    inner.dir = "ltr";
    tokens = fill(inner, sample.prompt);
    box.append(inner);
    box.open = sample.prompt.length <= 400;
  } else if (sample.text) {
    const inner = make("div", "text");
    inner.dir = "auto";
    let length = 0;
    for (const [text, mark] of sample.text) {
      inner.append(mark ? make("span", "m", text) : text);
      length += text.length;
    }
    box.append(inner);
    box.open = length <= 1200;
  } else return { box: null, tokens };
  return { box, tokens };
}

function build() {
  const main = find("responses"), groups = new Map();
  page.samples.forEach((sample, index) => {
    if (!groups.has(sample.group)) groups.set(sample.group, []);
    groups.get(sample.group).push([sample, index]);
  });
  let count = 0;
  for (const members of groups.values()) {
    count += 1;
    const { box, tokens } = promptOf(members[0][0]), grid = make("div", "panels");
    for (const [sample, index] of members) grid.append(buildPanel(sample, index, tokens));
    const heading = make("h2", "", groups.size > 1 ? "Prompt " + count : "Responses");
    main.append(make("section", "", heading, ...(box ? [box] : []), grid));
  }
}

function options(name, items, change) {
  const select = find(name);
  for (const { label } of items) select.append(make("option", "", label));
  select.closest("label").hidden = items.length === 0;
  select.addEventListener("change", () => { state[name] = select.selectedIndex; change(); });
}

options("quantity", page.quantities, recolour);
options("operator", page.operators, changeOperator);
for (const { label, sentence } of [...page.quantities, ...page.operators]) {
  if (sentence) find("glossary").append(make("dt", "", label), make("dd", "", sentence));
}
find("search").addEventListener("input", (event) => search(event.target.value));
find("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); stepHit(event.shiftKey ? -1 : 1); }
});
find("next").addEventListener("click", () => stepHit(1));
find("previous").addEventListener("click", () => stepHit(-1));
find("theme").addEventListener("click", changeTheme);
build();
changeOperator();
showMatches("");
