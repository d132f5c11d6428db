"""From the arguments of `attention_statistics` to launches of the kernels in `triton_kernel.py`."""

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from comppo.computation import triton_kernel
from comppo.computation.attention_rows import AttentionStatistics
from comppo.computation.triton_kernel import LOG2_E
from comppo.errors import ConfigError

try:
    import triton
except ImportError:
    triton = None

SCANNED = 2**13  # entries of a mask that are looked at in one step
WIDEST = 512  # head width
WIDEST_FEATURES = 64
ALWAYS = ("collision", "maximum", "visible_keys", "sink_mass", "rest_collision", "rest_maximum", "rest_visible_keys")
AXES = {
    "query": ("row", "head", "query", "width"),
    "key": ("row", "head", "key", "width"),
    "mask": ("row", "head", "query", "key"),
    "documents": ("row", "key"),
    "sinks": ("row", "key"),
    "features": ("row", "key", "width"),
    "s_aux": ("head",),
}
"""Strides that the kernels take, named by the tensor's initial and the axis (no axis of sinks is one of s_aux)."""
ENTROPIES, DISTANCES = ("entropy", "rest_entropy"), ("distance", "rest_distance")

# (bytes per element, head width up to): (rows, keys, warps, stages). At these sizes the compiled kernel fits into the
# 99 KiB of shared memory that the smallest supported GPUs have, and into registers (with every option at once, up to
# 1140 bytes of a thread do not).
BLOCKS = {
    (2, 64): (128, 64, 8, 3),
    (2, 128): (128, 64, 8, 2),
    (2, 256): (64, 32, 4, 2),
    (2, 512): (32, 16, 4, 2),
    (4, 64): (64, 32, 8, 2),
    (4, 128): (32, 32, 8, 2),
    (4, 256): (32, 32, 8, 2),
    (4, 512): (16, 16, 4, 2),
}
BLOCKS_WITH_FEATURES = {2: (64, 16, 4, 2), 4: (32, 16, 4, 2)}  # at most these: features need registers too


def unsupported(
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    *,
    features: Float[Tensor, "rows keys features"] | None = None,
) -> str | None:
    """Why the kernel cannot take these inputs; None if it can. The other arguments never matter.

    Args:
        query: as in `attention_statistics`.
        key: likewise.
        features: likewise.

    Returns:
        A reason that follows "the Triton kernel ", or None.
    """
    if triton is None:
        return "needs the package triton"
    interpreted = not isinstance(triton_kernel.rows_kernel, triton.runtime.JITFunction)
    if not query.is_cuda and not (interpreted and query.device.type == "cpu"):
        return f"runs on CUDA, not on {query.device} (on a CPU with TRITON_INTERPRET=1, for tests)"
    if query.is_cuda and (torch.version.hip is not None or torch.cuda.get_device_capability(query.device) < (8, 0)):
        return "needs an NVIDIA GPU of compute capability 8.0 or later"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16) or key.dtype != query.dtype:
        return f"takes float32, bfloat16 or float16, the same for both, not {query.dtype} and {key.dtype}"
    if query.shape[3] > WIDEST:
        return f"takes heads up to {WIDEST} wide, not {query.shape[3]}"
    if features is not None and features.shape[2] > WIDEST_FEATURES:
        return f"takes features up to {WIDEST_FEATURES} wide, not {features.shape[2]}"
    return None


def supports(
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    *,
    features: Float[Tensor, "rows keys features"] | None = None,
) -> bool:
    """Whether `triton_statistics` can take these inputs; nothing is computed, nothing synchronised."""
    return unsupported(query, key, features=features) is None


@torch.no_grad()
def triton_statistics(
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    *,
    scale: float,
    mask: Shaped[Tensor, "mask_rows mask_heads queries keys"] | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Bool[Tensor, "rows keys"] | None = None,
    documents: Int[Tensor, "rows keys"] | None = None,
    rows: slice | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    features: Float[Tensor, "rows keys features"] | None = None,
    entropy: bool = True,
    distance: bool = False,
) -> AttentionStatistics:
    """`attention_statistics` as a Triton kernel; the arguments are its own, and it checks that they fit each other.

    Nothing waits for the GPU. Sums are kept in float32; float32 inputs are multiplied in full precision (no tf32).

    Args:
        query: float32, bfloat16 or float16, any strides.
        key: the same dtype.
        scale: factor on the scores.
        mask: boolean or additive, any strides.
        causal: hide keys that come after the query.
        window: a query sees only its last `window` keys.
        softcap: scores become softcap * tanh(score / softcap), before the mask.
        sinks: keys that count as attention sink.
        documents: number of the document that each key belongs to.
        rows: which query positions to reduce.
        s_aux: one learned sink logit per head.
        features: at most `WIDEST_FEATURES` wide.
        entropy: whether to compute the two entropies.
        distance: whether to compute the two distances.

    Returns:
        As `attention_statistics`, float32.

    Raises:
        ConfigError: `supports` is false.

    Source:
        The online softmax of Milakov & Gimelshein (arXiv:1805.02867) in the blocks of FlashAttention-2
        (arXiv:2307.08691).
    """
    reason = unsupported(query, key, features=features)
    if reason is not None:
        raise ConfigError(f"the Triton kernel {reason}: call attention_statistics, which chooses by itself.")
    start, stop, _ = (rows or slice(None)).indices(query.shape[2])
    lead = start + key.shape[2] - query.shape[2]
    query = query[:, :, start:stop]
    if mask is not None:
        mask = mask[:, :, start:stop].expand(query.shape[0], query.shape[1], -1, -1)
    names = ALWAYS + (ENTROPIES if entropy else ()) + (DISTANCES if distance else ())
    results = {name: query.new_empty(query.shape[:3], dtype=torch.float32) for name in names}
    if features is not None:
        results["rest_features"] = query.new_empty((*query.shape[:3], features.shape[2]), dtype=torch.float32)
    if query.numel():
        sizes = _block_sizes(query, key, mask, features)
        seen = _seen(query, key, mask, documents, lead, causal, window, sizes["BLOCK_ROWS"])
        with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
            triton_kernel.rows_kernel[(seen["blocks"] * query.shape[0] * key.shape[1],)](
                **_with_strides(query=query, key=key, sinks=sinks, features=features, s_aux=s_aux),
                **seen | sizes,
                **dict.fromkeys(ENTROPIES + DISTANCES + ("rest_features",)) | results,
                bounds=None if mask is None and documents is None else _bounds(query.shape[0], seen),
                kv_heads=key.shape[1],
                scale=scale * LOG2_E if softcap is None else scale / softcap,
                softcap=0.0 if softcap is None else softcap * LOG2_E,
                SOFTCAP=softcap is not None,
                SINKS=sinks is not None,
                LEARNED=s_aux is not None,
                ENTROPY=entropy,
                DISTANCE=distance,
                # "ieee" would keep half precision off the tensor cores too, where its products are exact anyway.
                PRECISION="ieee" if query.dtype == torch.float32 else None,
                WIDEN=query.dtype == torch.bfloat16 and not query.is_cuda,  # the interpreter cannot multiply it
                # Fused, a score less the maximum would not be 0 where the score is the maximum.
                enable_fp_fusion=False,
            )
    return AttentionStatistics(**results)


def _block_sizes(query: Tensor, key: Tensor, mask: Tensor | None, features: Tensor | None) -> dict[str, int]:
    """From the tables; fewer rows where there are few queries."""
    width, bytes_each = max(16, triton.next_power_of_2(query.shape[3])), query.element_size()
    rows, keys, warps, stages = BLOCKS[bytes_each, max(width, 64)]
    if features is not None:
        most = BLOCKS_WITH_FEATURES[bytes_each]
        rows, keys, warps, stages = min(rows, most[0]), min(keys, most[1]), most[2], most[3]
    elif mask is not None:
        rows, keys = min(rows, 64), max(16, keys // 2)  # it takes registers, most where its lines are not aligned
    folded = triton.next_power_of_2(query.shape[2] * (query.shape[1] // key.shape[1]))
    return {
        "BLOCK_ROWS": min(rows, max(16, folded)),
        "BLOCK_KEYS": keys,
        "BLOCK_WIDTH": width,
        "BLOCK_FEATURES": max(16, triton.next_power_of_2(0 if features is None else features.shape[2])),
        "WIDTH": query.shape[3],
        "FEATURES": 0 if features is None else features.shape[2],
        "num_warps": warps,
        "num_stages": stages,
    }


def _seen(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    lead: int,
    causal: bool,
    window: int | None,
    block_rows: int,
) -> dict[str, Any]:
    """The arguments of both kernels, about which keys are seen; `lead` is the key position of the first query."""
    group = query.shape[1] // key.shape[1]
    return {
        **_with_strides(mask=mask, documents=documents),
        "queries": query.shape[2],
        "keys": key.shape[2],
        "lead": lead,
        "window": window or 0,
        "mask_groups": 1 if mask is None or mask.stride(1) == 0 else key.shape[1],
        "blocks": triton.cdiv(query.shape[2] * group, block_rows),
        "BLOCK_ROWS": block_rows,
        "GROUP": group,
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "MASK": "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive",
        "DOCUMENTS": documents is not None,
    }


def _bounds(n_rows: int, seen: dict[str, Any]) -> Tensor:
    """First and last + 1 key that each block of rows sees: (rows * mask_groups * blocks, 2), int32."""
    block_rows, group, mask = seen["BLOCK_ROWS"], seen["GROUP"], seen["mask"]
    device = (seen["documents"] if mask is None else mask).device
    bounds = torch.empty((n_rows * seen["mask_groups"] * seen["blocks"], 2), dtype=torch.int32, device=device)
    fold = 1 if mask is None or mask.stride(1) == 0 else group  # heads that share a mask need one line of it
    queries = triton.cdiv(block_rows, group) + (block_rows % group > 0)  # of a block, at most
    lines = triton.next_power_of_2(queries * fold)
    triton_kernel.bounds_kernel[(len(bounds),)](
        **seen,
        bounds=bounds,
        FOLD=fold,
        LINES=lines,
        TILE=max(64, SCANNED // lines),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return bounds


def _with_strides(**tensors: Tensor | None) -> dict[str, Any]:
    """Tensors and their strides as arguments of a kernel; a tensor that is not there has strides of 0."""
    arguments: dict[str, Any] = dict(tensors)
    for name, tensor in tensors.items():
        axes = AXES[name]
        steps = (0,) * len(axes) if tensor is None else tensor.stride()
        arguments |= {f"{name[0]}_{axis}": step for axis, step in zip(axes, steps, strict=True)}
    return arguments
