"""The study's results as Markdown and JSON, from its records alone."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from reading_candidates import ADDED, EARLIER, FIXED, HALF, NOW, REFERENCE, WITH_ADDED

Record = dict[str, Any]
"""A candidate with its measures, each [estimate, low, high]."""

TITLES = {"smollm2": "SmolLM2-135M-Instruct (Q4_1 weights, run in float32)", "chain": "The bundled chain model"}
MEASURES = {
    "score": "score",
    "worst_position": "position R²",
    "identity": "token identity",
    "between_responses": "between responses",
    "reliability": "reliability",
    "reliability_rest": "reliability of the rest",
    "agreement": "r, longer prompt",
    "shift": "shift, SD",
    "with_earlier": "r with the earlier default",
    "with_sink_mass": "r with sink mass",
}
NOTES = """\
Each candidate gives one number per response token: the mean of a statistic over heads and layers, then the residual of
a least-squares fit over the batch. Brackets hold 95 % bootstrap intervals over responses (the fit is not repeated).

- **position R²**: share of the variance that a cubic in log(1 + place) explains, adjusted; the greater of two batches,
  one as sampled and one in which every other response has the longer prompt.
- **token identity**: share of the variance that the identity of the current token (at the emitting position) explains,
  over tokens seen 3 times or more, from products of two occurrences in different responses.
- **between responses**: share of the variance between responses.
- **reliability**: correlation of two random halves of the (layer, head) pairs, stepped up to all of them; "of the rest"
  once each token's mean is removed too.
- **score**: (1 - token identity) x reliability of the rest: the share of the variance that is specific to the place and
  on which the heads agree.
- **r, shift**: the same answer read behind the longer prompt against the prompt itself, each token in a batch in which
  half of the responses have the longer prompt. Removing log n takes the shift between two lengths away almost by
  construction; the rows with nothing removed show the statistic's own.
- **layers read** is the cost, relative to all layers.
- Residuals: "log_keys" is the log of the visible keys, "position" a line on the place, "position_bins" means of bins of
  doubling width, "log_keys_position" log n and log(1 + place) together. The last became a candidate after the first
  figures had been seen, so the rule's own choice leaves it out. "log_keys_token" takes the mean of each token away too,
  for reference only; what it leaves of token identity, and so its score, says nothing.
"""


def page(settings: Record, records: dict[str, Record]) -> str:
    """The whole Markdown page."""
    parts = ["# Default reading of attention: figures\n", "Written by `studies/reading_defaults.py`.\n"]
    parts += [f"**The rule**, fixed before the figures were seen. {settings['rule']}\n", NOTES]
    for name, record in records.items():
        parts += [f"## {TITLES[name]}\n", *_model(record)]
    if len({_key(r) for r in records.values()}) > 1:
        parts.append("**The models disagree**: " + "; ".join(f"{n}: {_say(r)}" for n, r in records.items()) + ".\n")
    versions = ", ".join(f"{package} {number}" for package, number in settings["versions"].items())
    parts.append(f"Seed {settings['seed']}, {settings['replicates']} draws. Python {settings['python']}, {versions}.\n")
    return "\n".join(parts)


def to_json(settings: Record, records: dict[str, Record]) -> str:
    """Estimates of all candidates, one a line under the names in "columns", and intervals of those in `_named`."""
    models = []
    for name, record in records.items():
        rows = record["candidates"]
        measures = [measure for measure, value in rows[0].items() if isinstance(value, list)]
        words = [word for word in rows[0] if word not in (*measures, "numbers")]
        lines = [[*(row[w] for w in words), *(row[m][0] for m in measures)] for row in rows]
        head = {key: value for key, value in record.items() if key != "candidates"}
        head["layer_numbers"] = {row["layers"]: row["numbers"] for row in rows}
        head["named"] = {label: {m: row[m] for m in measures} for label, row in _named(record).items()}
        head["columns"] = words + measures
        text = json.dumps(head, allow_nan=False).removesuffix("}")
        table = ",\n".join(json.dumps(line, allow_nan=False) for line in lines)
        models.append(f'{json.dumps(name)}: {text},\n "candidates": [\n{table}\n]}}')
    return f'{{"settings": {json.dumps(settings, indent=1)},\n"models": {{\n' + ",\n".join(models) + "\n}}\n"


def _named(record: Record) -> dict[str, Record]:
    """The candidates that are shown side by side, by label."""
    rows = record["candidates"]
    place = {_name(row): row for row in rows}
    named = {}
    if record["chosen"] is not None:
        named["chosen"] = rows[record["chosen"]]
    named["the earlier default"] = place[EARLIER]
    for label, name in (("the default now", NOW), ("the earlier, half its layers", HALF)):
        if name in place:
            named[label] = place[name]
    second = record["other_rules"][WITH_ADDED]
    if second not in (None, record["chosen"]):
        named["chosen if log n and place together were a candidate"] = rows[second]
    if "chosen" in named:
        named["chosen, token removed too (reference)"] = place[(*_name(named["chosen"])[:3], REFERENCE)]
    return named


def _model(record: Record) -> list[str]:
    rows = record["candidates"]
    fine = [row for row in rows if row["eligible"]]
    chosen = None if record["chosen"] is None else rows[record["chosen"]]
    parts = [_sizes(record), f"**Chosen: {_say(record)}**\n" + _counts(rows), _columns(_named(record))]
    if record["gains"]:
        parts.append(
            "Differences of the score: " + "; ".join(f"{n} {_interval(v)}" for n, v in record["gains"].items()) + ".\n"
        )
    parts += ["What other rules would have taken, all but the first thought of after the figures were seen:\n"]
    others = [(label, "nothing" if i is None else _reading(rows[i])) for label, i in record["other_rules"].items()]
    parts.append(_markdown([["rule", "takes"], *map(list, others)]))
    parts += ["Best eligible candidate of each choice of layers:\n", _table(_best(fine, _layer_choice))]
    added = [row for row in rows if row["keeps_bounds"]]
    if _best(added, _layer_choice) != _best(fine, _layer_choice):
        parts.append(
            "The same with log n and place removed together as a candidate, added after the figures were seen:\n"
        )
        parts.append(_table(_best(added, _layer_choice)))
    parts += ["Best of each statistic, of the eligible ones if there are any:\n"]
    real = [row for row in rows if row["residualize"] not in (ADDED, REFERENCE)]
    parts.append(_table(_best(real, lambda row: (row["statistic"], row["sink_excluded"]))))
    parts += ["Every statistic over the middle third, nothing removed:\n"]
    parts.append(_table(r for r in rows if r["layers"] == "middle third" and r["residualize"] == "none"))
    parts += ["The earlier default's statistic and layers, and the chosen ones, with each residual:\n"]
    kinds = [EARLIER[:3], *([] if chosen is None or _name(chosen)[:3] == EARLIER[:3] else [_name(chosen)[:3]])]
    parts.append(_table(row for kind in kinds for row in rows if _name(row)[:3] == kind))
    return parts


def _layer_choice(row: Record) -> str:
    return str(row["layers"])


def _sizes(record: Record) -> str:
    least, median, most = record["prompt_tokens"]
    text = (
        f"{record['responses']} responses, {record['tokens']} response tokens; {record['layers']} layers of "
        f"{record['heads']} heads; prompts of {least} to {most} tokens (median {median})"
    )
    if not record["longer_prompt_tokens"]:
        return text + "; the longer prompt is not applicable, since the prompt's format is fixed.\n"
    least, median, most = record["longer_prompt_tokens"]
    return text + f", behind unrelated turns {least} to {most} (median {median}).\n"


def _counts(rows: list[Record]) -> str:
    real = [row for row in rows if row["residualize"] not in (ADDED, REFERENCE)]
    text = f"\n{sum(row['eligible'] for row in real)} of {len(real)} candidates keep the bounds; "
    failing = [("position", sum(row["worst_position"][0] > FIXED.most_position for row in real))]
    if "agreement" in real[0]:
        failing.append(("r", sum(not row["agreement"][0] >= FIXED.least_agreement for row in real)))
        failing.append(("shift", sum(not abs(row["shift"][0]) <= FIXED.most_shift for row in real)))
    return text + "failing: " + ", ".join(f"{name} {count}" for name, count in failing) + ".\n"


def _best(rows: list[Record], group: Callable[[Record], Any]) -> list[Record]:
    best: dict[Any, Record] = {}
    for row in sorted(rows, key=lambda row: (not row["keeps_bounds"], -row["score"][0])):
        best.setdefault(group(row), row)
    return list(best.values())


def _columns(named: dict[str, Record]) -> str:
    """Candidates side by side, with intervals."""
    lines = [["", *named], ["reading", *(_reading(row) for row in named.values())]]
    lines.append(["layers read", *(_layers(row) for row in named.values())])
    lines.append(["keeps the bounds", *("yes" if row["keeps_bounds"] else "no" for row in named.values())])
    for name, label in MEASURES.items():
        if all(name in row for row in named.values()):
            lines.append([label, *(_shown(row, name, _interval) for row in named.values())])
    lines.append(["chosen in draws", *(f"{row['chosen_in_draws']:.0%}" for row in named.values())])
    return _markdown(lines)


def _table(rows: Iterable[Record]) -> str:
    """One candidate a line, estimates only, with the score's interval."""
    rows = list(rows)
    shown = [name for name in MEASURES if rows and name in rows[0]]
    lines = [["reading", "layers read", "bounds", *(MEASURES[name] for name in shown)]]
    for row in rows:
        figures = [_shown(row, n, _interval if n == "score" else _estimate) for n in shown]
        lines.append([_reading(row), _layers(row), "kept" if row["keeps_bounds"] else "no", *figures])
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body, ""])


def _shown(row: Record, name: str, form: Callable[[list[float]], str]) -> str:
    """A measure, unless it says nothing of this candidate."""
    return "" if row["residualize"] == REFERENCE and name in ("identity", "score") else form(row[name])


def _estimate(values: list[float]) -> str:
    return f"{values[0]:.2f}"


def _interval(values: list[float]) -> str:
    return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"


def _layers(row: Record) -> str:
    return f"{len(row['numbers'])} ({row['cost']:.0%})"


def _name(row: Record) -> tuple[str, bool, str, str]:
    return row["statistic"], row["sink_excluded"], row["layers"], row["residualize"]


def _reading(row: Record) -> str:
    sinks = "" if row["statistic"] == "sink_mass" else (" without sink" if row["sink_excluded"] else " with sink")
    return f"{row['statistic']}{sinks}, {row['layers']}, {row['residualize']}"


def _key(record: Record) -> Any:
    return None if record["chosen"] is None else _name(record["candidates"][record["chosen"]])


def _say(record: Record) -> str:
    return (
        "no candidate keeps the bounds"
        if record["chosen"] is None
        else _reading(record["candidates"][record["chosen"]])
    )
