"""One of two gloo processes: fits on its own rows and saves the critic. Started by test_fit.py."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))

from fit_task import fitted, parameters, task  # noqa: E402

from comppo.update.whiten import distributed_sum  # noqa: E402

rank, store, output = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
inputs, returns = task(0)
results = []
# An uneven split; a process with masked rows alone; a process without rows.
for cut in (5, 15, 16):
    mine = slice(0, cut) if rank == 0 else slice(cut, None)
    critic, report = fitted(inputs.rows(mine), returns[mine], micro_batch_size=3, all_reduce=distributed_sum)
    results.append((parameters(critic), report.loss_after, report.explained_variance, report.grad_norm))
broken = returns.clone()
broken[0][inputs.mask[0]] = float("nan")  # rank 0 alone sees it, both must skip
mine = slice(0, 5) if rank == 0 else slice(5, None)
_, report = fitted(inputs.rows(mine), broken[mine], all_reduce=distributed_sum)
torch.save((results, report.skip_reason), output)
torch.distributed.destroy_process_group()
