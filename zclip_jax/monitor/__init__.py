"""Monitoring: which rows were in the batch of a spike."""

from zclip_jax.monitor._rows import RowReport, Rows, RowTracker, row_report

__all__ = ["RowReport", "RowTracker", "Rows", "row_report"]
