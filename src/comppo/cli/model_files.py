"""What a model's name stands for: a bundled one, a folder, a GGUF file or one on the hub. Nothing is loaded here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comppo.errors import ConfigError

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_LONGEST = 300  # characters of another library's message


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a model is, as `from_pretrained` takes it."""

    name: str
    """As the user wrote it."""
    path: str
    """Folder or hub name."""
    local: bool
    """Whether it is a folder."""
    weights: bool
    """Whether there are weights, as far as a look at the folder tells; True for hub names."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    gguf_file: str | None = None
    """Name of a GGUF file in it."""
    trust_remote_code: bool = False
    """Whether the model's own code may run."""

    @property
    def tokenizer(self) -> bool:
        """Whether there is a tokenizer, as far as a look at the folder tells; True for hub names."""
        if not self.local:
            return True
        names = ("tokenizer*", "vocab*", "*.model", "spiece*")
        return any(next(Path(self.path).glob(name), None) is not None for name in names)

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of `from_pretrained`; without an explicit False Transformers asks on the terminal."""
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.revision is not None:
            options["revision"] = self.revision
        if self.gguf_file is not None:
            options["gguf_file"] = self.gguf_file
        return options


def printable(text: str) -> str:
    """The text with everything that a terminal might obey (escapes, controls, direction marks) spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def quoted(name: str) -> str:
    """A name as it is shown in messages."""
    return f"'{printable(name)}'"


def shortened(error: BaseException) -> str:
    """What another library's error says: its first paragraph, on one line, printable."""
    if "ignore_mismatched_sizes" in str(error):  # it points to a report that is not printed
        return "weights in the files have other shapes than the configuration says."
    paragraph = str(error).strip().split("\n\n")[0]
    text = printable(" ".join(paragraph.split())) or type(error).__name__
    if len(text) > _LONGEST:
        sentence = text.rfind(". ", 0, _LONGEST)
        text = text[: sentence + 1] if sentence > 0 else text[:_LONGEST] + "..."
    return text if text.endswith((".", "!", "?")) else text + "."


def locate(
    name: str, *, revision: str | None = None, gguf_file: str | None = None, trust_remote_code: bool = False
) -> Source:
    """Find out what a name stands for, without reading any file or asking the hub.

    Args:
        name: "bundled", a folder, a GGUF file, or a hub name.
        revision: for hub names.
        gguf_file: name of a GGUF file in the folder or repository.
        trust_remote_code: passed on.

    Returns:
        Where the model is.

    Raises:
        ConfigError: there is no such folder, or it holds no model.
        TaskError: it is an unknown bundled model.
    """
    from comppo.tasks.base_models import resolve_model

    resolved = resolve_model(name)
    path, shown = Path(resolved).expanduser(), quoted(name)
    if path.is_file():
        if path.suffix.lower() != ".gguf" or gguf_file is not None:
            raise ConfigError(f"model={shown} is a file: give the folder that holds it, or one GGUF file.")
        path, gguf_file = path.parent, path.name
    if not path.is_dir():
        if path.is_absolute() or resolved.startswith((".", "~")) or resolved.count("/") > 1 or path.suffix == ".gguf":
            raise ConfigError(f"model={shown}: there is no such file or folder.")
        return Source(
            name=name,
            path=resolved,
            local=False,
            weights=True,
            revision=revision,
            gguf_file=gguf_file,
            trust_remote_code=trust_remote_code,
        )
    if revision is not None:
        raise ConfigError(
            f"--revision {quoted(revision)} is for models on the hub, and {shown} is a folder: leave it out."
        )
    if gguf_file is None:
        _check_folder(path, shown)
    elif not (path / gguf_file).is_file():
        raise ConfigError(f"--gguf-file {quoted(gguf_file)}: the folder {shown} holds no such file.")
    return Source(
        name=name,
        path=str(path),
        local=True,
        weights=gguf_file is not None or any(path.glob("*.safetensors*")),
        gguf_file=gguf_file,
        trust_remote_code=trust_remote_code,
    )


def _check_folder(path: Path, shown: str) -> None:
    if (path / "config.json").is_file():
        return
    names = sorted(printable(entry.name) for entry in path.iterdir())
    gguf = next((n for n in names if n.lower().endswith(".gguf")), None)
    if gguf is not None:
        remedy = f"give a GGUF file in it with --gguf-file {gguf}"
    elif "adapter_config.json" in names:
        remedy = "it is an adapter: give the folder or name of its base model, whose attention is the same"
    else:
        remedy = "give a folder that save_pretrained wrote, a hub name, or 'bundled'"
    raise ConfigError(f"model={shown}: the folder holds no config.json; {remedy}.")


def check_safe(source: Source) -> None:
    """Refuse weights that are only there as pickled files, which may run code; ConfigError says how to convert them."""
    if source.weights or not source.local:
        return
    pickled = next((e.name for e in sorted(Path(source.path).iterdir()) if e.suffix in _PICKLED), None)
    if pickled is not None:
        raise ConfigError(
            f"model={quoted(source.name)} has its weights in {printable(pickled)}, and pickled files may run "
            "code: give a copy in safetensors (save_pretrained writes one), or check the configuration alone with "
            "--config-only."
        )
