"""A run's metrics: the table of names (names.py), the writer and the reader (files.py)."""

from oblr_megatron.metrics.files import (
    ENVIRONMENT_FILE,
    METRICS_FILE,
    RANKS_FILE,
    KeptLines,
    MetricsWriter,
    intact_lines,
    logged_until,
    read_metrics,
    step_lines,
    write_whole,
)
from oblr_megatron.metrics.names import METRICS, Metric, Record, describe

__all__ = ["ENVIRONMENT_FILE", "METRICS", "METRICS_FILE", "RANKS_FILE", "KeptLines", "Metric", "MetricsWriter"]
__all__ += ["Record", "describe", "intact_lines", "logged_until", "read_metrics", "step_lines", "write_whole"]
