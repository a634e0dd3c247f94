"""What monitoring costs a training step of the LLaMA example: paired wall-clock ratios, and CPU time on the host.

    python -m tests.benchmarks.monitoring
    python -m tests.benchmarks.monitoring --size 50m --batch 4 --rounds 5 --steps 2

"none" is the example's step with zclip and AdamW, of which nothing is fetched or logged. "watch" has `watch("grads")`
and `watch("updates")`, layer by layer, in its chain as well. "full" also fetches all metrics one step behind, looks
for alarms, keeps the rows of each update and writes JSON lines and TensorBoard files. Each takes some steps in every
round, in a shuffled order; "time" is the median over rounds of the time over that of "none" in the same round, with
quartiles. "host" is the CPU time that the thread which trains spends in the monitor, a step.
"""

import argparse
import dataclasses
import importlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zclip_jax import group_names, step_record
from zclip_jax.monitor import JsonLines, Monitor, RowTracker, TensorBoard

sys.path.append(str(Path(__file__).parents[2] / "examples" / "llama"))
train = importlib.import_module("train")
faults = importlib.import_module("faults")
model = importlib.import_module("model")

SIZES = {
    "tiny": model.PRESETS["tiny"],
    "50m": dataclasses.replace(
        model.PRESETS["tiny"], hidden_size=640, ffn_size=1728, num_layers=10, num_heads=10, num_kv_heads=10
    ),
}


class Way:
    """A way of training, with a state of its own."""

    def __init__(self, llama: Any, watched: bool, folder: str | None) -> None:
        config = train.Config(steps=10_000)
        clipper = None if watched else train.make_clipper(config.clip)
        init, step, _ = train.step_functions(config, llama, clipper)
        self.state, self.step = jax.jit(init)(), jax.jit(step, donate_argnums=0)
        self.count, self.host, self.tracker = 0, [], RowTracker()
        self.monitor = None
        if folder is not None:
            self.monitor = Monitor(
                [JsonLines(Path(folder, "metrics.jsonl")), TensorBoard(folder)], on_row=self.on_row
            )
            self.groups = group_names(self.state["model"], stacked=faults.is_stacked)

    def on_row(self, row: dict[str, Any]) -> None:
        for what in ("grads", "updates"):
            step_record(row, self.groups, what)

    def run(self, batches: list[jax.Array]) -> float:
        start = time.perf_counter()
        for tokens in batches:
            self.count += 1
            self.state, scalars = self.step(self.state, tokens)
            if self.monitor:
                before = time.thread_time()
                update = self.monitor.log(self.count, scalars)
                self.tracker.add(update, self.count, np.arange(len(tokens)))
                self.host.append(time.thread_time() - before)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of all ways")
    parser.add_argument("--steps", type=int, default=5, help="steps a way and round")
    args = parser.parse_args()

    llama = SIZES[args.size]
    rng = np.random.default_rng(0)
    rows = rng.integers(64, size=(args.steps, args.batch, llama.context + 1), dtype=np.int32)
    batches = [jax.device_put(x) for x in rows]
    times: dict[str, list[float]] = {}
    with jax.set_mesh(train.make_mesh("fsdp=1")), tempfile.TemporaryDirectory() as folder:
        ways = {
            "none": Way(llama, False, None),
            "watch": Way(llama, True, None),
            "full": Way(llama, True, folder),
        }
        parameters = model.num_params(ways["none"].state["model"])
        for i in range(args.rounds + 1):
            for name in random.Random(i).sample(list(ways), len(ways)):
                taken = ways[name].run(batches)
                if i > 0:  # the first round compiles
                    times.setdefault(name, []).append(taken)
        monitor = ways["full"].monitor
        assert monitor is not None
        monitor.close()
        lost = monitor.lost

    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {parameters:,} parameters, batch of {args.batch}, "
        f"{args.rounds} rounds of {args.steps} steps, lost {lost or 'nothing'}"
    )
    print(f"{'':8} {'time':>7} {'quartiles':>15} {'ms/step':>9} {'host, ms/step':>14}")
    for name, way in ways.items():
        ratios = [a / b for a, b in zip(times[name], times["none"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        ms = 1e3 * statistics.median(times[name]) / args.steps
        host = f"{1e3 * statistics.median(way.host):14.2f}" if way.host else ""
        print(f"{name:8} {median:7.3f} {low:7.3f}-{high:.3f} {ms:9.1f} {host}")


if __name__ == "__main__":
    main()
