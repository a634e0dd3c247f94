"""Around the training: signals in; progress, logs, a summary and a plot out.

`metrics.jsonl` has one JSON object a line: first `{"config": {flag: value}}`, then one for each
step, whose keys are the names of the TensorBoard scalars. JSON has no infinity and no NaN: they
are the strings "inf", "-inf" and "nan", which `float` reads.
"""

import json
import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import matplotlib
import tensorboardX
import yaml  # pyrefly: ignore[untyped-import]
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Row = dict[str, Any]


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the current step."""

    signal: int | None = None

    def __enter__(self) -> "StopRequest":
        self.handlers = {s: signal.signal(s, self.handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def handle(self, number: int, frame: Any) -> None:
        self.signal = number
        self.__exit__()  # a second one stops at once

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


class Report:
    """Logs steps as they come; afterwards sums them up.

    Args:
        run_dir: where everything goes but the checkpoints.
        flags: by name; they become `config.yaml`, and the first line of the log.
        start: the step that training continues from; what was logged after it is dropped.
        tokens_per_step: for the throughput.
    """

    def __init__(self, run_dir: Path, flags: Row, start: int, tokens_per_step: int) -> None:
        self.run_dir, self.flags, self.tokens_per_step = run_dir, flags, tokens_per_step
        print(f"run       {run_dir}, " + (f"continued after step {start}" if start else "new"))
        write_atomically(run_dir / "config.yaml", yaml.safe_dump(flags, sort_keys=False))
        path = run_dir / "metrics.jsonl"
        kept = [row for row in read_rows(path) if row["step"] <= start]
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in ({"config": flags}, *kept)]
        write_atomically(path, "".join(lines))
        self.file = path.open("a", encoding="utf-8")
        self.board = tensorboardX.SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=start + 1, write_to_disk=True
        )
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            disable=not sys.stdout.isatty(),
        )
        self.task = self.bar.add_task("compiling", total=flags["steps"], completed=start)

    def __enter__(self) -> "Report":
        self.bar.start()
        self.time = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self.board.close()
        self.file.close()

    def log(self, step: int, scalars: dict[str, jax.Array]) -> None:
        """Waits for the scalars of a step and logs them."""
        values = {name: value.item() for name, value in jax.device_get(scalars).items()}
        now = time.perf_counter()
        values["tokens_per_second"] = self.tokens_per_step / (now - self.time)
        self.time = now
        for name, value in values.items():
            if math.isfinite(value):
                self.board.add_scalar(name, value, step)
        row = {"step": step} | {name: to_json(value) for name, value in values.items()}
        self.file.write(json.dumps(row, allow_nan=False) + "\n")
        self.file.flush()  # a killed run has its log up to the last checkpoint

        line = (
            f"loss {values['loss']:.3f}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"norm {values['zclip/grad_norm']:.3g}  limit {limit(row, self.flags):.3g}  "
            f"spikes {values['zclip/num_fired']}"
        )
        self.bar.update(self.task, completed=step, description=line)
        every, steps = self.flags["log_every"], self.flags["steps"]
        if self.bar.disable and every and (step % every == 0 or step == steps):
            print(f"step {step:{len(str(steps))}}/{steps}  {line}", flush=True)

    def summary(self, corpus: str, unigram_entropy: float, bytes_per_token: float) -> None:
        """Prints what came of the run, and draws `plot.png`, if the log is there."""
        rows = list(read_rows(self.run_dir / "metrics.jsonl"))
        if not rows or "val_loss" not in rows[-1]:
            print(
                f"nothing to sum up: {self.run_dir / 'metrics.jsonl'} doesn't hold the last step", flush=True
            )
            return
        val_loss = float(rows[-1]["val_loss"])
        bits = val_loss / math.log(2) / bytes_per_token
        plot(self.run_dir / "plot.png", rows, self.flags, unigram_entropy)
        speed = statistics.median(row["tokens_per_second"] for row in rows)
        print(f"corpus    {corpus}")
        print(
            f"held-out  {val_loss:.4f} nats/token ({bits:.3f} bits/byte); "
            f"ignoring the context: {unigram_entropy:.4f}"
        )
        print(f"speed     {speed:,.0f} tokens/s (median step)")
        print(f"clipping  {describe_clipping(rows, self.flags)}")
        print(f"plot      {self.run_dir / 'plot.png'}", flush=True)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def delete_run(run_dir: Path) -> None:
    """Deletes what a run keeps in its folder, and nothing else."""
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in ("metrics.jsonl", "plot.png", "config.yaml", "tokenizer.json"):
        (run_dir / name).unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """A process killed while writing leaves the old file, whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of steps in a `metrics.jsonl`, up to a line that was cut short."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                return
            if "step" in row:
                yield row


def to_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def limit(row: Row, flags: Row) -> float:
    """The norm up to which a step is left alone; inf where there is no such limit yet."""
    return min(float(row["zclip/trigger"]), cap(flags))


def cap(flags: Row) -> float:
    limit = flags["max_grad_norm"] if flags["clip"] == "zclip" else None
    return math.inf if limit is None else limit


def describe_clipping(rows: list[Row], flags: Row) -> str:
    fired = [row for row in rows if row["zclip/fired"]]
    over_cap = sum(row["zclip/capped"] and not row["zclip/fired"] for row in rows)
    faulty = rows[-1]["zclip/num_nonfinite"]
    verb = "would be" if flags["clip"] == "none" else "were"
    parts = [f"{len(fired)} of {len(rows)} steps {verb} clipped as spikes"]
    if over_cap:
        parts.append(f"{over_cap} more by the cap of {cap(flags):g}")
    if faulty:
        parts.append(f"{faulty} had no finite norm")
    lines = ["; ".join(parts)]
    for row in fired[:10]:
        norm = row["zclip/grad_norm"]
        allowed = norm * row["zclip/clip_scale"]
        lines.append(f"step {row['step']}: norm {norm:.3g}, allowed {allowed:.3g}")
    if len(fired) > 10:
        lines.append(f"and {len(fired) - 10} more, see metrics.jsonl")
    return "\n          ".join(lines)


def plot(path: Path, rows: list[Row], flags: Row, unigram_entropy: float) -> None:
    """Draws the losses above, and below them the norms with the limits and the clipped steps."""
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    def column(name: str, of: list[Row] = rows) -> list[float]:
        return [float(row[name]) for row in of]

    def finite(values: list[float]) -> list[float]:
        return [value if math.isfinite(value) else math.nan for value in values]

    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 6), layout="constrained", height_ratios=(2, 3)
    )
    steps = column("step")
    held_out = [row for row in rows if "val_loss" in row]
    above.plot(steps, finite(column("loss")), lw=0.8, color="tab:blue", label="training")
    above.plot(
        column("step", held_out),
        finite(column("val_loss", held_out)),
        "o-",
        ms=4,
        lw=1,
        color="black",
        label="held out",
    )
    above.axhline(unigram_entropy, ls=":", color="gray", label="ignoring the context")
    above.set_ylabel("loss [nats per token]")
    above.legend(frameon=False)

    below.plot(steps, finite(column("zclip/grad_norm")), lw=0.8, color="tab:blue", label="norm")
    below.plot(steps, finite(column("zclip/trigger")), lw=1, color="tab:green", label="spike above")
    if math.isfinite(cap(flags)):
        below.axhline(cap(flags), ls="--", lw=1, color="tab:orange", label="cap")
    for name, color, label in (
        ("zclip/capped", "tab:orange", "capped"),
        ("zclip/bound", "tab:red", "spike"),
    ):
        hit = [row for row in rows if row[name]]
        where, norms = column("step", hit), column("zclip/grad_norm", hit)
        allowed = [float(row["zclip/grad_norm"]) * row["zclip/clip_scale"] for row in hit]
        if hit:
            below.vlines(where, allowed, norms, lw=0.6, color=color)
            below.plot(where, norms, "o", ms=4, color=color, label=label)
            below.plot(where, allowed, "_", ms=6, color=color)
    below.set(yscale="log", xlabel="step", ylabel="gradient norm")
    below.legend(frameon=False, ncols=3)
    watched = " (watched only)" if flags["clip"] == "none" else ""
    figure.suptitle(f"{flags['preset']}, clip: {flags['clip']}{watched}", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)
