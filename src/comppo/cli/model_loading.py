"""A model's configuration and weights: only what is safe to read, and whatever goes wrong as one message."""

import contextlib
import math
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from comppo.cli.model_files import Source, printable, quoted, shortened
from comppo.errors import ComppoError, ConfigError, MissingExtraError

DTYPES = ("auto", "float32", "bfloat16", "float16")


def require_transformers() -> None:
    """Raise MissingExtraError where what reads a model is not installed."""
    missing = [name for name in ("transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"this command needs {', '.join(missing)}: pip install 'comppo[train]'.")


def _malformed() -> tuple[type[Exception], ...]:
    """What Transformers raises on files that are missing, broken or not its own."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return (
        OSError,
        ImportError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        RuntimeError,
        StrictDataclassError,
        SafetensorError,
    )


def read_config(source: Source, attn_implementation: str | None) -> Any:
    """The model's configuration.

    Args:
        source: where it is.
        attn_implementation: what the user asks for, or None.

    Returns:
        A Transformers configuration.

    Raises:
        ConfigError: it cannot be read, or names attention or expert code on the hub.
    """
    from transformers import AutoConfig

    shown = quoted(source.name)
    try:
        config = AutoConfig.from_pretrained(source.path, **source.options)
    except _malformed() as error:
        if source.local:
            file = "GGUF file" if source.gguf_file else "config.json"
            remedy = f"Its {file} has to be one that this version of Transformers reads."
            if "trust_remote_code" in str(error):
                remedy = "Read that code, then pass --trust-remote-code."
        else:
            remedy = (
                "If it is a folder, there is none of that name here. For the hub: check name, --revision and network, "
                "log in for private models (`hf auth login`), or give a local folder."
            )
        raise ConfigError(f"the configuration of model={shown} cannot be read: {shortened(error)} {remedy}") from error
    _check_implementations(config, attn_implementation, shown)
    return config


def _check_implementations(config: Any, attn_implementation: str | None, shown: str) -> None:
    """A configuration may name code on the hub, which loading the model would download and run."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    for part in parts:
        for name in ("_attn_implementation", "_experts_implementation"):
            value = getattr(part, name, None)
            asked = name == "_attn_implementation" and attn_implementation is not None
            if isinstance(value, str) and "/" in value and not asked:
                remedy = ", or pass --attn-implementation sdpa" if name == "_attn_implementation" else ""
                raise ConfigError(
                    f"the configuration of model={shown} asks for code on the hub ({quoted(value)}), which is not "
                    f"run: delete {name} from its config.json{remedy}."
                )


def runs_own_code(source: Source, config: Any) -> bool:
    """Whether loading the model takes its class from its own files, so that the configuration does not tell."""
    return source.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def load_model(
    source: Source,
    config: Any,
    *,
    class_name: str | None,
    parameters: int,
    dtype: str,
    attn_implementation: str | None,
    device: str,
) -> tuple[Any, tuple[str, ...]]:
    """The model with its weights, or with random ones where the folder has none.

    Args:
        source: where it is.
        config: from `read_config`.
        class_name: the class of Transformers that the configuration stands for; None for what its auto class finds.
        parameters: how many weights it has, 0 if not known.
        dtype: one of `DTYPES`.
        attn_implementation: None for the model's own choice.
        device: as torch names it.

    Returns:
        The model in eval mode, and notes on weights that are missing or left over.

    Raises:
        ConfigError: the weights cannot be loaded, or do not fit.
    """
    import torch
    import transformers

    _check_fits(source, config, parameters, dtype, device)
    cls: Any = getattr(transformers, class_name) if class_name else transformers.AutoModelForCausalLM
    shown, attention = quoted(source.name), {"attn_implementation": attn_implementation}
    notes: tuple[str, ...] = ()
    try:
        if source.weights:
            model, info = cls.from_pretrained(
                source.path,
                config=config,
                dtype=dtype,
                use_safetensors=None if source.gguf_file else True,
                output_loading_info=True,
                **attention,
                **source.options,
            )
            notes = _loading_notes(info)
        else:
            wanted = config.dtype if dtype == "auto" else getattr(torch, dtype)
            torch.manual_seed(0)
            make = cls._from_config if class_name else cls.from_config
            model = make(config, dtype=wanted or torch.float32, **attention)
        model.eval().to(device)
    except _malformed() as error:
        if is_out_of_memory(error):
            raise
        remedy = "Check --attn-implementation, --dtype, and that the files are whole and belong together."
        if isinstance(error, ImportError):
            remedy = "Install it, or choose another --attn-implementation."
        elif isinstance(error, OSError):
            remedy = "Weights are read from safetensors or GGUF files alone."
        raise ConfigError(f"model={shown} cannot be loaded: {shortened(error)} {remedy}") from error
    return model, notes


def _loading_notes(info: dict[str, Any]) -> tuple[str, ...]:
    notes = []
    for key, meaning in (
        ("missing_keys", "weights are not in the files and are random"),
        ("unexpected_keys", "weights of the files have no place in the model"),
    ):
        names = sorted(map(str, info.get(key) or ()))
        if names:
            some = ", ".join(printable(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
            notes.append(f"{len(names)} {meaning}: {some}")
    return tuple(notes)


def _check_fits(source: Source, config: Any, parameters: int, dtype: str, device: str) -> None:
    """Refuse weights that are greater than all the memory there is, instead of ending in the system's killer."""
    import torch

    if source.gguf_file or getattr(config, "quantization_config", None) is not None:
        return  # weights may stay packed
    held = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    unknown = 2 if source.weights else torch.float32.itemsize
    needed = parameters * (held.itemsize if isinstance(held, torch.dtype) else unknown)
    on_gpu = device.startswith("cuda")
    total = float(torch.cuda.get_device_properties(device).total_memory) if on_gpu else physical_memory()
    if needed > total:
        raise ConfigError(
            f"model={quoted(source.name)} does not fit: its {parameters:,} weights need {needed / 1e9:.1f} GB, "
            f"and {device} has {total / 1e9:.1f} GB. Choose a smaller --dtype or --device, or check the configuration "
            "alone with --config-only."
        )


def physical_memory() -> float:
    """Bytes of main memory; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, on a CPU or a GPU."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextlib.contextmanager
def in_memory(what: str, remedy: str) -> Iterator[None]:
    """Turn running out of memory into a ConfigError that says at what."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"not enough memory for {what}: {remedy}.") from error


@contextlib.contextmanager
def failing_as_config_error(what: str, remedy: str) -> Iterator[None]:
    """Turn what a model's own code raises into one message; errors of comppo and of memory pass."""
    try:
        yield
    except ComppoError:
        raise
    except _malformed() as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"{what} fails: {type(error).__name__}: {shortened(error)} {remedy}") from error
