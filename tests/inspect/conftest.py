"""Batches of made-up responses, and a headless Chromium that looks at their pages."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch

from comppo.evidence.rewards import place_rewards
from comppo.inspect import operator_credit, report
from comppo.transport import (
    GAE,
    CompGAE,
    GateConfig,
    GroupRelative,
    PrefixTree,
    Redistribute,
    gate_from_statistic,
    shuffled,
)
from comppo.types import Evidence

WORDS = "All but 9 run away, so 9 sheep stay.\nThen 4 of them come back, which makes 9 + 4 = 13.\n\nSo \\boxed{13}."
OTHERS = "The farmer starts with 17 sheep and 9 of them run away.\nThat leaves 17 - 9 = 8 sheep, and 8 + 4 = 12."
PROMPT = ["A", " farmer", " has", " 17", " sheep", ".", "\n"]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def tokenise(text: str) -> list[str]:
    return re.findall(r"\n+| ?[A-Za-z]+| ?\d|[^\w\s]| ", text)


def batch(texts: list[list[str]], *, generations: int = 2, seed: int = 0) -> tuple[Evidence, dict]:
    """Evidence for responses, and the operators that are asked about."""
    draw = torch.Generator().manual_seed(seed)
    rows, tokens = len(texts), max(map(len, texts))
    mask = torch.zeros(rows, tokens, dtype=torch.bool)
    for row, text in enumerate(texts):
        mask[row, : len(text)] = True
    mask[0, 3] = False  # an observation
    rewards = torch.arange(rows).remainder(2).double()
    statistic = torch.randn(rows, tokens, generator=draw, dtype=torch.float64)
    evidence = Evidence(
        rewards=place_rewards(rewards, mask),
        mask=mask,
        values=torch.rand(rows, tokens, generator=draw, dtype=torch.float64),
        gates=gate_from_statistic(statistic, mask, GateConfig(unit="tokens", minimum=1.0, reference=4.0)),
        completion_ids=torch.randint(0, 3, (rows, tokens), generator=draw),
        weights=torch.rand(rows, tokens, generator=draw, dtype=torch.float64),
        num_generations=generations,
    )
    assert evidence.gates is not None
    moved = dataclasses.replace(evidence, gates=shuffled(evidence.gates, mask, generator=draw))
    operators = {
        "GRPO": (GroupRelative(), evidence),
        "Fixed GAE": (GAE(gamma=0.99, lam=0.9), evidence),
        "GAE, lambda by length": (GAE(length_alpha=0.1), evidence),
        "Comp-GAE": (CompGAE(lam=0.95), evidence),
        "Comp-GAE, gated trace": (CompGAE(lam=1.0, gate_bootstrap=False), evidence),
        "Shuffled gates": (CompGAE(lam=0.95), moved),
        "Redistribution": (Redistribute(), evidence),
        "Prefix tree": (PrefixTree(), evidence),
    }
    return evidence, operators


def write(path: Path, texts: list[list[str]], *, generations: int = 2, **more) -> Path:
    """A page with every kind of operator and quantity."""
    evidence, operators = batch(texts, generations=generations)
    draw = torch.Generator().manual_seed(1)
    shape = evidence.mask.shape
    shown = {name: operator_credit(*pair, about=f"{name}, in a sentence.") for name, pair in operators.items()}
    arguments = {
        "responses": texts,
        "operators": {**shown, "Numbers alone": torch.randn(shape, generator=draw)},
        "rewards": evidence.rewards.sum(1),
        "mask": evidence.mask,
        "num_generations": generations,
        "statistic": torch.randn(shape, generator=draw),
        "values": evidence.values,
        "logps": -torch.rand(shape, generator=draw),
        "sink_mass": torch.rand(shape, generator=draw),
    }
    return report(path, **{**arguments, **more})


@pytest.fixture(scope="session")
def two(tmp_path_factory) -> Path:
    """Two responses to one prompt, with what their heads look at."""
    texts = [tokenise(WORDS), tokenise(OTHERS)]
    keys = [[[(t % 5, 0.5), (len(PROMPT) + t - 1, 0.25)] if t else [(0, 1.0)] for t in range(len(x))] for x in texts]
    path = tmp_path_factory.mktemp("page") / "two.html"
    return write(path, texts, prompts=[PROMPT] * 2, top_keys=keys, title="Sheep", notes=["Made up."])


@pytest.fixture(scope="module")
def browser():
    """Chromium as the machine has it; no browser is downloaded. Its driver keeps an event loop running in this thread,
    so it must not outlive the tests that need it."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    executable = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if executable is None:
        pytest.skip(f"none of {', '.join(CHROMIUM)} is installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Opens a page and, at the end, makes sure that it was silent: no message, no error, no request but the file's."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_page(path: Path, *, width: int = 1280, height: int = 900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert len(asked) == len(contexts) and all(url.startswith("file:") for url in asked)
