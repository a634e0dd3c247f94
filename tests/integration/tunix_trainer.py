"""Train a tiny llama3 with tunix's `PeftTrainer` and `zclip()` ahead of AdamW.

The trainer jits its train step and donates the optimizer: this checks that the clipping state
survives donation, costs no second compilation and can be read after training. Weights are random
and the text comes from the standard library. Run it with `make integration`.
"""

from pydoc_data.topics import topics

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

from zclip_jax import metrics, zclip

STEPS, BATCH, LENGTH = 60, 8, 64


def tiny_llama():
    """A two-layer byte-level llama3. Tunix starts its MLPs at zero, where they cannot learn."""
    config = ModelConfig(
        num_layers=2,
        vocab_size=256,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    rngs = nnx.Rngs(0)
    model = Llama3(config, rngs=rngs)
    init = nnx.initializers.lecun_normal()
    for layer in model.layers:
        for proj in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            proj.kernel.set_value(init(rngs.params(), proj.kernel.shape))
    return model


def batches():
    """`STEPS` batches of random windows of the text, one byte per token."""
    text = np.frombuffer("".join(topics.values()).encode(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = rng.integers(0, len(text) - LENGTH, (BATCH, 1))
        tokens = text[starts + np.arange(LENGTH)]
        yield TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))


def main():
    traces = 0

    def model_input(batch):
        nonlocal traces
        traces += 1  # Runs inside the jitted step, so only while that is being traced.
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": utils.build_positions_from_mask(batch.input_mask),
            "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
        }

    optimizer = optax.chain(zclip(), optax.adamw(3e-3))
    config = TrainingConfig(eval_every_n_steps=STEPS, max_steps=STEPS)
    trainer = PeftTrainer(tiny_llama(), optimizer, config).with_gen_model_input_fn(model_input)
    trainer.train(batches())

    history = trainer.metrics_logger.get_metric_history
    losses, norms = (history("", name, "train") for name in ("loss", "grad_norm"))
    result = {name: np.asarray(value) for name, value in metrics(trainer.optimizer).items()}
    print(f"jax {jax.__version__}: {len(losses)} steps, train step traced {traces} time(s)")
    print(f"loss {losses[:5].mean():.3f} -> {losses[-5:].mean():.3f}")
    for name, value in result.items():
        print(f"{name:24} {value:.4g}")

    assert len(losses) == result["zclip/num_steps"] == STEPS
    assert np.isfinite([*losses, *result.values()]).all()
    assert losses[-5:].mean() < losses[:5].mean() - 0.5
    np.testing.assert_allclose(result["zclip/grad_norm"], norms[-1], rtol=1e-5)  # Tunix's own.
    assert traces == 1


if __name__ == "__main__":
    main()
