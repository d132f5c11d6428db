"""Shapes in signatures are checked at run time in every test, except in the second, unhooked run."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if not os.environ.get("COMPPO_UNHOOKED"):
    from jaxtyping import install_import_hook

    # The layers that speak in tensors; TRL's own dataclasses do not keep to their annotations
    install_import_hook(
        [
            *(f"comppo.{layer}" for layer in ("types", "evidence", "transport", "computation", "critic", "update")),
            "comppo.trainers.pipeline",
        ],
        "beartype.beartype",
    )

import torch

torch.set_num_threads(1)
