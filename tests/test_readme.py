"""What the README shows is what runs."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tensor_example_runs_and_gives_what_it_says():
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.S) if "comp_gae" in code]
    names: dict = {}
    exec(block, names)  # our own page
    credit = names["credit"]
    # By hand: delta_3 = 1 - .9 = .1; delta_1 = .9 * .9 - .6 = .21; delta_0 = .6 - .5 = .1
    expected = torch.tensor([[0.1 + 0.95 * (0.21 + 0.95 * 0.9 * 0.1), 0.21 + 0.95 * 0.9 * 0.1, 0.0, 0.1]])
    torch.testing.assert_close(credit.advantages, expected)


def test_every_file_the_readme_points_to_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_drop_in_example_takes_arguments_that_exist():
    import inspect

    from comppo import CompPOTrainer

    (block,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.S) if "CompPOTrainer(" in code]
    call = block[block.index("trainer = CompPOTrainer(") :]
    given = re.findall(r"^    (\w+)=", call, re.M)
    assert given
    assert set(given) <= set(inspect.signature(CompPOTrainer).parameters)
    compile(block, "README.md", "exec")
