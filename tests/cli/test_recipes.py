"""Every shipped recipe names fields that exist and settings that CompPOConfig accepts."""

from pathlib import Path

import pytest

from comppo.cli.train import parse

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(recipe, tmp_path):
    # No GPU here: bf16 is TRL's default and needs one
    script, args, model = parse(
        ["--config", str(recipe), "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    )
    assert script.task
    assert model.model_name_or_path
    assert args.operator == "comp_gae"
    assert args.generation_batch_size % args.num_generations == 0


def test_there_are_recipes():
    assert {path.stem for path in RECIPES} >= {"chain", "reasoning_gym", "math_verify", "own_data"}
