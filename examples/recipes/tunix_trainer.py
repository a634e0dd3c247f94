"""Tunix's `PeftTrainer` on a tiny llama3: `python examples/recipes/tunix_trainer.py`.

Weights are random, the text is that of Python's help topics.
"""

from pydoc_data.topics import topics

import numpy as np
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

from zclip_jax import metrics, zclip

STEPS, BATCH, LENGTH = 60, 8, 64
SIZES = {"num_layers": 2, "vocab_size": 256, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4}
SIZES |= {"num_kv_heads": 2, "head_dim": 16, "rope_theta": 10_000, "norm_eps": 1e-5}


def tiny_llama() -> Llama3:
    """A byte-level llama3. Tunix starts its MLPs at zero, where they cannot learn, so they start anew."""
    model, init = Llama3(ModelConfig(**SIZES), rngs=nnx.Rngs(0)), nnx.initializers.lecun_normal()
    for number, layer in enumerate(model.layers):
        for proj in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            proj.kernel.set_value(init(nnx.Rngs(number).params(), proj.kernel.shape))
    return model


def batches():
    """Yields random windows of the text, one byte a token."""
    text = np.frombuffer("".join(topics.values()).encode(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = text[rng.integers(0, len(text) - LENGTH, (BATCH, 1)) + np.arange(LENGTH)]
        yield TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))


def model_input(batch: TrainingInput) -> dict:
    positions = utils.build_positions_from_mask(batch.input_mask)
    mask = utils.make_causal_attn_mask(batch.input_mask)
    tokens = {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask}
    return tokens | {"positions": positions, "attention_mask": mask}


def main() -> PeftTrainer:
    # [recipe]
    optimizer = optax.chain(zclip(), optax.adamw(3e-3))
    config = TrainingConfig(eval_every_n_steps=STEPS, max_steps=STEPS)
    trainer = PeftTrainer(tiny_llama(), optimizer, config).with_gen_model_input_fn(model_input)
    trainer.train(batches())
    for name, value in metrics(trainer.optimizer).items():
        print(f"{name:24} {np.asarray(value):.4g}")
    return trainer


if __name__ == "__main__":
    main()
