"""Each file of `examples/recipes`: it runs, is short, and calls the one bad batch a spike."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
RUN_HERE = sorted(
    path.stem for path in RECIPES.glob("*.py") if path.stem != "tunix_trainer"
)  # `make integration`


@pytest.mark.parametrize("name", RUN_HERE)
def test_only_the_bad_batch_is_a_spike(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = runpy.run_path(str(RECIPES / f"{name}.py"))
    bad = recipe["BAD_STEP"]
    assert recipe["main"]() == [bad]

    spike, end = capsys.readouterr().out.splitlines()
    assert spike.startswith(f"step {bad}: norm ")
    norm, scale = float(spike.split()[3].rstrip(",")), float(spike.split()[-1])
    assert norm > 100
    assert norm * scale < 1.05  # printed with two digits; the cap is 1
    # The noise of the labels alone is 0.25. Had the bad batch moved the weights, this would be far above.
    assert float(end.split()[1]) < 0.5


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_is_read_at_one_glance(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert text.count("# [recipe]\n") == 1  # where the documentation's part starts
    assert f"`python examples/recipes/{path.name}`" in text
