import ast
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import comppo.report
from comppo.errors import MissingExtraError
from comppo.report.chart import MINUS
from comppo.report.data import load_runs
from comppo.report.html import duration, render, write_report
from comppo.report.runfiles import RecordError
from comppo.report.visible import harmless
from comppo.study.record import RunRecorder

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    '" style="background:url(https://example.org/x)" x="',
    "javascript:alert(1)",
    "<a href='javascript:alert(1)'>x</a>",
    "</style><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "</svg><script>alert(1)</script>",
    "<!--",
    "]]>",
    "{{ 7 * 7 }}{% raw %}",
    "\u202eevil\u202c",
    "\ud83d",
    "\x00<script>",
]


class Page(HTMLParser):
    """Elements, their attributes and the text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

    def tags(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]


@pytest.fixture(scope="module")
def source(recorded, tmp_path_factory):
    output = tmp_path_factory.mktemp("page") / "out" / "report.html"
    write_report(recorded, output, title="A pair", notes=["First note.", "Second note."])
    return output.read_text(encoding="utf-8")


def assert_inert(page):
    names = {tag for tag, _ in page.elements}
    assert not names & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "link",
        "form",
        "base",
        "a",
        "foreignobject",
        "image",
    }
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in {"src", "href", "action", "srcdoc"}
            if name == "xlink:href":
                assert value.startswith("#")
            if name == "style":
                assert "http" not in value and not re.search(r"url\((?!#)", value)


def test_the_page_is_whole_and_needs_nothing_else(source):
    page = Page(source)
    assert source.startswith("<!DOCTYPE html>")
    assert_inert(page)
    assert "@import" not in source and "url(http" not in source
    policies = [meta["content"] for meta in page.tags("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in policies[0]
    # The only addresses are names of XML vocabularies, which nobody fetches.
    assert set(re.findall(r"https?://[^\s\"'<]+", source)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_what_a_reader_finds(source, recorded):
    text = " ".join(Page(source).text.split())
    result = json.loads((recorded[0] / "result.json").read_text())
    for words in (
        "A pair",
        "First note.",
        "Second note.",
        "18.5%",
        "13.7 to 24.5",
        f"{result['accuracy_after']:.1%}",
        "7,680",
        "812,344",
        "8 min 32 s",
        "2,310 MB",
        "one run of one seed",
        "not evidence of a difference",
        "Highest reward",
        "Lowest reward",
        "each with the advantage +0.870",
        "Gate distribution",
        "Explained variance",
        "comppo demo --arm comppo",
        "gate.g_min",
        "version of torch",
    ):
        assert words in text, words


def test_every_token_carries_its_numbers(source, recorded):
    responses = json.loads((recorded[0] / "credit.json").read_text())
    tokens = [a for a in Page(source).tags("li") if "tok" in a.get("class", "")]
    assert len(tokens) == 2 * sum(len(response["tokens"]) for response in responses)  # both arms
    last = tokens[len(responses[0]["tokens"]) - 1]
    assert last["class"] == "tok pos"
    assert last["data-hint"].startswith("83 · \u2068<|im_end|>\u2069 · advantage +")
    for name in ("gate 0.", "value ", "statistic ", "probability "):
        assert name in last["data-hint"]


def hostile_page(folder, texts):
    """A page whose every text is `texts`: as tokens and keys one by one, elsewhere joined."""
    run, text = RunRecorder(folder / "run"), " ".join(texts)
    about = {key: text for key in ("name", "title", "command", "started")}
    config = {each: each for each in texts} | {"nested": {each: [each] for each in texts}}
    run.write_json("run.json", about | {"seed": 0, "config": config, "versions": {each: each for each in texts}})
    run.append_metrics({"step": 1, "reward": 0.5, "comppo/gate_mean": 0.9, text: 1.0})
    advantages = [(-1.0) ** index for index in range(len(texts))]
    response = {"prompt": text, "completion": text, "reward": 1.0, "tokens": texts, "advantages": advantages}
    run.write_json("credit.json", [response])
    run.write_json("gates.json", {"edges": [0, 1], "counts": [1], "minimum": 0, "maximum": 1})
    run.finish({"accuracy_after": 0.5, "eval_count": 2, "status": text})
    output = folder / "report.html"
    write_report([run.folder], output, title=text, notes=texts)
    return output.read_text(encoding="utf-8")


@pytest.mark.parametrize("texts", [HOSTILE, HOSTILE[:1]], ids=["all", "script"])
def test_untrusted_text_is_only_text(tmp_path, texts):
    page = Page(hostile_page(tmp_path, texts))
    assert_inert(page)
    plain = Page(hostile_page(tmp_path / "plain", [f"{'word' * 8}{index}" for index in range(len(texts))]))
    # Marks for spaces aside, the page is built as with harmless words: nothing was closed, opened or swallowed.
    assert [tag for tag, _ in page.elements if tag != "span"] == [tag for tag, _ in plain.elements if tag != "span"]
    assert not set(page.text) & set("\u202e\x00")
    for text in texts:
        assert harmless(text) in page.text, text
    hints = "".join(a["data-hint"] for a in page.tags("li") if "data-hint" in a)
    assert "script>alert(1)" in hints


def test_the_same_records_give_the_same_page(source, recorded):
    assert render(load_runs(recorded), title="A pair", notes=["First note.", "Second note."]) == source


def test_a_page_is_replaced_as_a_whole(pair, tmp_path, monkeypatch):
    output = tmp_path / "report.html"
    output.write_text("old")
    write_report(pair, output, title="new", notes=[])
    page = output.read_text(encoding="utf-8")
    assert "new" in page and {p.name for p in tmp_path.iterdir()} == {"report.html", "comppo", "grpo"}
    (pair[0] / "run.json").unlink()
    with pytest.raises(RecordError):
        write_report(pair, output, title="newer", notes=[])
    assert output.read_text(encoding="utf-8") == page


def test_a_run_that_only_began(tmp_path):
    RunRecorder(tmp_path / "a").write_json("run.json", {"name": "comppo"})
    write_report([tmp_path / "a"], tmp_path / "r.html", title="t", notes=[])
    text = Page((tmp_path / "r.html").read_text(encoding="utf-8")).text
    assert "not finished" in text and "no evidence that it is better" in text
    assert "Gate distribution" not in text and "Credit, token by token" not in text


def test_a_resumed_run_shows_where_it_began(tmp_path):
    run = RunRecorder(tmp_path / "a")
    run.write_json("run.json", {"name": "comppo"})
    run.append_metrics({"step": 0, "eval_accuracy": 0.125})
    run.finish({"accuracy_before": None, "accuracy_after": 0.5})
    write_report([tmp_path / "a"], tmp_path / "r.html", title="t", notes=[])
    assert "12.5%" in Page((tmp_path / "r.html").read_text(encoding="utf-8")).text


@pytest.mark.parametrize(("before", "after"), [(-0.5, 0.5), (0.5, 3.25)])
def test_held_out_rewards_outside_a_share_are_worded_as_mean_rewards(tmp_path, before, after):
    run = RunRecorder(tmp_path / "a")
    run.write_json("run.json", {"name": "comppo"})
    run.append_metrics({"step": 4, "eval_accuracy": 0.25})
    run.finish({"accuracy_before": before, "accuracy_after": after, "eval_count": 100})
    write_report([tmp_path / "a"], tmp_path / "r.html", title="t", notes=[])
    source = (tmp_path / "r.html").read_text(encoding="utf-8")
    text = Page(source).text
    assert "Held-out mean reward" in text and "accuracy" not in text
    assert f'<span class="before">{before:g}</span>'.replace("-", MINUS) in source
    assert f'<span class="after">{after:g}<' in source
    assert "%" not in text and "Wilson" not in text and "interval" not in text.replace("no interval here", "")


def test_settings_that_differ_come_first(source):
    rows = re.findall(r'<tr( class="differs")?><th scope="row"><bdi>([^<]+)</bdi>', source)
    differing = [key for mark, key in rows if mark]
    assert [key for _, key in rows][: len(differing)] == differing
    assert "gate.g_min" in differing and "learning_rate" not in differing


def test_several_seeds_are_not_called_one(tmp_path):
    for seed in (0, 1):
        RunRecorder(tmp_path / str(seed)).write_json("run.json", {"name": "comppo", "seed": seed})
    page = render(load_runs([tmp_path / "0", tmp_path / "1"]), title="t", notes=[])
    assert "tests nothing across seeds" in page and "comppo, seed 1" in page


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "—"),
        (0.0, "0.0 s"),
        (59.96, "1 min 00 s"),
        (754.6, "12 min 35 s"),
        (3599.7, "1 h 00 min"),
        (12_000.0, "3 h 20 min"),
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_missing_extras_are_named(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"jinja2 and matplotlib: run pip install 'comppo\[train\]'"):
        write_report(pair, tmp_path / "r.html", title="t", notes=[])


def test_reports_import_nothing_heavy():
    """At import time: the standard library and each other. Inside functions: Jinja2, MarkupSafe and matplotlib."""
    for path in Path(comppo.report.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for nodes, banned in ((at_import, {"jinja2", "matplotlib", "markupsafe"}), (ast.walk(tree), set())):
            for node in nodes:
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module]
                else:
                    continue
                for name in names:
                    assert name.split(".")[0] not in banned | {"torch", "transformers", "trl", "numpy"}, (path, name)
                    if name.startswith("comppo"):
                        assert name.startswith(("comppo.report", "comppo.errors")), (path, name)
