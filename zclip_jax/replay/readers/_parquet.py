"""Parquet, read by pyarrow."""

from pathlib import Path

from zclip_jax._extras import require
from zclip_jax.replay.readers._columns import Columns, flatten
from zclip_jax.replay.readers._last_stage import make_recording
from zclip_jax.replay.readers._recording import Recording


def read_parquet(path: Path, column: str | None) -> Recording:
    """The columns of a Parquet file that matter, batch by batch."""
    parquet = require("pyarrow.parquet", "replay", "reading Parquet")
    arrow = require("pyarrow", "replay", "reading Parquet")
    columns = Columns(column, typed=True)
    try:
        with parquet.ParquetFile(path) as file:
            names = [
                field.name
                for field in file.schema_arrow
                if columns[field.name] is not None or arrow.types.is_struct(field.type)
            ]
            for batch in file.iter_batches(columns=names) if names else ():
                for row in batch.to_pylist():
                    columns.add(
                        dict(flatten(row)), tuple(name for name, value in row.items() if value is not None)
                    )
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"Parquet that is cut off or damaged: {str(error).splitlines()[0]}") from None
    return make_recording(columns, "Parquet")
