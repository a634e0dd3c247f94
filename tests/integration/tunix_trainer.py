"""What must hold of `examples/recipes/tunix_trainer.py`. Run it with `make integration`.

Tunix jits its train step and donates the optimizer: the clipping state survives donation, costs no second
compilation and can be read after training.
"""

import runpy
from pathlib import Path

import jax
import numpy as np

from zclip_jax import metrics

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "tunix_trainer.py"


def main():
    recipe = runpy.run_path(str(RECIPE))
    namespace = recipe["main"].__globals__
    model_input, traces = namespace["model_input"], 0

    def counted(batch):
        nonlocal traces
        traces += 1  # Runs inside the jitted step, so only while that is being traced.
        return model_input(batch)

    namespace["model_input"] = counted
    trainer, steps = recipe["main"](), recipe["STEPS"]

    history = trainer.metrics_logger.get_metric_history
    losses, norms = (history("", name, "train") for name in ("loss", "grad_norm"))
    result = {name: np.asarray(value) for name, value in metrics(trainer.optimizer).items()}
    print(f"jax {jax.__version__}: {len(losses)} steps, train step traced {traces} time(s)")
    print(f"loss {losses[:5].mean():.3f} -> {losses[-5:].mean():.3f}")

    assert len(losses) == result["zclip/num_steps"] == steps
    assert np.isfinite([*losses, *result.values()]).all()
    assert losses[-5:].mean() < losses[:5].mean() - 0.5
    np.testing.assert_allclose(result["zclip/grad_norm"], norms[-1], rtol=1e-5)  # Tunix's own.
    assert traces == 1


if __name__ == "__main__":
    main()
