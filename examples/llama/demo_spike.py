"""Plants a corrupt row and a bad tensor into a run, and checks that its records name both.

    python examples/llama/demo_spike.py

It takes the flags of `train.py`. The exit status is 1 unless the row and the tensor are found.
"""

import json
import sys
from pathlib import Path

from zclip_jax import SpikeRecord
from zclip_jax.monitor import RowReport

import train
from data import load_corpus, train_iterator
from faults import bad_row
from flags import parse_flags

FLAGS = "--run-dir runs/demo-spike --fresh --steps 200 --eval-every 200 --save-every 200"
FLAGS += " --bad-row-steps 160 --bad-tensor-steps 190 --bad-tensor blocks/attention/wk[2] --bad-factor 30"


def main(argv: list[str]) -> int:
    arguments = [*FLAGS.split(), *argv]
    if status := train.main(arguments):
        return status
    config = parse_flags(train.Config(), arguments, None)
    lines = Path(config.run_dir, "spikes.jsonl").read_text().splitlines()
    records = {
        record["step"]: record for record in map(json.loads, reversed(lines)) if record["watch"] == "grads"
    }
    (row_step,), (tensor_step,) = config.faults.bad_row_steps, config.faults.bad_tensor_steps
    planted = row_at(config, row_step)
    print(f"\nplanted   one token again and again for window {planted} of the corpus at step {row_step}")
    factor, name = config.faults.bad_factor, config.faults.bad_tensor
    print(f"          a gradient {factor:g} times too large at step {tensor_step}: {name}")
    for step in (row_step, tensor_step):
        print(
            f"found     {SpikeRecord(records[step])}"
            if step in records
            else f"found     nothing at step {step}"
        )
        rows = RowReport(records[step]["rows"][:2] if step in records else ())
        print("          " + str(rows).replace("\n", "\n          "))
    found_row = row_step in records and records[row_step]["rows"][0]["row_id"] == planted
    found_tensor = tensor_step in records and records[tensor_step]["rise"]["group"] == name
    print(f"the row {'is' if found_row else 'is NOT'} named, the tensor {'is' if found_tensor else 'is NOT'}")
    return 0 if found_row and found_tensor else 1


def row_at(config: train.Config, step: int) -> int:
    """The window of the corpus that is replaced, read off the data."""
    context = train.model_config(config.model, vocab_size=256).context
    corpus = load_corpus(config.data, context=context, cache_dir=config.run_dir)
    batches = train_iterator(corpus, batch_size=config.batch_size, seed=config.seed)
    for _ in range(step - 1):
        next(batches)
    return int(next(batches).row_ids[bad_row(config.seed, step, config.batch_size)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
