"""Parquet, read by pyarrow."""

from pathlib import Path

from zclip_jax._extras import require
from zclip_jax.replay.readers._columns import Columns
from zclip_jax.replay.readers._recording import Recording


def read_parquet(path: Path, column: str | None) -> Recording:
    """The columns of a Parquet file that matter, batch by batch."""
    parquet = require("pyarrow.parquet", "replay", "reading Parquet")
    arrow = require("pyarrow", "replay", "reading Parquet")
    columns = Columns(column, typed=True)
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if columns[name] is not None]
            for batch in file.iter_batches(columns=names) if names else ():
                for row in batch.to_pylist():
                    columns.add(row)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"Parquet that is cut off or damaged: {str(error).splitlines()[0]}") from None
    return columns.recording("Parquet")
