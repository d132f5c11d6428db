"""Make the bundled base model: `python -m comppo.tasks.pretrain --output DIR`.

A small Llama learns next tokens on the noisy demonstrator's responses over a mix of sizes, for a number of steps and
not for a time, on one thread: the same command gives the same model on the same machine and versions.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comppo.errors import ConfigError, RunExistsError
from comppo.tasks import chain
from comppo.tasks.chain_steps import parse_prompt
from comppo.tasks.demonstrator import demonstrate, demonstrator_accuracy
from comppo.tasks.tokenizer import make_tokenizer

SIZES = tuple((n, d) for d in range(3) for n in range(1, 6))
"""(length, distractors) that pretraining mixes, each equally likely."""
CURRICULUM = ((0.1, 3), (0.3, 8), (1.0, 15))
"""Up to this share of the steps, only sizes with at most so many statements: looking up is learned faster on few."""
LINE_WEIGHTS = (1.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 0.1)
"""Loss weights of a line's tokens: more for what is looked up or computed, little for the mark, which is noise."""
END_WEIGHTS = (1.0, 1.0, 4.0, 1.0)
"""Loss weights of the asked name, `#`, the answer and end of text."""
TOKENS_PER_STEP = 4096
"""Tokens of a batch, prompts included; longer problems come in smaller batches."""
POSITIONS = 384
"""The longest possible problem (25 statements) has 334 tokens."""
STEPS, PEAK = 8000, 4e-3
"""Steps and peak learning rate of the bundled model."""
MEASURED_SIZES = ((2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2), (4, 2), (5, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Size of the Llama."""

    layers: int = 3
    """Decoder layers."""
    hidden: int = 64
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; keys and values have as many."""
    intermediate: int = 256
    """Width of the gated MLP."""


def make_model(size: ModelSize, seed: int) -> Any:
    """An untrained Llama in float32 for the chain tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(chain.VOCABULARY),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=POSITIONS,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=chain.TOKEN_IDS[chain.PAD],
        bos_token_id=None,
        eos_token_id=chain.TOKEN_IDS[chain.EOS],
        tie_word_embeddings=False,
        attention_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def draw_batch(rng: np.random.Generator, length: int, distractors: int) -> tuple[Tensor, int]:
    """Token ids (rows, tokens) of demonstrations of one size, end of text included, and the prompts' length."""
    config = chain.ChainConfig(length=length, distractors=distractors)
    prompt_length = 3 * (distractors + 1) + 5 * config.statements + 3
    count = max(8, TOKENS_PER_STEP // (prompt_length + config.completion_length))
    problems = chain.training_problems(rng, count, length=length, distractors=distractors)
    prompts, (responses, _) = chain.render_prompts(problems), demonstrate(problems, rng)
    eos = chain.TOKEN_IDS[chain.EOS]
    ids = [[chain.TOKEN_IDS[c] for c in p + r] + [eos] for p, r in zip(prompts, responses, strict=True)]
    return torch.tensor(ids), prompt_length


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 60 steps, constant for a quarter of the run, then linear to 2 % of the peak."""
    progress = step / steps
    return peak * min(1.0, (step + 1) / 60) * (1.0 if progress < 0.25 else max(0.02, (1 - progress) / 0.75))


def train(model: Any, *, steps: int, seed: int, peak: float) -> float:
    """Train on demonstrated responses, the prompts being given. Returns the mean loss of the last 100 steps, in nats a
    token."""
    rng = np.random.default_rng([seed, chain.PRETRAIN_STREAM])
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        most = next(lines for share, lines in CURRICULUM if step < share * steps)
        sizes = [(n, d) for n, d in SIZES if n * (d + 1) <= most]
        ids, prompt_length = draw_batch(rng, *sizes[rng.integers(len(sizes))])
        lines = (ids.shape[1] - prompt_length) // chain.LINE_LENGTH
        weights = torch.tensor(LINE_WEIGHTS * lines + END_WEIGHTS)
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=ids.shape[1] - prompt_length).logits
        targets = ids[:, prompt_length:]
        token_losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        loss = (token_losses * weights).mean() / weights.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(token_losses.mean().item())
        if step % 100 == 99:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps}: loss {np.mean(losses[-100:]):.4f}, {seconds:.0f} s", flush=True)
    model.eval()
    return float(np.mean(losses[-100:]))


def measure(model: Any, tokenizer: Any, *, length: int, distractors: int, count: int, seed: int) -> dict[str, Any]:
    """Sampled and greedy accuracy on `count` held-out prompts, one response each, and how many are well-formed.

    A response is well-formed if it restates every statement right in the right place, whatever the digits it computed.
    """
    from comppo.evaluation.greedy import evaluating, generate_responses

    config = chain.ChainConfig(length=length, distractors=distractors, prompts=1, eval_prompts=count)
    found = chain.distinct_prompts(
        np.random.default_rng([seed, chain.MEASURE_STREAM]), count, config=config, held_out=True
    )
    prompts, answers = list(found), list(found.values())
    result: dict[str, Any] = {"length": length, "distractors": distractors, "count": count}
    result["demonstrator_accuracy"] = round(demonstrator_accuracy(length), 4)
    result["response_tokens"] = config.completion_length
    with evaluating(model):
        torch.manual_seed(seed)
        for name, do_sample in (("sampled", True), ("greedy", False)):
            responses = []
            for start in range(0, count, 256):
                responses += generate_responses(
                    model,
                    tokenizer,
                    prompts[start : start + 256],
                    max_new_tokens=config.completion_length,
                    do_sample=do_sample,
                )
            texts = [response.text for response in responses]
            scores = chain.chain_reward(texts, answers, completion_ids=[response.ids for response in responses])
            result[f"{name}_right"] = int(sum(score or 0 for score in scores))
            result[f"{name}_accuracy"] = round(result[f"{name}_right"] / count, 4)
            formed = [r.ended and well_formed(p, r.text) for p, r in zip(prompts, responses, strict=True)]
            result[f"{name}_well_formed"] = sum(formed)
    return result


def well_formed(prompt: str, response: str) -> bool:
    """Whether a response restates every statement, has digits and marks where they belong, and answers."""
    parsed = parse_prompt(prompt)
    statements = parsed.statements
    if len(response) != chain.LINE_LENGTH * len(statements) + 3:
        return False
    for index, statement in enumerate(statements):
        line = response[chain.LINE_LENGTH * index : chain.LINE_LENGTH * (index + 1)]
        operation = chain.OPERATIONS[statement.operation]
        expected = (
            statement.name,
            statement.parent,
            None,
            operation,
            str(statement.operand),
            statement.name,
            None,
            None,
        )
        if any(wanted is not None and wanted != given for wanted, given in zip(expected, line, strict=True)):
            return False
        if line[2] not in chain.DIGITS or line[6] not in chain.DIGITS or line[7] not in chain.MARKS:
            return False
    return response[-3:-1] == parsed.asked + "#" and response[-1] in chain.DIGITS


def make_base_model(
    output: str | Path,
    *,
    steps: int = STEPS,
    seed: int = 0,
    size: ModelSize | None = None,
    peak: float = PEAK,
    measured: int = 512,
) -> Path:
    """Train a base model for `chain` and save it with its tokenizer and `card.json`.

    Runs on one thread. The same arguments give the same weights on the same machine and versions.

    Args:
        output: a folder that does not exist yet.
        steps: optimizer steps, at least 1.
        seed: decides weights, demonstrations and the sampling of the measurement.
        size: of the model; None: `ModelSize()`.
        peak: learning rate of AdamW at its peak.
        measured: held-out prompts per size in the card; 0 leaves the measurement out.

    Returns:
        The folder.

    Raises:
        RunExistsError: `output` exists.
        ConfigError: `steps` is below 1.
    """
    output = Path(output)
    if output.exists():
        raise RunExistsError(f"output {str(output)!r} exists: choose a new folder, nothing is overwritten.")
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps!r}.")
    size = size or ModelSize()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started = time.monotonic()
        model, tokenizer = make_model(size, seed), make_tokenizer()
        loss = train(model, steps=steps, seed=seed, peak=peak)
        seconds = time.monotonic() - started
        _save(output, model, tokenizer)  # before anything that can still fail
        sizes = MEASURED_SIZES if measured else ()
        table = [measure(model, tokenizer, length=n, distractors=d, count=measured, seed=seed) for n, d in sizes]
    finally:
        torch.set_num_threads(threads)
    card = {
        "task": "chain",
        "command": f"python -m comppo.tasks.pretrain --output DIR --steps {steps} --seed {seed}",
        "seed": seed,
        "steps": steps,
        "peak_learning_rate": peak,
        "tokens_per_step": TOKENS_PER_STEP,
        "trained_sizes": [list(pair) for pair in SIZES],
        "size": asdict(size),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "final_loss": round(loss, 4),
        "training_seconds": round(seconds),
        "held_out": table,
        "versions": versions(),
    }
    (output / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return output


def _save(output: Path, model: Any, tokenizer: Any) -> None:
    """Write model and tokenizer; generation samples at temperature 1 without cuts unless told otherwise."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    output.mkdir(parents=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def versions() -> dict[str, str]:
    """Versions of what decides the weights."""
    import tokenizers
    import transformers

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "machine": platform.machine(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m comppo.tasks.pretrain", description=__doc__)
    parser.add_argument("--output", required=True, help="a new folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parsed = parser.parse_args(arguments)
    try:
        print(make_base_model(parsed.output, steps=parsed.steps, seed=parsed.seed))
    except (ConfigError, RunExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
