"""`comppo check-model`: what can be read of a model, how exactly, and at what cost."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from comppo.cli import model_files, model_loading
from comppo.cli.check_page import Result, as_json, page
from comppo.cli.model_files import Source, printable, quoted
from comppo.errors import ConfigError, UnreadableModelError

LENGTH, ROUNDS = 512, 3
OTHERWISE = "Try another --dtype, --attn-implementation or --device."


@click.command("check-model")
@click.argument("model", metavar="NAME_OR_FOLDER")
@click.option("--revision", help="Branch, tag or commit of a model on the hub.")
@click.option("--gguf-file", help="Name of a GGUF file in the folder or repository.")
@click.option(
    "--dtype",
    type=click.Choice(model_loading.DTYPES),
    default="auto",
    show_default=True,
    help="Precision to load it in.",
)
@click.option(
    "--attn-implementation", help="Such as sdpa, eager, flash_attention_2.  [default: the model's own choice]"
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--lengths",
    help=f"Tokens at which to measure the cost, such as 512,2048; '' for none.  [default: {LENGTH}, or as many as the "
    "model allows]",
)
@click.option("--config-only", is_flag=True, help="Look at the configuration alone: load (and download) no weights.")
@click.option("--trust-remote-code", is_flag=True, help="Let the model run code of its own.")
@click.option("--json", "as_object", is_flag=True, help="One JSON object on stdout instead of text.")
def command(
    model: str,
    revision: str | None,
    gguf_file: str | None,
    dtype: str,
    attn_implementation: str | None,
    device: str,
    lengths: str | None,
    config_only: bool,
    trust_remote_code: bool,
    as_object: bool,
) -> None:
    """Say what can be read of a model, how exactly, and at what cost.

    NAME_OR_FOLDER is a hub name, a folder that save_pretrained wrote, a GGUF file, or 'bundled'. The configuration is
    looked at first, so that a model that cannot be read is not loaded. A folder with only a config.json is checked with
    random weights. Weights are read from safetensors (or GGUF), never from pickled files.

    The model is then loaded and read on two rows of 48 tokens, one padded on the left; what is read is compared with
    the attention matrices of eager attention. The cost is measured on one row of random tokens per length, against a
    forward that is not read.

    Exit code 0: it can be read with the default settings. 1: it cannot, and the output says why.
    2: wrong arguments, or the model cannot be found or loaded.
    """
    model_loading.require_transformers()
    # The profiler that measures memory else tells when it starts, and of every block that is older
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    with quiet_transformers(), contextlib.redirect_stdout(sys.stderr):
        source = model_files.locate(model, revision=revision, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
        result = check(source, dtype, attn_implementation, device_of(device), lengths, config_only)
    click.echo(json.dumps(as_json(result), indent=2, allow_nan=False) if as_object else page(result))
    if not result.verdict.readable:
        sys.exit(1)


def check(
    source: Source, dtype: str, attn_implementation: str | None, device: str, lengths: str | None, config_only: bool
) -> Result:
    """Everything that is told about a model, as far as it gets.

    Args:
        source: where the model is.
        dtype: one of `model_loading.DTYPES`.
        attn_implementation: None for the model's own choice.
        device: from `device_of`.
        lengths: numbers of tokens, separated by commas; None for the default.
        config_only: load no weights.

    Returns:
        The result, whose verdict says whether the model can be read.

    Raises:
        ConfigError: an argument is wrong, or the model cannot be loaded.
    """
    from comppo.computation.checkup import conclude, refusal, untold
    from comppo.computation.structure import examine, longest_input
    from comppo.computation.support import check_implementation

    config = model_loading.read_config(source, attn_implementation)
    result = Result(source=source, model_type=str(getattr(config, "model_type", "")))
    try:
        check_implementation(attn_implementation)
        if not model_loading.runs_own_code(source, config):
            with model_loading.failing_as_config_error("looking at the configuration", "It may be damaged."):
                result.structure = examine(config)
    except UnreadableModelError as error:
        result.verdict = refusal(error)
        return result
    wanted = () if config_only else lengths_of(lengths, longest_input(config))
    if config_only or (result.structure is not None and not result.structure.readable):
        result.verdict = conclude(result.structure, None, None) if result.structure else untold()
        return result
    model_files.check_safe(source)
    model = load(result, config, dtype, attn_implementation, device)
    try:
        result.structure = examine(model)
        assert result.structure is not None
        read(result, model)
    except UnreadableModelError as error:
        result.verdict = refusal(error)
        return result
    if result.verdict.readable:
        measure(result, model, wanted)
    return result


def load(result: Result, config: Any, dtype: str, attn_implementation: str | None, device: str) -> Any:
    """The model, with what is known once it is loaded noted in `result`."""
    import torch

    source, structure = result.source, result.structure
    if not source.weights:
        say(f"{printable(source.name)} holds no weights: making random ones")
    else:
        say(f"loading {printable(source.name)}")
    remedy = "choose a smaller --dtype or another --device, or check the configuration alone with --config-only"
    with model_loading.in_memory(f"the weights of {quoted(source.name)}", remedy):
        model, result.notes = model_loading.load_model(
            source,
            config,
            class_name=structure.model_class if structure else None,
            parameters=structure.parameters if structure else 0,
            dtype=dtype,
            attn_implementation=attn_implementation,
            device=device,
        )
    result.weights = "loaded" if source.weights else "random"
    result.attention = str(model.config.get_text_config(decoder=True)._attn_implementation or "eager")
    result.dtype = str(model.dtype).removeprefix("torch.")
    result.device = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    result.threads = torch.get_num_threads()
    return model


def read(result: Result, model: Any) -> None:
    """Read the model on a short input and compare it with eager attention."""
    from comppo.computation.checkup import compare_with_eager, conclude
    from comppo.computation.trial import short_input, try_reading

    structure = result.structure
    assert structure is not None
    if not structure.readable:
        result.verdict = conclude(structure, None, None)
        return
    say("reading it on a short input")
    with (
        model_loading.in_memory("a forward of 2 short rows", "choose a smaller --dtype or another --device"),
        model_loading.failing_as_config_error("a forward of 2 short rows", OTHERWISE),
    ):
        ids, mask = short_input(model)
        result.short_rows = tuple(ids.shape)
        result.trial = try_reading(model, structure, ids, mask)
        result.structure = result.trial.structure
        if result.structure.readable == structure.readable:
            result.agreement = compare_with_eager(model, ids, mask)
        elif result.structure.readable:
            result.agreement = "some layers refuse to be read"
    result.verdict = conclude(structure, result.trial, result.agreement)


def measure(result: Result, model: Any, lengths: tuple[int, ...]) -> None:
    """Measure the cost at each length; the first that does not fit into memory ends it."""
    from comppo.computation.cost import measure_cost
    from comppo.computation.trial import random_ids

    assert result.structure is not None
    result.rounds = ROUNDS
    for tokens in lengths:
        say(f"measuring the cost at {tokens} tokens")
        try:
            with (
                model_loading.in_memory(f"{tokens} tokens", "pass fewer --lengths"),
                model_loading.failing_as_config_error(f"a forward of {tokens} tokens", OTHERWISE),
            ):
                ids = random_ids(model, 1, tokens)
                result.costs += measure_cost(model, ids, layers=result.structure.readable, rounds=ROUNDS)
        except ConfigError as error:
            result.notes += (f"the cost at {tokens} tokens was not measured: {error}",)
            return


def lengths_of(text: str | None, longest: int | None) -> tuple[int, ...]:
    """The lengths at which to measure.

    Args:
        text: as on the command line, or None.
        longest: how many positions the model has; None if it does not say.

    Returns:
        Numbers of tokens in the order given.

    Raises:
        ConfigError: one is no positive number, or longer than the model allows.
    """
    if text is None:
        return (min(LENGTH, longest or LENGTH),)
    lengths = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if not (part.isascii() and part.isdigit()) or int(part) < 2:
            raise ConfigError(f"--lengths {quoted(text)}: {quoted(part)} is no number of tokens above 1.")
        if longest is not None and int(part) > longest:
            raise ConfigError(
                f"--lengths {part} is more than the {longest} positions that the model has: pass at most {longest}."
            )
        lengths.append(int(part))
    return tuple(lengths)


def device_of(name: str) -> str:
    """The device's name, if it is there.

    Args:
        name: "cpu", "cuda" or "cuda:N".

    Returns:
        The name.

    Raises:
        ConfigError: it is another, or not there.
    """
    import torch

    kind, colon, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not (number.isascii() and number.isdigit()))):
        raise ConfigError(f"--device {quoted(name)} is unknown: pass cpu, cuda or cuda:N.")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs.")
    return name


def say(message: str) -> None:
    """Progress, which is not part of the output."""
    click.echo(f"{message} ...", err=True)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings from Transformers, whose matters are reported here, and bars only where somebody watches."""
    from transformers.utils import logging as its_logging

    level, bars = its_logging.get_verbosity(), its_logging.is_progress_bar_enabled()
    its_logging.set_verbosity(logging.ERROR)
    if not sys.stderr.isatty():
        its_logging.disable_progress_bar()
    try:
        yield
    finally:
        its_logging.set_verbosity(level)
        if bars:
            its_logging.enable_progress_bar()
