"""The results of an audit as text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def as_table(result: Mapping[str, Any]) -> str:
    """Settings in a line, a Markdown table of the operators, and the strongest proxies.

    Args:
        result: from `run_audit`.

    Returns:
        Lines of text.
    """
    settings, prefixes = result["settings"], result["prefixes"]
    lines = [
        f"{settings['model']} on {settings['task']}: {result['responses']} responses to {result['prompts']} prompts, "
        f"mean reward {result['mean_reward']:.3f}, {settings['continuations']} continuations before every "
        f"{settings['every']} tokens ({prefixes['valued']} prefixes, {prefixes['sampled_tokens']} tokens sampled).",
        f"Attainable correlation {_number(result['attainable'])}, within responses "
        f"{_number(result['attainable_within'])}. {result['matters']:.0%} of the tokens matter (two standard errors).",
    ]
    if result["decisive_tokens"] is not None:
        lines.append(
            f"Decisive tokens: {result['decisive_tokens']:.1%} of all, with {_number(result['decisive_truth'])} of the "
            "true squared advantage."
        )
    if prefixes["left"]:
        lines.append(f"The budget left {prefixes['left']} prefixes: responses with a missing one do not count.")
    for name, critic in result["critics"].items():
        lines.append(f"Critic of {name}: explains {critic['explained_variance']:.3f} of the outcomes' variance.")
    lines += ["", *operator_table(result["operators"])]
    if "proxies" in result:
        lines += ["", *proxy_lines(result["proxies"])]
    return "\n".join(lines)


def operator_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table, one line per operator."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "operator": lambda row: row["operator"],
        "fidelity": lambda row: _range(row, "fidelity", "low", "high"),
        "within": lambda row: _number(row["within"]),
        "early / late": lambda row: f"{_number(row['early'])} / {_number(row['late'])}",
        "without sharpening": lambda row: _number(row["without_sharpening"]),
        "drift": lambda row: _number(row["drift"]),
        "signs": lambda row: _number(row["sign_agreement"]),
        "decisive": lambda row: _number(row["decisive_share"]),
        "cosine": lambda row: _range(row, "cosine", "cosine_low", "cosine_high"),
        "other prompts": lambda row: _range(row, "cosine_other", "cosine_other_low", "cosine_other_high"),
    }
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(show(row) for show in columns.values())} |" for row in rows]


def proxy_lines(proxies: Mapping[str, Any], most: int = 5) -> list[str]:
    """The channels with the greatest partial correlations."""
    found = []
    for name, channel in proxies["statistics"].items():
        for at, row in enumerate(channel["partial"]):
            for head, partial in enumerate(row):
                if partial is not None:
                    place = f"{name}, layer {channel['layers'][at]}, head {head}" if channel["layers"] else name
                    found.append((partial, channel["correlation"][at][head], channel["p_value"][at][head], place))
    found.sort(key=lambda entry: -abs(entry[0]))
    heading = (
        f"Proxies of |true advantage|: {len(found)} channels over {proxies['units']} units; partial correlation "
        "(position, token identity and surprisal removed), plain correlation, p corrected for all channels:"
    )
    return [heading] + [f"  {a:+.2f}  {b:+.2f}  p = {p:.3f}  {place}" for a, b, p, place in found[:most]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _range(row: Mapping[str, Any], value: str, low: str, high: str) -> str:
    if row.get(value) is None:
        return "-"
    if row[low] is None:
        return _number(row[value])
    return f"{row[value]:.2f} ({row[low]:.2f} to {row[high]:.2f})"
