"""Around the training: signals in; progress, a log, records of spikes, a summary and a plot out.

`metrics.jsonl` has one JSON object a line: first `{"config": {flag: value}}`, then one for each
step, and again for a step that is done again; `spikes.jsonl` has one for each spike.
"""

import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml  # pyrefly: ignore[untyped-import]
from jax.sharding import NamedSharding, PartitionSpec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zclip_jax import step_record
from zclip_jax.monitor import (
    ALARMS,
    JsonLines,
    Monitor,
    RowReport,
    RowTracker,
    Run,
    TensorBoard,
    describe_record,
    plot_runs,
    read_run,
    row_report,
    spike_score,
)

from data import Batch, Corpus

Row = dict[str, Any]
DECISION = ("grad_norm", "fired", "bound", "capped", "clip_scale", "threshold")
WORST = 4  # rows of a batch that the record of a spike holds
TEXT = 300  # characters of the worst one


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
    """Logs steps as they come, with a record of each spike; afterwards sums them up.

    Every process has one and makes the same calls, since all take part in measuring the rows of a
    spike. The first alone prints and writes.

    Args:
        run_dir: where everything goes but the checkpoints.
        flags: by name; they become `config.yaml`, and the first line of the log.
        start: the step that training continues from.
        corpus: what is trained on.
        groups: the names of the tensors that are watched.
        loss_fn: of parameters and tokens, to measure the rows of a spike with.
    """

    def __init__(
        self,
        run_dir: Path,
        flags: Row,
        start: int,
        corpus: Corpus,
        groups: Sequence[str],
        loss_fn: Callable[[Any, jax.Array], jax.Array],
    ) -> None:
        self.run_dir, self.flags, self.corpus, self.groups, self.loss_fn = (
            run_dir,
            flags,
            corpus,
            groups,
            loss_fn,
        )
        self.is_first = jax.process_index() == 0
        sinks = []
        if self.is_first:
            print(f"run       {run_dir}, " + (f"continued after step {start}" if start else "new"))
            write_atomically(run_dir / "config.yaml", yaml.safe_dump(flags, sort_keys=False))
            sinks = [JsonLines(run_dir / "metrics.jsonl", config=flags), TensorBoard(run_dir / "tensorboard")]
        self.spikes = JsonLines(run_dir / "spikes.jsonl")
        alarms = ALARMS if self.is_first else ()
        self.monitor = Monitor(sinks, alarms=alarms, on_row=self.on_row, all_processes=True)
        self.monitor.rewind(start)
        self.tracker, self.reports_left = RowTracker(), flags["row_reports"]
        self.tokens_per_step = flags["batch_size"] * (corpus.train.shape[1] - 1)
        self.ended: list[float] = []  # when the last two steps did
        self.speeds: list[float] = []
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            disable=not self.is_first or not sys.stdout.isatty(),
        )
        self.task = self.bar.add_task("compiling", total=flags["steps"], completed=start)

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.monitor.close()
        self.spikes.close()
        self.bar.stop()

    def log(self, step: int, scalars: Row, batch: Batch, tokens: jax.Array, params: Any) -> None:
        """Logs a step that was just started, and what the one before it gave, for which this waits.

        `tokens` is the batch that it trains on, `params` what it leaves.
        """
        self.params, self.params_step = params, step
        speed = {}
        if len(self.ended) == 2:
            speed["tokens_per_second"] = self.tokens_per_step / (self.ended[1] - self.ended[0])
            self.speeds.append(speed["tokens_per_second"])
        update = self.monitor.log(step, scalars, **speed)  # calls on_row for the step before
        self.tracker.add(update, batch.data_index, batch.row_ids)
        self.tokens = tokens

    def on_row(self, row: Row) -> None:
        """Takes what a step gave, once it is there."""
        self.ended = [*self.ended[-1:], time.perf_counter()]
        found = [record for what in ("grads", "updates") if (record := step_record(row, self.groups, what))]
        more = self.describe(row) if found else {}
        if not self.is_first:
            return
        for record in found:
            self.spikes.log_row(record | more)
        line = (
            f"loss {row['loss']:.3f}  {row.get('tokens_per_second', math.nan):,.0f} tokens/s  "
            f"norm {row['zclip/grad_norm']:.3g}  limit {limit(row, self.flags):.3g}  "
            f"spikes {row['zclip/num_fired']}"
        )
        step, every, steps = row["step"], self.flags["log_every"], self.flags["steps"]
        self.bar.update(self.task, completed=step, description=line)
        if self.bar.disable and every and (step % every == 0 or step == steps):
            print(f"step {step:{len(str(steps))}}/{steps}  {line}", flush=True)

    def describe(self, row: Row) -> Row:
        """Of a step that was a spike: its data, what clipping did, and its worst rows.

        By now the parameters are those after a later step, and so are the rows' losses.
        """
        seen = self.tracker.find(row["update"])
        assert seen is not None
        rows, text = RowReport(), None
        if self.reports_left:
            self.reports_left -= 1
            rows = row_report(self.loss_fn, self.params, self.tokens, row_ids=seen.row_ids)
            sharding: Any = self.tokens.sharding
            whole = jax.device_put(self.tokens, NamedSharding(sharding.mesh, PartitionSpec()))
            text = self.corpus.decode(np.asarray(whole)[rows[0]["position"]])[:TEXT]
        return {
            "update": row["update"],
            "attempt": row["attempt"],
            "data_index": seen.data_index,
            "row_ids": seen.row_ids,
            "decision": {name: row[f"zclip/{name}"] for name in DECISION},
            "rows": rows[:WORST],
            "rows_params_step": self.params_step,
            "text": text,
        }

    def summary(self) -> None:
        """Prints what came of the run, and draws `plot.png`, if the log is there."""
        try:
            run = read_run(self.run_dir)
        except (OSError, ValueError):
            run = None
        if run is None or not np.isfinite(run.columns["val_loss"][-1]):
            print(
                f"nothing to sum up: {self.run_dir / 'metrics.jsonl'} doesn't hold the last step", flush=True
            )
            return
        corpus, val_loss = self.corpus, run.columns["val_loss"][-1]
        bits = val_loss / math.log(2) / corpus.bytes_per_token
        plot_runs(self.run_dir / "plot.png", [run])
        print(f"corpus    {corpus.name}")
        print(
            f"held-out  {val_loss:.4f} nats/token ({bits:.3f} bits/byte); "
            f"ignoring the context: {corpus.unigram_entropy:.4f}"
        )
        if self.speeds:
            print(f"speed     {statistics.median(self.speeds):,.0f} tokens/s (median step)")
        print(f"clipping  {describe_clipping(run, self.flags)}")
        print(f"score     {describe_score(run)}")
        print(f"spikes    {describe_spikes(run)}")
        print(f"plot      {self.run_dir / 'plot.png'}", flush=True)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def delete_run(run_dir: Path) -> None:
    """Deletes what a run keeps in its folder, and nothing else."""
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in (
        "metrics.jsonl",
        "spikes.jsonl",
        "alarms.jsonl",
        "plot.png",
        "config.yaml",
        "tokenizer.json",
    ):
        (run_dir / name).unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """A process killed while writing leaves the old file, whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def describe_score(run: Run) -> str:
    score = spike_score(run.columns["loss"], run.columns["grad_norm"])
    if score.total is None:
        return "no SpikeScore of less than 128 steps"
    last = "" if score.last is None else f", {score.last:.2%} of the last 10,000"
    return f"{score.total:.2%} of the steps spike in loss or norm{last} (SpikeScore as OLMo-core counts it)"


def describe_spikes(run: Run) -> str:
    """How many the gradients had, and everything about the one that was highest above its level."""
    records = [record for record in run.current_records() if record["watch"] == "grads"]
    if not records:
        return "none recorded"
    worst = max(records, key=lambda record: float(record["times_level"] or 0.0))
    lines = [f"{len(records)} recorded in spikes.jsonl; the largest:", *describe_record(worst).splitlines()]
    return "\n          ".join(lines)


def limit(row: Row, flags: Row) -> float:
    """The norm up to which a step is left alone; inf where there is no such limit yet."""
    return min(float(row["zclip/trigger"]), cap(flags))


def cap(flags: Row) -> float:
    limit = flags["max_grad_norm"] if flags["clip"] in ("zclip", "levelclip") else None
    return math.inf if limit is None else limit


def describe_clipping(run: Run, flags: Row) -> str:
    columns = run.columns
    fired = np.flatnonzero(columns["fired"])
    over_cap = np.sum((columns["capped"] > 0) & (columns["fired"] == 0))
    faulty = int(np.nansum(columns["nonfinite"]))
    verb = "would be" if flags["clip"] == "none" else "were"
    parts = [f"{len(fired)} of {len(columns['step'])} steps {verb} clipped as spikes"]
    if over_cap:
        parts.append(f"{over_cap} more by the cap of {cap(flags):g}")
    if faulty:
        parts.append(f"{faulty} had no finite norm")
    lines = ["; ".join(parts)]
    for step, norm, allowed in zip(
        columns["step"][fired[:10]], columns["grad_norm"][fired[:10]], run.allowed[fired[:10]], strict=True
    ):
        lines.append(f"step {step:.0f}: norm {norm:.3g}, allowed {allowed:.3g}")
    if len(fired) > 10:
        lines.append(f"and {len(fired) - 10} more, see metrics.jsonl")
    return "\n          ".join(lines)
