"""One of two gloo processes: whitens its own rows and saves them. Started by test_whiten.py."""

import sys

import torch

torch.set_num_threads(1)

from comppo.update.whiten import distributed_sum, masked_whiten  # noqa: E402

rank, store, inputs, output = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
x, mask = torch.load(inputs)
mine = slice(0, 1) if rank == 0 else slice(1, None)
before = torch.tensor([1.0 + rank])
total = distributed_sum(before)
whitened = masked_whiten(x[mine], mask[mine], all_reduce=distributed_sum)
torch.save((whitened, total, before), output)
torch.distributed.destroy_process_group()
