"""Three training steps with fixed completions; run by one process or by torchrun with two. Writes weights to a file."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny
import torch

torch.set_num_threads(1)


def rollout(prompts, trainer):
    """Completions that depend on the prompt and on the row's number in the global batch alone."""
    first = trainer.accelerator.process_index * len(prompts)
    ids = []
    for row, prompt in enumerate(prompts, start=first):
        draw = torch.Generator().manual_seed(sum(map(ord, prompt)) * 31 + row)
        # Ranks get different lengths, so that padding differs between them
        length = 2 + row
        ids.append([*torch.randint(3, 20, (length,), generator=draw).tolist(), 2])
    return {
        "prompt_ids": [trainer.processing_class(p)["input_ids"] for p in prompts],
        "completion_ids": ids,
        "logprobs": [[-1.0] * len(i) for i in ids],
    }


def reward(completions, completion_ids, **_):
    """None for one row on purpose: one rank has an unscorable response and the other has none."""
    return [None if len(ids) == 5 else sum(ids) % 7 / 7 for ids in completion_ids]


def main():
    folder, processes, *changes = sys.argv[1:]
    settings = dict(item.split("=") for item in changes)
    if "whiten_advantages" in settings:
        settings["whiten_advantages"] = settings["whiten_advantages"] == "1"
    run = tiny.trainer(
        folder,
        rollout_func=rollout,
        reward_funcs=reward,
        max_steps=3,
        num_generations=8,
        per_device_train_batch_size=8 // int(processes),
        max_completion_length=16,
        shuffle_dataset=False,
        **settings,
    )
    run.train()
    model = run.accelerator.unwrap_model(run.model)
    state = {"model": tiny.weights(model), "tokens": run.sampled_tokens, "responses": run.sampled_responses}
    if run.critic is not None:
        state["critic"] = tiny.weights(run.critic)
    torch.save(state, Path(folder) / f"rank{run.accelerator.process_index}.pt")
    if torch.distributed.is_initialized():  # else threads of the group may outlive the interpreter, which then aborts
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
