"""The last stage of every reader: from columns to a `Recording`."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from zclip_jax.replay.readers._choice import Choice, choose_norm
from zclip_jax.replay.readers._columns import Columns
from zclip_jax.replay.readers._left_out import leave_out
from zclip_jax.replay.readers._names import attempt_rank, epoch_rank, loss_rank, words_of
from zclip_jax.replay.readers._notes import cadence_of, count, notes_on_norms, notes_on_runs
from zclip_jax.replay.readers._recording import Recording
from zclip_jax.replay.readers._runs import Order, order_rows
from zclip_jax.replay.readers._series import Series


def make_recording(
    columns: Columns, form: str, notes: Iterable[str] = (), settings: dict[str, Any] | None = None
) -> Recording:
    """What was collected, with notes on what is odd in it after the `notes` given.

    Raises:
      ValueError: there is no norm.
    """
    choice = choose_norm(columns)
    on_commas = _settle_commas(columns, choice)
    series = Series(columns, choice)
    told = leave_out(series)
    steps, on_numbering = series.number()
    order, steps = _split(series, steps)
    rows, norms = series.rows, series.norms
    starts = order.starts
    on_rows = [*_on_left_out(columns, choice), *on_commas]
    on_values = [*notes_on_runs(norms, steps, starts), *notes_on_norms(norms, steps, choice.name)]
    first = []
    if len(starts) > 1:
        places = ", ".join(f"{start:,}" for start in starts[1:6])
        more = f" and {len(starts) - 6} more" if len(starts) > 6 else ""
        first.append(
            f"{len(starts)} runs stand in this log, one after the other: the first begins in row 0, "
            f"the others in {places}{more}"
        )
    loss = series.beside(loss_rank)
    return Recording(
        norms=norms,
        steps=steps,
        loss=loss[0][1].at(rows, columns.num_rows) if loss else None,
        format=form,
        column=choice.name,
        cadence=cadence_of(steps, starts),
        notes=(
            *first,
            *notes,
            *choice.notes,
            *told,
            *on_rows,
            *on_numbering,
            *([order.note] if order.note else []),
            *on_values,
        ),
        settings=settings or {},
        starts=starts,
    )


def _on_left_out(columns: Columns, choice: Choice) -> list[str]:
    notes = []
    num_wrong = sum(column.num_wrong for column in choice.columns)
    if num_wrong:
        first = next(column.first_wrong for column in choice.columns if column.num_wrong)
        what = count(num_wrong, "row has", "rows have")
        notes.append(f"{what} no number for a norm, first {first!r}; left out")
    left_out = columns.num_rows - choice.rows.size - num_wrong
    if left_out > 0 and columns.unit == "row":
        notes.append(f"{count(left_out, 'row has no norm and is', 'rows have no norm and are')} left out")
    several = [column for column in choice.columns if column.num_several]
    if several:
        lines = count(
            sum(column.num_several for column in several), f"{columns.unit} has", f"{columns.unit}s have"
        )
        example = several[0].first_several
        notes.append(f"{lines} several numbers after {choice.name}, first {example!r}; the first is read")
    num_strings = sum(column.num_strings for column in choice.columns)
    if columns.typed and num_strings:
        notes.append(f"{count(num_strings, 'norm is a string', 'norms are strings')}, read as numbers")
    return notes


def _settle_commas(columns: Columns, choice: Choice) -> list[str]:
    """Finds whether "12,345" is twelve thousand, by the other numbers of the log."""
    mine = choice.columns
    if not any(column.ambiguous for column in mine):
        return []
    others = [column for column in columns.values() if column is not None]
    decimal = any(column.commas for column in mine)
    if not decimal and not any(column.points for column in mine):
        decimal = any(column.commas for column in others)
    certain = decimal or any(column.points for column in others)
    for column in mine:
        column.settle_commas(decimal)
    example = next(column.values[column.ambiguous[0]] for column in mine if column.ambiguous)
    return [] if certain else [f"the comma in norms is taken to divide thousands, as in {example:.0f}"]


def _split(series: Series, steps: np.ndarray | None) -> tuple[Order, np.ndarray]:
    """The runs, and the steps of the rows that count."""
    epochs, attempts = (series.fullest(rank) for rank in (epoch_rank, attempt_rank))
    goes_on = series.main is not None and words_of(series.main[0]).startswith(("global_", "total_", "_step"))
    if epochs is None and steps is None:
        steps = np.arange(series.rows.size)
    order = order_rows(steps, epochs, attempts, goes_on)
    series.take(order.keep)
    if steps is None:
        ends = (*order.starts[1:], series.rows.size)
        steps = np.concatenate([np.arange(b - a) for a, b in zip(order.starts, ends, strict=True)])
        return order, steps
    return order, steps[order.keep]
