"""The inspect page in headless Chromium: what a person sees, clicks and types."""

import re
import statistics
from pathlib import Path

import pytest
import torch

from comppo.inspect import report, write_page
from comppo.report.inspection import Inspection, Quantity, Sample
from comppo.report.visible import pieces

from .conftest import OTHERS, WORDS, batch, tokenise, write

HOSTILE = [
    "</script><script>window.ran=1</script>",
    "<!--<script>",
    "<img src=x onerror=window.ran=1>",
    "<svg/onload=window.ran=1>",
    '"><a href="javascript:window.ran=1">x</a>',
    "' onmouseover='window.ran=1",
    "{{ 7 * 7 }}{% raw %}",
    "\u2028\u2029",
    "\u202egnp.exe",
    "\u200b\u200d\ufeff",
    "\x00\x1b[31m\x07",
    "\udce2\udc80",
    "<0xE2>",
    "\ufffd",
    "\u0301",
    "",
    " ",
    "\n",
    "\t",
    "العربية",
    "👩‍👩‍👧",
    "e" + "\u0301" * 30,
    "__proto__",
    "constructor",
    "x" * 5000,
]


def texts_of(page, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-"))


def look(page) -> list[str]:
    """The colour class of every token of the first response."""
    return page.evaluate(
        "[...document.querySelectorAll('[id^=r0t]')].map(e => e.className.replace(/ (active|key)/g, ''))"
    )


def test_every_quantity_and_operator_recolours(visit, two):
    page = visit(two)
    quantities, operators = texts_of(page, "#quantity option"), texts_of(page, "#operator option")
    assert quantities == ["Advantage", "Gate", "Statistic", "Value V", "Log-probability", "Sink mass"]
    assert operators[:2] == ["GRPO", "Fixed GAE"] and operators[-1] == "Numbers alone"
    seen = set()
    for quantity in quantities:
        page.select_option("#quantity", label=quantity)
        assert page.text_content("#quantity-name") == f"{quantity}."
        assert page.text_content("#quantity-sentence")
        seen.add(tuple(look(page)))
    assert len(seen) == len(quantities)  # GRPO, chosen first, has no gates: nothing is coloured
    page.select_option("#quantity", label="Advantage")
    seen = set()
    for operator in operators:
        page.select_option("#operator", label=operator)
        assert page.text_content("#operator-name") == f"{operator}."
        seen.add(tuple(look(page)))
    # Where nobody else shares a prefix, the tree leaves all to its leaf, spread by the same weights as redistribution.
    assert len(seen) == len(operators) - 1


def test_hovering_shows_numbers_and_keys(visit, two):
    page = visit(two)
    page.select_option("#operator", label="Comp-GAE")
    page.hover("#r1t5")
    detail = page.text_content("#detail")
    assert "Token 5 of" in detail and "Response 2" in detail
    for label in ("Advantage", "Gate", "Statistic", "Value V", "Log-probability", "Probability", "Sink mass"):
        assert label in detail
    operator, given = batch([tokenise(WORDS), tokenise(OTHERS)])[1]["Comp-GAE"]
    shown = number(page.locator("#detail tr.now td").first.text_content())
    assert shown == pytest.approx(float(operator(given).advantages[1, 5]), rel=1e-3)
    assert texts_of(page, ".key") == ["A", page.text_content("#r1t4")]
    page.hover("#r1t0")
    assert texts_of(page, ".key") == ["A"]


@pytest.mark.parametrize("name", list(batch([list("abcd")] * 2)[1]))
def test_clicking_shows_the_row_of_the_kernel(visit, two, name):
    page = visit(two)
    operator, evidence = batch([tokenise(WORDS), tokenise(OTHERS)])[1][name]
    kernel, deltas = operator.kernel(evidence), operator.deltas(evidence)
    page.select_option("#operator", label=name)
    for t in (0, 5, 12):
        page.click(f"#r1t{t}")
        table = page.locator("#detail table.wide").first
        for row in table.locator("tbody tr, tr:has(td)").all():
            source = int(re.match(r"\d+", row.locator("th").text_content())[0])
            share, delta, term = (number(cell) for cell in row.locator("td").all_text_contents())
            assert share == pytest.approx(float(kernel[1, t, source]), rel=1e-3, abs=1e-4)
            assert delta == pytest.approx(float(deltas[1, source]), rel=1e-3, abs=1e-4)
            assert term == pytest.approx(share * delta, rel=2e-3, abs=1e-4)
        total = re.search(r"add up to ([+\N{MINUS SIGN}\d]\d*(\.\d+)?(e.\d+)?)\.", page.text_content("#detail"))[1]
        assert number(total) == pytest.approx(float(operator(evidence).advantages[1, t]), rel=1e-3, abs=1e-4)


def test_the_row_is_drawn_over_the_text_and_goes_away(visit, two):
    page = visit(two)
    page.select_option("#operator", label="Comp-GAE")
    before = look(page)
    page.click("#r0t8")
    drawn = look(page)
    assert drawn != before and all("before" in name for name in drawn[:3])
    assert "pinned" in page.get_attribute("#r0t8", "class")
    page.click("button:has-text('Share K')")
    assert look(page) != drawn
    assert "reaches token 8" in page.text_content("#quantity-name")
    page.click("button:has-text('Terms K')")
    assert look(page) == drawn
    page.click("#r0t8")
    assert look(page) == before
    page.click("#r0t8")
    page.keyboard.press("Escape")
    assert look(page) == before


def test_what_cannot_be_traced_says_so(visit, two):
    page = visit(two)
    page.select_option("#operator", label="Numbers alone")
    page.click("#r0t8")
    assert "came as advantages alone" in page.text_content("#detail")
    page.select_option("#operator", label="Comp-GAE")
    page.click("#r0t3")
    assert "did not choose this token" in page.text_content("#detail")


def test_keyboard(visit, two):
    page = visit(two)
    page.focus("#r0t0 >> xpath=..")
    active = "document.querySelector('.active').id"
    assert page.evaluate(active) == "r0t0"
    for key, expected in (("ArrowRight", "r0t1"), ("ArrowRight", "r0t2"), ("ArrowLeft", "r0t1")):
        page.keyboard.press(key)
        assert page.evaluate(active) == expected
    page.keyboard.press("End")
    assert page.evaluate(active) == f"r0t{len(tokenise(WORDS)) - 1}"
    assert "Token " in page.text_content("#spoken")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    top = "document.querySelector('.active').getBoundingClientRect().top"
    assert page.evaluate(top) > page.evaluate("document.querySelector('#r0t0').getBoundingClientRect().bottom")
    page.keyboard.press("ArrowUp")
    assert page.evaluate(active) == "r0t0"
    page.keyboard.press("Enter")
    assert page.locator(".pinned").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".pinned").count() == 0
    page.keyboard.press("q")
    assert page.text_content("#quantity-name") == "Gate."
    page.keyboard.press("Q")
    page.keyboard.press("o")
    assert page.text_content("#operator-name") == "Fixed GAE."
    page.keyboard.press("O")
    assert page.text_content("#operator-name") == "GRPO."
    page.keyboard.press("?")
    assert page.locator("#glossary").is_visible()
    page.keyboard.press("/")
    page.keyboard.type("qot")  # letters in the field are no commands
    assert page.input_value("#search") == "qot" and page.text_content("#operator-name") == "GRPO."
    page.keyboard.press("Escape")


def test_curves_follow_and_choose_tokens(visit, two):
    page = visit(two)
    page.select_option("#operator", label="Comp-GAE")
    assert re.findall("Value V|Gate|Retention", page.locator(".curves").first.text_content()) == [
        "Value V", "Gate", "Retention",
    ]  # fmt: skip
    assert "0 to 1" not in page.locator(".curves span").nth(0).text_content()
    page.locator(".curves svg").nth(1).click(position={"x": 100, "y": 10})
    assert page.locator("article").first.locator(".pinned").count() == 1
    page.select_option("#operator", label="Redistribution")
    assert "Retention" not in page.locator(".curves").first.text_content()


def test_search_crosses_tokens(visit, two):
    page = visit(two)
    page.fill("#search", "RUN AWAY")
    assert page.text_content("#matches") == "2"
    assert texts_of(page, ".hit") == ["␣run", "␣away"] * 2
    page.click("#next")
    assert page.text_content("#matches") == "1 of 2" and texts_of(page, ".hit-now") == ["␣run", "␣away"]
    page.click("#previous")
    assert page.text_content("#matches") == "2 of 2"
    page.press("#search", "Enter")
    assert page.text_content("#matches") == "1 of 2"
    page.fill("#search", "\\boxed{1")  # no pattern, but text
    assert page.text_content("#matches") == "1"
    page.fill("#search", "(")
    assert page.text_content("#matches") == "no match" and page.is_disabled("#next")
    page.fill("#search", "")
    assert page.locator(".hit").count() == 0 and page.text_content("#matches") == ""


def test_hostile_text_is_text(visit, tmp_path):
    shape = (2, len(HOSTILE))
    prompts = [HOSTILE, list(reversed(HOSTILE))]
    names = {name: torch.randn(shape) for name in HOSTILE if name and "x" * 9 not in name}
    path = report(
        tmp_path / "hostile.html",
        responses=[HOSTILE, HOSTILE],
        operators=names,
        prompts=prompts,
        quantities={name: torch.randn(shape) for name in names},
        labels=HOSTILE[:2],
        title=HOSTILE[0],
        notes=HOSTILE[:6],
    )
    page = visit(path)
    assert page.evaluate("typeof window.ran") == "undefined"
    assert page.evaluate("document.scripts.length") == 2
    assert page.locator("img, a, iframe, object, embed, form, link").count() == 0
    assert texts_of(page, "article .t")[: len(HOSTILE)] == ["".join(p.text for p in pieces(t)) for t in HOSTILE]
    assert page.title() == HOSTILE[0]
    for index in range(len(HOSTILE)):
        page.locator(f"#r0t{index}").dispatch_event("click")
    for index in range(len(names)):
        page.locator("#operator").select_option(index=index)
        page.locator("#quantity").select_option(index=index)
    page.fill("#search", HOSTILE[0])
    assert page.text_content("#matches").endswith("2")
    assert page.evaluate("typeof window.ran") == "undefined"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    hidden = "[...document.querySelectorAll('body *:not(script)')].flatMap(e => [...e.childNodes])"
    text = page.evaluate(f"{hidden}.filter(n => n.nodeType === 3).map(n => n.data).join('')")
    assert not set(text) & set("\u202e\u2028\u2029\u200b\ufeff\x00\x1b\x07")


@pytest.mark.parametrize("key", ["__proto__", "constructor", "toString", "advantages"])
def test_quantities_may_have_any_key(visit, tmp_path, key):
    samples = [
        Sample(label="a", tokens=["x", "y"], credit=[], series={key: [0.25, 4.0]}),
        Sample(label="b", tokens=["x"], credit=[], series={}),
    ]
    quantity = Quantity(key=key, label=key, sentence="Odd.")
    page = visit(
        write_page(tmp_path / "odd.html", Inspection(title="t", operators=[], samples=samples, quantities=[quantity]))
    )
    page.click("#r0t1")
    assert page.locator("#detail tr.now td").text_content() == "4"
    page.click("#r1t0")
    assert page.locator("#detail tr").count() == 0


def test_running_text_prompts_and_hostile_prompts(visit, tmp_path):
    prompt = "".join(HOSTILE[:12])
    path = report(tmp_path / "text.html", responses=[["a", "b"]], operators={"one": torch.ones(1, 2)}, prompts=[prompt])
    page = visit(path)
    assert HOSTILE[0] in page.text_content(".prompt .text") and "⟨U+202E⟩" in page.text_content(".prompt .text")
    assert page.evaluate("typeof window.ran") == "undefined"


def test_numbers_without_any_operator(visit, tmp_path):
    path = report(
        tmp_path / "bare.html", responses=[["a", "b", "c"]], operators={}, values=torch.tensor([[0.1, 0.5, 0.9]])
    )
    page = visit(path)
    assert not page.locator("#operator").is_visible() and page.text_content("#quantity-name") == "Value V."
    page.click("#r0t1")
    assert "0.5" in page.text_content("#detail") and len(set(look(page))) == 3


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_breaks_the_layout(visit, tmp_path, width):
    texts = [["x" * 3000, " y", "\n", "字" * 800], ["🦙" * 500, "z"]]
    path = write(tmp_path / "wide.html", texts, prompts=["w" * 4000] * 2, title="t" * 500, labels=["l" * 300, "m"])
    page = visit(path, width=width, height=700)
    page.select_option("#operator", label="Comp-GAE")
    page.locator("#r1t1").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    inside = page.evaluate("""[...document.querySelectorAll('article .t, #detail *')].every(e => {
      const b = e.getBoundingClientRect(); return b.left >= -1 && b.right <= innerWidth + 1; })""")
    assert inside


def test_phone_sheet_opens_and_closes(visit, two):
    page = visit(two, width=390, height=800, has_touch=True)
    assert not page.locator("#detail").is_visible()
    page.tap("#r0t4")
    assert page.locator("#detail").is_visible()
    page.tap("#close")
    assert not page.locator("#detail").is_visible()


LUMINANCE = """([name, theme]) => {
  document.documentElement.dataset.theme = theme;
  const card = document.querySelector('.panel'), probe = document.createElement('span');
  probe.className = name; card.append(probe);
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const draw = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); };
  const read = () => { const p = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2]; };
  draw(getComputedStyle(card).backgroundColor); draw(getComputedStyle(probe).backgroundColor);
  const ground = read();
  draw(getComputedStyle(probe).color);
  probe.remove();
  return [read(), ground];
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stays_legible_and_scales_change_evenly(visit, two, theme):
    page = visit(two)
    for scale in "pns":
        grounds = []
        for level in range(1, 13):
            ink, ground = page.evaluate(LUMINANCE, [f"{scale}{level}", theme])
            low, high = sorted((ink, ground))
            assert (high + 0.05) / (low + 0.05) >= 4.5
            grounds.append(ground)
        # A scale that rises or falls in lightness throughout is read without colour vision.
        assert grounds in (sorted(grounds), sorted(grounds, reverse=True))


def test_theme_switch(visit, two):
    page = visit(two, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#theme")
    light = page.evaluate(ground)
    assert page.text_content("#theme") == "Theme: light" and light != dark
    page.click("#theme")
    assert page.text_content("#theme") == "Theme: dark" and page.evaluate(ground) == dark
    page.keyboard.press("t")
    assert page.text_content("#theme") == "Theme: system" and page.evaluate(ground) == dark


SWITCH = """async (name) => {
  const select = document.getElementById(name), times = [];
  for (let i = 0; i < select.options.length; i++) {
    await new Promise((done) => setTimeout(done, 50));
    const start = performance.now();
    select.selectedIndex = i;
    select.dispatchEvent(new Event('change'));
    document.body.getBoundingClientRect();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - start);
  }
  return times;
}"""


def test_2000_tokens_switch_within_100_ms(visit, tmp_path):
    long = (tokenise(WORDS) * 60)[:2000]
    page = visit(write(tmp_path / "long.html", [long, long[:1999]]))
    assert page.locator("article .t").count() == 3999
    page.evaluate(SWITCH, "quantity")  # the browser compiles what it runs often
    for name in ("quantity", "operator"):
        assert statistics.median(page.evaluate(SWITCH, name)) < 100


def test_the_page_tells_without_scripts(browser, two):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(two.as_uri())
    assert "does not run" in page.text_content("body")
    context.close()


def test_pages_are_the_same_bytes(two, tmp_path):
    texts = [tokenise(WORDS), tokenise(OTHERS)]
    one, other = write(Path(tmp_path / "a.html"), texts), write(Path(tmp_path / "b.html"), texts)
    assert one.read_bytes() == other.read_bytes()
