"""Which rows were in the batch of an update, and what each of them did to its gradient."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zclip_jax._json import finite_json
from zclip_jax._norm import global_norm, is_gradient, reshard
from zclip_jax._typing import PyTree

SHOWN = 5  # rows that the text of a report has


class Rows(NamedTuple):
    """What one update was made of.

    Attributes:
      update: its number.
      data_index: where in the stream of batches its batch stands.
      row_ids: of the rows of the batch, in their order.
    """

    update: int
    data_index: Any
    row_ids: Sequence[Any]


class RowTracker:
    """Remembers, on the host, which rows the last updates were made of.

    A spike is read off the device a step late or later; this is what then names its rows. Under several processes
    each of them may keep the rows of the whole batch, or its own. After a resume it begins empty.

    Args:
      capacity: the number of updates to keep; the oldest are forgotten first.

    Raises:
      ValueError: `capacity` is no positive int.

    Examples:
      >>> from zclip_jax.monitor import RowTracker
      >>> tracker = RowTracker(capacity=2)
      >>> for update in range(1, 4):
      ...     tracker.add(update, data_index=update - 1, row_ids=[10 * update, 10 * update + 1])
      >>> tracker.find(3)
      Rows(update=3, data_index=2, row_ids=[30, 31])
      >>> tracker.find(1) is None
      True
    """

    def __init__(self, capacity: Any = 1000) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity must be a positive int, got {capacity!r}")
        self.capacity = capacity
        self._rows: dict[int, Rows] = {}

    def add(self, update: int, data_index: Any, row_ids: Any) -> None:
        """Keeps the rows of an update, in place of what was kept for one of the same number.

        Args:
          update: the number of the update, as the log has it.
          data_index: where in the stream of batches this batch stands; anything that JSON can hold.
          row_ids: a sequence or a NumPy array of ids, one for each row; with several batches an update, those of all.
        """
        # A copy, since a loader may fill the same array again.
        ids = np.array(row_ids).tolist() if isinstance(row_ids, np.ndarray) else list(row_ids)
        self._rows.pop(update, None)
        self._rows[update] = Rows(update, data_index, ids)
        if len(self._rows) > self.capacity:
            del self._rows[next(iter(self._rows))]

    def find(self, update: int) -> Rows | None:
        """The rows of an update; None where it was never added, or is forgotten."""
        return self._rows.get(update)


class RowReport(list[dict[str, Any]]):
    """The rows of a batch as dicts, the worst first; ready for JSON, and readable as text.

    Rows whose loss or gradient is not finite come first, in the order of the batch; then the rest, by the norm of
    their gradient. Each has `"row_id"`, `"position"` in the batch, `"loss"`, `"norm"` of the gradient of that loss
    and `"share"`: its squared norm over the sum of those of all finite rows. Numbers that JSON lacks are the strings
    `"nan"`, `"inf"` and `"-inf"`, which `float` reads.
    """

    def __str__(self) -> str:
        lines = []
        for row in self[:SHOWN]:
            loss, norm, share = (float(row[name]) for name in ("loss", "norm", "share"))
            part = "not finite" if math.isnan(share) else f"{100 * share:.3g} % of the squared norms"
            lines.append(f"row {row['row_id']}: loss {loss:.4g}, gradient norm {norm:.4g}, {part}")
        if len(self) > SHOWN:
            lines.append(f"and {len(self) - SHOWN} more")
        return "\n".join(lines)


def row_report(
    loss_fn: Callable[[Any, Any], Any],
    params: PyTree,
    batch: PyTree,
    *,
    chunk_size: Any = 1,
    row_ids: Any = None,
) -> RowReport:
    """The loss and the gradient norm of each row of a batch, ranked: which row made the spike?

    For use after a spike, not on every step: it costs a backward pass for each row, and waits for the device. In
    memory it needs `chunk_size` gradients and the activations of as many rows, however large the batch.

    Arrays may be global ones on a mesh; then each process must make the same call, and gets the same report. Where
    the batch is split over n devices, `loss_fn` gets n copies of a row at a time, one for each of them, so that what
    it says of the layout of a batch still holds: it must average over rows, not sum.

    Args:
      loss_fn: as in training, `loss_fn(params, batch)`: a scalar, or a tuple that begins with one. It is called
        with a batch of one row, the axis of rows kept, and is traced once for each function and shape: pass
        the same function again, not a new lambda.
      params: what to differentiate by; leaves that are no floats are passed on as they are.
      batch: any pytree of arrays whose first axis is that of the rows.
      chunk_size: the number of rows whose gradients are computed at a time, by `vmap`: more are faster and need
        as many times the memory.
      row_ids: a sequence or a NumPy array of the names of the rows, in their order; positions unless given.

    Raises:
      ValueError: `chunk_size` is no positive int, the leaves of `batch` have no common first axis, `row_ids` are not
        as many, `loss_fn` returns no scalar, or `params` are spread over processes and `batch` is not.

    Examples:
      >>> import jax.numpy as jnp
      >>> from zclip_jax.monitor import row_report
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
      >>> batch = {"x": jnp.ones((4, 2)), "y": jnp.asarray([1.0, 2.0, 90.0, 3.0])}
      >>> report = row_report(loss_fn, jnp.ones(2), batch, row_ids=[17, 4, 8, 21])
      >>> print(report)
      row 8: loss 7744, gradient norm 248.9, 100 % of the squared norms
      row 17: loss 1, gradient norm 2.828, 0.0129 % of the squared norms
      row 21: loss 1, gradient norm 2.828, 0.0129 % of the squared norms
      row 4: loss 0, gradient norm 0, 0 % of the squared norms
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive int, got {chunk_size!r}")
    num_rows = _num_rows(batch)
    ids = list(range(num_rows)) if row_ids is None else np.asarray(row_ids, object).tolist()
    if len(ids) != num_rows:
        raise ValueError(
            f"row_ids must have one id for each of the {num_rows} rows of the batch, got {len(ids)}"
        )
    _check_processes(params, batch)
    layouts = tuple(_layout(x) for x in jax.tree.leaves(batch))
    # Each device gets the few bytes of all rows, since all compute the same row at a time.
    whole = jax.tree.map(_whole, batch)
    mesh = next((sharding.mesh for sharding in map(_layout, jax.tree.leaves(params)) if sharding), None)
    mesh = next((sharding.mesh for sharding in layouts if sharding), mesh)
    measured = measure(params, whole, loss_fn, chunk_size, layouts, mesh)
    losses, norms = (np.asarray(x, np.float64) for x in jax.device_get(measured))
    return _ranked(ids, losses, norms)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def measure(params, batch, loss_fn, chunk_size, layouts, mesh):
    """The losses and gradient norms of the rows of a batch that each device holds whole.

    `layouts` are the shardings of the leaves of the batch in training, None for those without; `mesh` is None or that
    of the parameters.
    """
    leaves, structure = jax.tree.flatten(params)
    trained = [i for i, x in enumerate(leaves) if is_gradient(x)]
    copies = max((_ways(sharding) for sharding in layouts), default=1)

    def loss_of(values, rows):
        merged = list(leaves)
        for i, value in zip(trained, values, strict=True):
            merged[i] = value
        result = loss_fn(jax.tree.unflatten(structure, merged), rows)
        loss = result[0] if isinstance(result, tuple) and result else result
        if jnp.shape(loss) != ():
            raise ValueError(
                f"loss_fn must return a scalar, or a tuple that begins with one; got shape {jnp.shape(loss)}"
            )
        return loss

    def measure_row(row):
        copied = [jnp.broadcast_to(x, (copies, *x.shape)) for x in jax.tree.leaves(row)]
        placed = [_place(x, sharding) for x, sharding in zip(copied, layouts, strict=True)]
        rows = jax.tree.unflatten(jax.tree.structure(row), placed)
        loss, grads = jax.value_and_grad(loss_of)([leaves[i] for i in trained], rows)
        return loss, global_norm(grads)

    # Without a batch size there is no vmap, which some operations lack.
    size = None if chunk_size == 1 else chunk_size
    measured = jax.lax.map(measure_row, batch, batch_size=size)
    return (
        measured if mesh is None else tuple(_place(x, NamedSharding(mesh, PartitionSpec())) for x in measured)
    )


def _num_rows(batch: PyTree) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError(f"batch must hold at least one array, got {batch!r}")
    sizes = {jax.tree_util.keystr(path) or "batch": jnp.shape(x)[:1] for path, x in leaves}
    first, size = next(iter(sizes.items()))
    for name, other in sizes.items():
        if not other:
            raise ValueError(
                f"batch must be a pytree of arrays whose first axis is that of the rows; {name} is a scalar: give it "
                "to loss_fn in another way, such as functools.partial"
            )
        if other != size:
            raise ValueError(
                f"batch must be a pytree of arrays with one row after the other along the first axis; "
                f"{first} has {size[0]}, {name} has {other[0]}"
            )
    if size == (0,):
        raise ValueError("batch must have at least one row, got none")
    return size[0]


def _check_processes(params: PyTree, batch: PyTree) -> None:
    def is_spread(x):
        return isinstance(x, jax.Array) and not x.is_fully_addressable

    if any(map(is_spread, jax.tree.leaves(params))) and not all(map(is_spread, jax.tree.leaves(batch))):
        raise ValueError(
            "batch must be of global arrays where params are spread over processes, as from "
            "jax.make_array_from_process_local_data; got arrays of this process alone"
        )


def _layout(x: Any) -> NamedSharding | None:
    """How a mesh of several devices holds an array."""
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def _ways(sharding: NamedSharding | None) -> int:
    """Into how many parts the axis of rows is split."""
    axes = sharding.spec[0] if sharding is not None and len(sharding.spec) else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(sharding.mesh.shape[name] for name in names) if sharding is not None else 1


def _whole(x: Any) -> Any:
    sharding = _layout(x)
    return x if sharding is None else jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))


def _place(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    if sharding is None:
        return x
    # Axes of the one kind are in the types of arrays; those of the other are left to the compiler.
    is_typed = AxisType.Explicit in sharding.mesh.axis_types
    return reshard(x, sharding) if is_typed else jax.lax.with_sharding_constraint(x, sharding)


def _ranked(ids: list[Any], losses: np.ndarray, norms: np.ndarray) -> RowReport:
    finite = np.isfinite(losses) & np.isfinite(norms)
    squares = np.where(finite, norms, 0.0) ** 2
    shares = np.where(finite, squares / (squares.sum() or 1.0), np.nan)
    order = np.lexsort((-squares, finite))  # stable: equal rows stay in the order of the batch
    return RowReport(
        {
            "row_id": ids[i],
            "position": int(i),
            "loss": finite_json(float(losses[i])),
            "norm": finite_json(float(norms[i])),
            "share": finite_json(float(shares[i])),
        }
        for i in order
    )
