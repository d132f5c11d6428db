import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from comppo.report import figures
from comppo.report.chart import MINUS, arm_colour, thinned_table
from comppo.report.data import load_runs
from comppo.study.record import RunRecorder

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def runs(recorded):
    return load_runs(recorded)


@pytest.fixture(scope="module")
def charts(runs):
    return every_chart(runs)


def every_chart(runs):
    return [*figures.learning_curves(runs), *figures.gate_distribution(runs), *figures.health(runs)]


def test_what_is_drawn(runs, charts):
    assert [chart.title for chart in charts] == [
        "Reward",
        "Held-out accuracy",
        "CompPO",
        "Gate mean",
        "Retention",
        "Explained variance",
        "Critic loss",
    ]
    assert figures.gate_distribution(runs[1:]) == figures.health(runs[1:]) == []


def test_drawings_are_the_same_every_time(runs, charts):
    assert every_chart(runs) == charts


def test_drawings_are_accessible_and_stand_alone(charts):
    identifiers = []
    for chart in charts:
        root = ElementTree.fromstring(chart.svg)
        assert root.get("role") == "img"
        names = root.get("aria-labelledby").split()
        assert [root.find(f"{SVG}title").get("id"), root.find(f"{SVG}desc").get("id")] == names
        assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
        assert "currentColor" in chart.svg and "metadata" not in chart.svg
        assert set(re.findall(r'href="(.)', chart.svg)) <= {"#"}
        here = {element.get("id") for element in root.iter() if element.get("id")}
        assert {*re.findall(r'href="#([^"]+)"', chart.svg), *re.findall(r"url\(#([^)]+)\)", chart.svg)} <= here
        identifiers += here
    assert len(identifiers) == len(set(identifiers))


def test_no_background_and_no_black_text(charts):
    """Anything drawn in plain black or white would vanish on a dark or a light page."""
    for chart in charts:
        assert not re.search(r"(fill|stroke): (#ffffff|#000000|white|black)", chart.svg)
        texts = ElementTree.fromstring(chart.svg).iter(f"{SVG}text")
        assert all("currentColor" in (text.get("style") or "") for text in texts)


def test_axes_have_names_and_units(charts):
    texts = [" ".join(re.findall(r">([^<]+)</text>", chart.svg)) for chart in charts]
    for text, label in zip(
        texts,
        ["(reward units)", "accuracy (%)", "(unitless)", "(unitless)", "(unitless)", "(unitless)", "critic loss"],
        strict=True,
    ):
        assert label in text
    assert "lower bound 0.9" in texts[2] and "upper bound 1" in texts[2] and "reference 0.96" in texts[2]


def test_accuracy_shows_its_interval_on_hover(charts):
    chart = charts[1]
    # 37 of 200; Wilson 1927 as in test_data
    assert "CompPO, step 0: 18.5% [13.7%, 24.5%]" in chart.svg
    assert chart.rows[0] == ("0", "18.5% [13.7%, 24.5%]", "18.5% [13.7%, 24.5%]")


def test_accuracy_comes_from_the_result_where_the_log_has_none(tmp_path):
    run = RunRecorder(tmp_path)
    run.write_json("run.json", {"name": "a"})
    run.append_metrics({"step": 7, "reward": 0.0})
    run.finish({"accuracy_before": 0.1, "accuracy_after": 0.2})
    (loaded,) = load_runs([tmp_path])
    assert figures.accuracy_points(loaded) == [(0, 0.1), (7, 0.2)]


def test_held_out_rewards_outside_a_share_are_drawn_as_mean_rewards(tmp_path):
    """Every point stays, nothing is in per cent and no share has an interval: in both arms, as they share axes."""
    for name, before, middle, after in (("a", -1.5, 0.25, 61.0), ("b", 0.25, 0.5, 0.75)):
        run = RunRecorder(tmp_path / name)
        run.write_json("run.json", {"name": name})
        run.append_metrics({"step": 5, "eval_accuracy": middle})
        run.append_metrics({"step": 9, "reward": None})
        run.finish({"accuracy_before": before, "accuracy_after": after, "eval_count": 100})
    loaded = load_runs([tmp_path / "a", tmp_path / "b"])
    assert figures.accuracy_points(loaded[0]) == [(0, -1.5), (5, 0.25), (9, 61.0)]
    (chart,) = figures.learning_curves(loaded)
    assert chart.title == "Held-out mean reward"
    assert chart.rows == (("0", f"{MINUS}1.5", "0.25"), ("5", "0.25", "0.5"), ("9", "61", "0.75"))
    assert "LineCollection" not in chart.svg and "a, step 9: 61<" in chart.svg
    assert "mean reward (reward units)" in chart.svg and "%)" not in chart.svg and "Wilson" not in chart.caption
    (alone,) = figures.learning_curves(loaded[1:])
    assert alone.title == "Held-out accuracy" and "LineCollection" in alone.svg


@pytest.mark.parametrize("count", [3, 60])
def test_few_evaluations_have_bars_and_many_a_band(tmp_path, count):
    run = RunRecorder(tmp_path)
    run.write_json("run.json", {"name": "a"})
    for step in range(count):
        run.append_metrics({"step": step, "eval_accuracy": 0.5})
    run.finish({"eval_count": 100})
    (chart,) = figures.learning_curves(load_runs([tmp_path]))
    assert ("LineCollection" in chart.svg) == (count == 3)
    assert ("FillBetween" in chart.svg or "PolyCollection" in chart.svg) == (count == 60)


def test_labels_are_text_and_not_mathematics(tmp_path, make_run):
    folder = make_run(tmp_path / "a", "comppo", "<b>$x_1$ & more</b>", steps=20)
    for chart in [*figures.gate_distribution(runs := load_runs([folder])), *figures.learning_curves(runs)]:
        root = ElementTree.fromstring(chart.svg)
        assert not root.findall(".//{*}b")
        assert "<b>$x_1$ & more</b>" in "".join(root.itertext())
        written = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
        assert chart.title.startswith("<b>") or "<b>$x_1$ & more</b>" in written  # in the legend


def test_one_point_and_no_reward(tmp_path):
    run = RunRecorder(tmp_path)
    run.write_json("run.json", {"name": "a"})
    assert figures.learning_curves(load_runs([tmp_path])) == []
    run.append_metrics({"step": 1, "reward": None})
    assert figures.learning_curves(load_runs([tmp_path])) == []
    run.append_metrics({"step": 2, "reward": 0.5})
    (chart,) = figures.learning_curves(load_runs([tmp_path]))
    assert chart.rows == (("2", "0.500"),)


def test_gates_without_bounds_mark_none(pair):
    path = pair[0] / "gates.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if "bound" not in key}
    path.write_text(json.dumps(content | {"reference": None}))
    (chart,) = figures.gate_distribution(load_runs(pair))
    assert "bound" not in chart.svg and "reference" not in chart.svg
    assert "0.9003 to 0.9991" in chart.caption


def test_trailing_mean():
    points = [(1, 1.0), (2, 3.0), (4, 5.0), (5, 7.0)]
    assert figures.trailing_mean(points, 2) == [(1, 1.0), (2, 2.0), (4, 4.0), (5, 6.0)]


def test_tables_keep_their_ends():
    columns, rows = thinned_table("Step", ["a"], [[(step, str(step)) for step in range(1001)]])
    assert columns == ("Step", "a")
    assert len(rows) <= 42 and rows[0] == ("0", "0") and rows[-1] == ("1000", "1000")


def test_arms_have_colours_of_their_own():
    assert len({arm_colour(index) for index in range(6)}) == 6
