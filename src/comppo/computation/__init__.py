"""Reading what a model computed: attention statistics, hidden states, scores. Needs no trainer, and loads Transformers
only when a model is read."""

from comppo.computation.attention_rows import AttentionStatistics
from comppo.computation.reader import ComputationReader, emitting_positions
from comppo.computation.reading import STATISTICS, Computation, evaluation_mode, read_computation
from comppo.computation.router import ROUTER_STATISTICS
from comppo.computation.scoring import score_plainly, token_scores
from comppo.computation.statistics import attention_statistics
from comppo.computation.summaries import (
    ATTENTION_STATISTICS,
    DEFAULT_STATISTIC,
    DIFFUSE_STATISTICS,
    TOKEN_STATISTICS,
    AttentionStatistic,
    concentration,
)
from comppo.computation.support import DEFAULT_LAYERS, LAYER_NAMES, readable_layers, require_readable
from comppo.computation.user_statistics import load_statistic

__all__ = [
    "ATTENTION_STATISTICS",
    "DEFAULT_LAYERS",
    "DEFAULT_STATISTIC",
    "DIFFUSE_STATISTICS",
    "LAYER_NAMES",
    "ROUTER_STATISTICS",
    "STATISTICS",
    "TOKEN_STATISTICS",
    "AttentionStatistic",
    "AttentionStatistics",
    "Computation",
    "ComputationReader",
    "attention_statistics",
    "concentration",
    "emitting_positions",
    "evaluation_mode",
    "load_statistic",
    "read_computation",
    "readable_layers",
    "require_readable",
    "score_plainly",
    "token_scores",
]
