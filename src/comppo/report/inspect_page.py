"""The inspect page: an `Inspection` as one file that a browser opens by itself.

Standard library only; Jinja2 is imported when a page is written.
"""

import base64
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from comppo.errors import ConfigError, MissingExtraError
from comppo.report.html import environment
from comppo.report.inspection import (
    ADVANTAGE,
    GATE,
    OF_OPERATORS,
    OF_RESPONSES,
    Inspection,
    Series,
    TokenCredit,
    check_inspection,
)
from comppo.report.runfiles import write_atomically
from comppo.report.visible import Piece, harmless, pieces

LEVELS = 12
"""Steps of each colour scale, beside none."""
SCRIPTS = ("numbers", "text", "detail", "controls")
"""Files of the page's script, in order."""


def render(inspection: Inspection) -> str:
    """The page as text: no network, one script and one style sheet that a strict content security policy names.

    Args:
        inspection: what to show.

    Returns:
        HTML; the same text for the same inspection.

    Raises:
        ConfigError: there is nothing to show, or a series does not have one number per token.
        MissingExtraError: jinja2 is not installed.
    """
    check_inspection(inspection)
    if importlib.util.find_spec("jinja2") is None:
        raise MissingExtraError("an inspect page needs jinja2: run pip install 'comppo[train]'.")
    from markupsafe import Markup

    style = _asset("inspect.css") + _ramps()
    script = '"use strict";\n(() => {\n' + "\n".join(_asset(f"{name}.js") for name in SCRIPTS) + "})();\n"
    # The only unescaped texts: files of this package, their digests, and JSON without any markup character.
    page: str = (
        environment()
        .get_template("inspect.html.j2")
        .render(
            title=inspection.title,
            notes=list(inspection.notes),
            style=Markup(style),
            script=Markup(script),
            style_digest=Markup(_digest(style)),
            script_digest=Markup(_digest(script)),
            data=Markup(as_script_data(payload(inspection))),
        )
    )
    return page


def write_page(path: str | Path, inspection: Inspection) -> Path:
    """Write the page; nothing is ever overwritten.

    Args:
        path: a file that does not exist yet (or holds this very page), or a folder, in which the page is named by its
            content. Parents are created; a path without a suffix that does not exist is a folder.
        inspection: what to show.

    Returns:
        The page's path.

    Raises:
        ConfigError: the file exists and holds something else, or the inspection cannot be shown.
        MissingExtraError: jinja2 is not installed.
    """
    page, path = render(inspection), Path(path)
    if path.is_dir() or not (path.suffix or os.path.lexists(path)):
        path = path / f"inspect-{hashlib.sha256(page.encode('utf-8')).hexdigest()[:12]}.html"
    if os.path.lexists(path):
        if path.is_file() and path.read_bytes() == page.encode("utf-8"):
            return path
        raise ConfigError(
            f"path={str(path)!r} exists and is not overwritten: choose another name, or give a folder, in which pages "
            "are named by their content."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return path


def as_script_data(content: Any) -> str:
    """JSON that is safe inside a script element: ASCII, without <, > and &, which could end it or begin another."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def payload(inspection: Inspection) -> dict[str, Any]:
    """What the page's script reads; each token text stands in it once."""
    vocabulary: dict[str, int] = {}

    def numbered(tokens: Sequence[str]) -> list[int]:
        return [vocabulary.setdefault(token, len(vocabulary)) for token in tokens]

    samples = [
        {
            "label": harmless(sample.label),
            "group": sample.group,
            "reward": sample.reward,
            "prompt": None if isinstance(sample.prompt, str) else numbered(sample.prompt),
            "text": _plain(pieces(sample.prompt, layout=True))
            if isinstance(sample.prompt, str) and sample.prompt
            else None,
            "tokens": numbered(sample.tokens),
            "trained": None if sample.trained is None or all(sample.trained) else [int(t) for t in sample.trained],
            "series": {key: _rounded(values) for key, values in sample.series.items()},
            "credit": [None if credit is None else _credit(credit) for credit in sample.credit],
            "keys": None if sample.keys is None else [[[p, _round(w)] for p, w in keys] for keys in sample.keys],
        }
        for sample in inspection.samples
    ]
    known = [*OF_OPERATORS, *OF_RESPONSES.values(), *inspection.quantities]
    return {
        "levels": LEVELS,
        "quantities": [
            {"key": q.key, "label": harmless(q.label), "sentence": harmless(q.sentence), "scale": q.scale}
            for q in known
            if _occurs(q.key, inspection)
        ],
        "operators": [{"label": harmless(o.label), "sentence": harmless(o.sentence)} for o in inspection.operators],
        "vocabulary": [[token, _plain(pieces(token))] for token in vocabulary],
        "samples": samples,
    }


def _occurs(key: str, inspection: Inspection) -> bool:
    if key == ADVANTAGE.key:
        return bool(inspection.operators)
    if key == GATE.key:
        return any(c is not None and c.gates is not None for sample in inspection.samples for c in sample.credit)
    return any(key in sample.series for sample in inspection.samples)


def _credit(credit: TokenCredit) -> dict[str, Any]:
    names = ("advantages", "gates", "deltas", "decays", "weights")
    return {name: _rounded(getattr(credit, name)) for name in names if getattr(credit, name) is not None}


def _plain(found: Sequence[Piece]) -> list[list[Any]]:
    return [[piece.text, int(piece.mark)] for piece in found]


def _rounded(values: Series) -> list[float | None]:
    return [_round(value) for value in values]


def _round(value: float | None) -> float | None:
    """Nine digits: products over thousands of tokens keep six."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.9g}")


def _asset(name: str) -> str:
    return resources.files("comppo.report").joinpath("templates", "inspect", name).read_text(encoding="utf-8")


def _ramps() -> str:
    """A class for each step of each scale, so that colouring a token is changing one class."""
    rules = [
        f".{name}{level} {{ background-color: color-mix(in srgb, var(--{colour}) {85 * level / LEVELS:.1f}%, "
        "transparent); }"
        for name, colour in (("p", "above"), ("n", "below"), ("s", "scale"))
        for level in range(1, LEVELS + 1)
    ]
    return "\n".join(rules) + "\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
