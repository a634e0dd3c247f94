"""What PyTorch's zclip 1.0.0 costs a step, against the number of parameter tensors: `docs/overhead.md`.

    pip install -e ".[bench-torch]"
    nice -n 10 python tests/benchmarks/torch_overhead.py            # prints the table
    nice -n 10 python tests/benchmarks/torch_overhead.py --write    # and puts it into the docs

`ZClip.step`, `clip_grad_norm_` and AdamW's step, each alone, on gradients that are made before, on the CPU. It needs
neither JAX nor this package. The number of parameters stays the same, so that what grows is the cost of a tensor.
"""

import argparse
import os
import random
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import torch  # pyrefly: ignore[missing-import]
from zclip import ZClip  # pyrefly: ignore[missing-import]

TARGET = Path(__file__).parents[2] / "docs" / "overhead_torch_table.md"
SIZE, TENSORS = 1_000_000, (10, 100, 1000)


def make_model(tensors: int) -> torch.nn.ParameterList:
    """Half matrices, half vectors, with random gradients."""
    torch.manual_seed(0)
    rows = max(1, SIZE // (tensors // 2 * 513))
    shapes = [(rows, 512) if i % 2 == 0 else (rows,) for i in range(tensors)]
    model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes])
    for p in model:
        p.grad = torch.randn_like(p)
    return model


def set_norm(model: torch.nn.ParameterList, norm: float) -> None:
    grads = [p.grad for p in model]
    torch._foreach_mul_(grads, norm / torch.nn.utils.get_total_norm(grads).item())


def measure(tensors: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of a step, the median of each round."""
    model = make_model(tensors)
    parameters = list(model.parameters())
    passing, scaling = ZClip(max_grad_norm=None), ZClip(max_grad_norm=1.0)
    ways = {
        "`ZClip.step`, the gradients pass": lambda: passing.step(model),
        "`ZClip.step`, the cap scales them": lambda: scaling.step(model),
        "`clip_grad_norm_` scales them": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        "`AdamW.step`": torch.optim.AdamW(parameters, lr=3e-4).step,
        "`AdamW.step`, fused": torch.optim.AdamW(parameters, lr=3e-4, fused=True).step,
    }
    times = {name: [] for name in ways}
    warmup = 1 + 25 // steps  # rounds, for ZClip's statistics
    for i in range(warmup + rounds):
        for name in random.Random(i).sample(list(ways), len(ways)):
            taken = []
            for _ in range(steps):
                set_norm(model, 2.0)
                start = time.perf_counter()
                ways[name]()
                taken.append(1e3 * (time.perf_counter() - start))
            if i >= warmup:
                times[name].append(statistics.median(taken))
    return times


def table(rounds: int, steps: int) -> str:
    columns = [measure(tensors, rounds, steps) for tensors in TENSORS]
    lines = [
        "| Milliseconds | " + " | ".join(f"{tensors} tensors" for tensors in TENSORS) + " | a tensor more |",
        "|---|" + "--:|" * (len(TENSORS) + 1),
    ]
    for name in columns[0]:
        quartiles = [statistics.quantiles(times[name], n=4) for times in columns]
        slope = 1e3 * (quartiles[-1][1] - quartiles[0][1]) / (TENSORS[-1] - TENSORS[0])
        cells = [f"{median:.2f} ({low:.2f}-{high:.2f})" for low, median, high in quartiles]
        lines.append(f"| {name} | " + " | ".join([*cells, f"{slope:.1f} µs"]) + " |")
    return "\n".join(
        [
            *lines,
            "",
            f"torch {torch.__version__}, zclip {version('zclip')}, CPU with {os.cpu_count()} cores, "
            f"{torch.get_num_threads()} thread; {SIZE:,} parameters; medians and quartiles of {rounds} rounds "
            f"of {steps} steps.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of all ways")
    parser.add_argument("--steps", type=int, default=5, help="steps of each way in a round")
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name} into the docs")
    args = parser.parse_args()
    torch.set_num_threads(
        1
    )  # a tensor's cost is that of one thread, and threads that wait disturb each other
    text = table(args.rounds, args.steps)
    print(text)
    if args.write:
        TARGET.write_text(text)


if __name__ == "__main__":
    main()
