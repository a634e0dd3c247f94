"""Several processes as one run: how they find each other, what each loads, and what they agree on.

A process that fails or stops alone leaves the others waiting for it in their next collective. So
what may fail in one of them is done `together`, and a request to stop is put to a `Vote`. With one
process all of this does nothing.
"""

import contextlib
import dataclasses
import json
import math
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Generator
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Several processes as one run; all other flags are the same in each of them."""

    # Join others: if flags, JAX_COORDINATOR_ADDRESS or a launcher such as SLURM tell of them; always; never.
    distributed: Literal["auto", "on", "off"] = "auto"
    coordinator: str | None = None  # host:port at which process 0 listens, as others reach it.
    num_processes: int | None = None  # Processes in all; JAX_NUM_PROCESSES does the same.
    process_id: int | None = None  # Which of them this one is, from 0; JAX_PROCESS_ID does the same.


class ElsewhereError(Exception):
    """Another process failed, and says why."""


def join(options: HostOptions, detect: bool) -> None:
    """Joins the other processes, if any; nothing may have used a device before.

    Where the options leave it open, `detect` says whether to ask the environment.

    Raises:
        ValueError: what is known of the other processes is incomplete, or they cannot be reached.
    """
    coordinator, count, index = options.coordinator, options.num_processes, options.process_id
    asked = options.distributed == "on" or (coordinator, count, index) != (None, None, None)
    if options.distributed == "off" or not (asked or detect):
        return
    count = _from_environment("JAX_NUM_PROCESSES") if count is None else count
    index = _from_environment("JAX_PROCESS_ID") if index is None else index
    if coordinator is not None and not coordinator.rpartition(":")[2].isdecimal():
        raise ValueError(f"coordinator {coordinator!r} is not like host:1234")
    # JAX would keep a SIGTERM from ending the process, which here only the training does.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, count, index)
    except (ValueError, RuntimeError) as error:
        if not asked and "coordinator_address should be defined" in str(error):
            return  # nothing says that there are others
        raise ValueError(
            f"cannot join other processes: {' '.join(str(error).split())} (--coordinator, "
            "--num-processes and --process-id tell of them, --distributed off starts without)"
        ) from error


def _from_environment(name: str) -> int | None:
    value = os.environ.get(name)
    if value is not None and not value.isdecimal():
        raise ValueError(f"{name} must be a number, got {value!r}")
    return None if value is None else int(value)


@contextlib.contextmanager
def together() -> Generator[None]:
    """What every process does, or none: all wait for all, and where one fails, all do.

    Raises:
        ValueError, OSError: as they were raised, in the first of the processes where one was.
        ElsewhereError: in the others.
    """
    failure = None
    try:
        yield
    except (ValueError, OSError) as error:
        failure = error
    if jax.distributed.is_initialized():
        failed = multihost_utils.process_allgather(np.int32(failure is not None))
        if failed.any() and np.argmax(failed) != jax.process_index():
            raise ElsewhereError from failure
    if failure:
        raise failure


def first_one(function: Callable[[], T]) -> T:
    """What `function` returns; process 0 calls it before the others, which may use what it left."""
    with together():
        result = function() if jax.process_index() == 0 else None
    with together():
        return function() if result is None else result


def check_same(values: dict[str, Any]) -> None:
    """Raises ValueError where a value, which JSON can hold, is not the same in every process."""
    if jax.process_count() > 1:
        sums = np.array([zlib.crc32(json.dumps(value).encode()) for value in values.values()], np.uint32)
        differ = np.ptp(multihost_utils.process_allgather(sums), axis=0)
        with together():
            if differ.any():
                names = [name for name, differs in zip(values, differ, strict=True) if differs]
                raise ValueError(f"the processes differ in {', '.join(names)}")


def make_mesh(spec: str) -> Mesh:
    sizes = {"fsdp": jax.device_count()} if not spec else {}
    for part in spec.split(",") if spec else ():
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh {spec!r} is not like data=2,fsdp=2,tensor=2")
        sizes[axis] = int(size)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    needed, found = math.prod(shape), jax.device_count()
    if needed > found or (needed < found and jax.process_count() > 1):
        raise ValueError(f"mesh {spec!r} needs {needed} devices, there are {found}")
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=jax.devices()[:needed])


def share(mesh: Mesh, batch_size: int, passes: int) -> tuple[int, int]:
    """Which part of a batch's rows the devices of this process hold, and of how many parts.

    Processes that differ only along `tensor` hold the same part.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % (passes * ways):
        raise ValueError(
            f"batch_size {batch_size} does not divide into {passes} passes over {ways} devices (data x fsdp)"
        )
    held: dict[int, frozenset[int]] = {}  # by process: where the rows of its devices start
    rows = NamedSharding(mesh, PartitionSpec(AXES[:2])).devices_indices_map((batch_size,))
    for device, (own,) in rows.items():
        held[device.process_index] = held.get(device.process_index, frozenset()) | {own.start or 0}
    parts = sorted(set(held.values()), key=min)
    if any(len(part) != ways / len(parts) for part in parts) or len(frozenset.union(*parts)) != ways:
        raise ValueError(f"mesh {dict(mesh.shape)}: the parts of a batch overlap between processes")
    return parts.index(held[jax.process_index()]), len(parts)


class Vote:
    """Asks each process for a number, and tells all of them the greatest.

    What is told is of the call before, which the devices have worked off by now: the answer comes a
    step late, and no device waits for a host. With one process it is the number of this call.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.max = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self.before = None

    def __call__(self, number: int) -> int:
        if jax.process_count() == 1:
            return number
        numbers = np.full(jax.local_device_count(), number, np.int32)
        before = self.before
        self.before = self.max(jax.make_array_from_process_local_data(self.split, numbers))
        return 0 if before is None else int(before)


@contextlib.contextmanager
def exit_at_once() -> Generator[None]:
    """With other processes, ends this one at once on an exception that they do not have.

    To leave in order is to wait for the others, which wait for this one.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) or not jax.distributed.is_initialized():
            raise
        if not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
