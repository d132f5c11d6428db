"""Computation-conditioned credit transport for LLM reinforcement learning.

`CompPOConfig` and `CompPOTrainer` stand in for TRL's `GRPOConfig` and `GRPOTrainer`; they are imported when first used,
so that `import comppo` loads neither Transformers nor TRL. So are `Credit`, `Evidence` and `TransportOperator`, so that
the command line answers without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from comppo.errors import ComppoError

if TYPE_CHECKING:
    from comppo.trainers.trl.config import CompPOConfig
    from comppo.trainers.trl.trainer import CompPOTrainer
    from comppo.types import Credit, Evidence, TransportOperator

__all__ = ["CompPOConfig", "CompPOTrainer", "ComppoError", "Credit", "Evidence", "TransportOperator"]

_HEAVY = {
    "CompPOConfig": "comppo.trainers.trl.config",
    "CompPOTrainer": "comppo.trainers.trl.trainer",
    "Credit": "comppo.types",
    "Evidence": "comppo.types",
    "TransportOperator": "comppo.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module 'comppo' has no attribute {name!r}")
    return getattr(import_module(_HEAVY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
