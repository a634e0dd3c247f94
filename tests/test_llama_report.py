"""What the example says of a run afterwards, from the rows of its log."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from zclip_jax._json import finite_json

report = importlib.import_module("report")

FLAGS = {"clip": "zclip", "preset": "tiny", "max_grad_norm": 1.0}


def row(step: int, trigger: float, norm: float = 0.5, **more: Any) -> dict[str, Any]:
    scale = min(1.0, trigger / norm, 1.0 / norm)
    values = {"grad_norm": norm, "trigger": trigger, "clip_scale": scale, "num_nonfinite": 0}
    values |= {"fired": norm > trigger, "bound": norm > trigger, "capped": norm > 1.0}
    logged = {f"zclip/{name}": finite_json(value) for name, value in values.items()}
    return {"step": step, "loss": 2.0, "tokens_per_second": 9.0} | logged | more


@pytest.mark.parametrize(
    ("trigger", "flags", "limit"),
    [
        (math.inf, FLAGS, 1.0),  # in the warm-up
        (0.7, FLAGS, 0.7),
        (1.7, FLAGS, 1.0),
        (1.7, FLAGS | {"max_grad_norm": None}, 1.7),
        (1.7, FLAGS | {"clip": "none"}, 1.7),
        (2.0, FLAGS | {"clip": "fixed", "max_grad_norm": 2.0}, 2.0),
    ],
)
def test_the_limit_of_a_step(trigger: float, flags: dict[str, Any], limit: float) -> None:
    assert report.limit(row(1, trigger), flags) == limit


@pytest.mark.parametrize(
    "rows", [None, [], [row(1, math.inf)], [row(1, math.inf, val_loss=1.0), row(2, 0.8)]]
)
def test_a_finished_run_without_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]] | None
) -> None:
    """Nothing to sum up is said, and no error: the checkpoints are whole."""
    finished = report.Report.__new__(report.Report)
    finished.run_dir, finished.flags = tmp_path, FLAGS
    if rows is not None:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    finished.summary()
    assert capsys.readouterr().out == (
        f"nothing to sum up: {tmp_path / 'metrics.jsonl'} doesn't hold the last step\n"
    )
    assert not (tmp_path / "plot.png").exists()
