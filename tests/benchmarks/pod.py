"""What clipping adds to a training step on a TPU pod, read off the compiled program; no TPU is needed.

    python -m tests.benchmarks.pod --size tiny
    python -m tests.benchmarks.pod --size all --markdown
    python -m tests.benchmarks.pod --scaling

The whole step of `examples/llama` (forward, backward, clipping, AdamW, loss, and zclip's metrics) is compiled
ahead of time for a TPU topology, in three ways: without clipping, with optax's `clip_by_global_norm` and with
`zclip`. The programs tell, for each device:

- collectives: an asynchronous one, or one that combines several arrays, counts once. "7 + 8 a layer" are 7 in
  the step and 8 inside the scans over the layers (forward and backward), which run once for each layer.
- payload: bytes of the collectives' results.
- bytes accessed and flops: XLA's cost analysis, which counts one layer of each scan.
- peak memory: of arguments, results and temporary buffers.

It needs the extras `examples` and `tpu-aot`.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# libtpu is only compiled with: it must neither ask what TPU this is nor lock it.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import argparse
import collections
import dataclasses
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

sys.path.append(str(Path(__file__).parents[2] / "examples" / "llama"))

from model import PRESETS, LlamaConfig
from train import AXES, Config, step_functions

NONE, GLOBAL_NORM, ZCLIP = "no clipping", "clip_by_global_norm", "zclip"
CLIPPERS = {NONE: optax.identity(), GLOBAL_NORM: optax.clip_by_global_norm(1.0), ZCLIP: None}


@dataclasses.dataclass(frozen=True)
class Size:
    llama: LlamaConfig
    topology: str
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    batch: int  # sequences, over all devices

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, self.mesh, strict=True))
        return f"{math.prod(self.mesh):,} chips ({self.topology}; {mesh}), batch {self.batch}"


SIZES = {
    "tiny": Size(PRESETS["tiny"], "v5e:4x4", (2, 4, 2), 32),
    "llama-1b": Size(PRESETS["llama-1b"], "v5e:16x16", (2, 64, 2), 256),
    "llama-7b": Size(PRESETS["llama-7b"], "v5p:4x4x8", (2, 32, 2), 128),
    "llama-70b": Size(PRESETS["llama-70b"], "v5p:8x8x16", (2, 64, 8), 128),
    "llama-70b-4096": Size(PRESETS["llama-70b"], "v5p:16x16x16", (8, 64, 8), 512),
}
# The same work for each device: more devices are more replicas (`data`).
WIDER = dataclasses.replace(PRESETS["tiny"], hidden_size=512, ffn_size=1536)
TOPOLOGIES = {8: "2x2x2", 64: "4x4x4", 256: "4x8x8", 1024: "8x8x16", 4096: "16x16x16"}
SCALING = [Size(WIDER, f"v5p:{shape}", (n // 4, 2, 2), batch=n) for n, shape in TOPOLOGIES.items()]


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str
    shapes: tuple[str, ...]  # of its results, such as f32[8,128]
    payload: int  # bytes
    in_scan: bool
    source: str = dataclasses.field(compare=False)  # the JAX operation that it stems from

    def __str__(self) -> str:
        shapes = collections.Counter(self.shapes).items()
        arrays = ", ".join(f"{n} x {shape}" if n > 1 else shape for shape, n in shapes)
        return f"{self.kind} of {arrays}, for {self.source}"


@dataclasses.dataclass(frozen=True)
class Program:
    """What XLA says of a compiled step, per device."""

    collectives: list[Collective]
    bytes_accessed: float
    flops: float
    memory: int
    seconds: float  # to compile it

    def beyond(self, other: "Program") -> list[Collective]:
        """The collectives that `other` has no like of."""
        return list(
            (collections.Counter(self.collectives) - collections.Counter(other.collectives)).elements()
        )


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z-]*)\(")
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)")
SHAPE = re.compile(r"([a-z]+[0-9]*)[a-z0-9]*\[([\d,]*)\]")


def read_collectives(hlo: str) -> list[Collective]:
    """The collectives in the text of a compiled HLO module."""
    callees: dict[str, set[str]] = collections.defaultdict(set)
    scanned: list[str] = []  # computations that a while loop runs
    found = {}
    computation = ""
    for line in hlo.splitlines():
        if match := COMPUTATION.match(line):
            computation = match[1]
        if not (match := INSTRUCTION.match(line)):
            continue
        name, result, operation = match.groups()
        called = CALLED.findall(line)
        callees[computation].update(called)
        if operation == "while":
            scanned += called
        # Of an asynchronous pair -done has the result. XLA also spreads one over several fusions; all parts
        # have the channel in common.
        kind = operation.removesuffix("-done")
        if kind in KINDS:
            channel = re.search(r"channel_id=\d+", line)
            source = re.search(r'op_name="([^"]*)"', line)
            found.setdefault(channel[0] if channel else name, (computation, kind, result, source))

    in_scan: set[str] = set()
    while scanned:
        computation = scanned.pop()
        if computation not in in_scan:
            in_scan.add(computation)
            scanned += callees[computation]

    def collective(computation: str, kind: str, result: str, source: re.Match | None) -> Collective:
        arrays = SHAPE.findall(re.sub(r"\{[^}]*\}", "", result))  # without layouts
        payload = sum(num_bytes(*array) for array in arrays)
        shapes = tuple(sorted(f"{dtype}[{dims}]" for dtype, dims in arrays))
        return Collective(kind, shapes, payload, computation in in_scan, source[1] if source else "?")

    return [collective(*parts) for parts in found.values()]


def num_bytes(dtype: str, dims: str) -> int:
    """Of an HLO array such as bf16[8,128]; at least a byte an entry."""
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return max(bits // 8, 1) * math.prod(int(n) for n in dims.split(",") if n)


def compile_step(size: Size, clipper: optax.GradientTransformation | None) -> Program:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=size.topology).devices
    mesh = Mesh(np.array(devices).reshape(size.mesh), AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def placed(variable: nnx.Variable) -> nnx.Variable:
        spec = PartitionSpec(*variable.get_metadata().get("out_sharding", ()))
        value = variable.get_value()
        return variable.replace(value.update(sharding=NamedSharding(mesh, spec)))

    with jax.set_mesh(mesh):
        init, train_step, _ = step_functions(Config(), size.llama, clipper)
        state = jax.tree.map(placed, jax.eval_shape(init), is_leaf=lambda x: isinstance(x, nnx.Variable))
        split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        tokens = jax.ShapeDtypeStruct((size.batch, size.llama.context + 1), np.int32, sharding=split)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
        start = time.perf_counter()
        compiled: Any = step.lower(state, tokens).compile()  # its analyses may be None elsewhere
        seconds = time.perf_counter() - start

    cost = compiled.cost_analysis()
    return Program(
        collectives=read_collectives(compiled.as_text()),
        bytes_accessed=cost["bytes accessed"],
        flops=cost["flops"],
        memory=compiled.memory_analysis().peak_memory_in_bytes,
        seconds=seconds,
    )


def compile_all(size: Size) -> dict[str, Program]:
    return {way: compile_step(size, clipper) for way, clipper in CLIPPERS.items()}


def print_table(rows: list[list[str]], markdown: bool) -> None:
    """The first row is the head, the first column holds names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if markdown:
        rows = [rows[0], ["-" * widths[0]] + ["-" * (w - 1) + ":" for w in widths[1:]], *rows[1:]]
    for name, *cells in rows:
        line = [name.ljust(widths[0])] + [c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)]
        print("| " + " | ".join(line) + " |" if markdown else "  ".join(line))
    print(flush=True)


def report(name: str, size: Size, markdown: bool) -> None:
    programs = compile_all(size)
    none, other, ours = programs[NONE], programs[GLOBAL_NORM], programs[ZCLIP]
    num = {way: len(program.collectives) for way, program in programs.items()}
    lines = [
        f"collectives with zclip minus without clipping: {num[ZCLIP] - num[NONE]}",
        f"collectives with zclip minus with clip_by_global_norm: {num[ZCLIP] - num[GLOBAL_NORM]}",
        f"bytes accessed: zclip {ours.bytes_accessed / other.bytes_accessed:.3f} of clip_by_global_norm's",
        *(f"only with zclip: {collective}" for collective in ours.beyond(none)),
        *(f"only without clipping: {collective}" for collective in none.beyond(ours)),
    ]
    print(f"### {name} on {size}\n" if markdown else f"{name} on {size}")
    print(*(f"- {line}" if markdown else line for line in lines), "", sep="\n")

    def row(title: str, cell: Callable[[Program], str]) -> list[str]:
        return [title, *map(cell, programs.values())]

    def total(program: Program, number: Callable[[Collective], int]) -> str:
        once = sum(number(c) for c in program.collectives if not c.in_scan)
        return f"{once:,} + {sum(map(number, program.collectives)) - once:,} a layer"

    kinds = [k for k in KINDS if any(c.kind == k for p in programs.values() for c in p.collectives)]
    rows = [
        ["", *programs],
        *(row(kind, lambda p, kind=kind: total(p, lambda c: c.kind == kind)) for kind in kinds),
        row("payload, bytes", lambda p: total(p, lambda c: c.payload)),
        row("bytes accessed, MB", lambda p: f"{p.bytes_accessed / 1e6:,.2f}"),
        row("  more than without, MB", lambda p: f"{(p.bytes_accessed - none.bytes_accessed) / 1e6:,.2f}"),
        row("flops, G", lambda p: f"{p.flops / 1e9:,.3f}"),
        row("peak memory, MB", lambda p: f"{p.memory / 1e6:,.2f}"),
        row("compiled in, s", lambda p: f"{p.seconds:.0f}"),
    ]
    print_table(rows, markdown)


def report_scaling(markdown: bool) -> None:
    ways = (ZCLIP, GLOBAL_NORM)
    rows = [["chips", *(f"{what}, {way}" for what in ("collectives", "bytes accessed") for way in ways)]]
    for size in SCALING:
        programs = compile_all(size)
        none, added = programs[NONE], [programs[way] for way in ways]
        cells = [f"{len(p.collectives) - len(none.collectives):+}" for p in added]
        cells += [f"{p.bytes_accessed - none.bytes_accessed:+,.0f}" for p in added]
        rows.append([f"{math.prod(size.mesh):,} ({size.topology})", *cells])
    print("added for each device to a step without clipping:\n")
    print_table(rows, markdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES, "all"], help="model and topology to compile for")
    parser.add_argument("--scaling", action="store_true", help="compile one step for ever more chips")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    args = parser.parse_args()
    if not args.size and not args.scaling:
        parser.error("give --size or --scaling")
    for name, size in SIZES.items():
        if args.size in (name, "all"):
            report(name, size, args.markdown)
    if args.scaling:
        report_scaling(args.markdown)


if __name__ == "__main__":
    main()
