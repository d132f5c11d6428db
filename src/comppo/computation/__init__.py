"""Reading what a model computed: attention statistics, hidden states, scores. Needs no trainer, and loads Transformers
only when a model is read."""

from comppo.computation.reader import ComputationReader
from comppo.computation.reading import STATISTICS, Computation, evaluation_mode, read_computation
from comppo.computation.scoring import score_plainly, token_scores
from comppo.computation.statistics import AttentionStatistics, attention_statistics
from comppo.computation.summaries import ATTENTION_STATISTICS, TOKEN_STATISTICS, concentration
from comppo.computation.support import readable_layers, require_readable

__all__ = [
    "ATTENTION_STATISTICS",
    "STATISTICS",
    "TOKEN_STATISTICS",
    "AttentionStatistics",
    "Computation",
    "ComputationReader",
    "attention_statistics",
    "concentration",
    "evaluation_mode",
    "read_computation",
    "readable_layers",
    "require_readable",
    "score_plainly",
    "token_scores",
]
