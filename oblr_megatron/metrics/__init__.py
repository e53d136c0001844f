"""A run's metrics: the table of names (names.py), the writer (writer.py) and the reader (files.py)."""

from oblr_megatron.metrics.files import ENVIRONMENT_FILE, METRICS_FILE, RANKS_FILE, read_metrics, write_whole
from oblr_megatron.metrics.names import METRICS, Metric, Record, describe
from oblr_megatron.metrics.writer import MetricsWriter

__all__ = [
    "ENVIRONMENT_FILE",
    "METRICS",
    "METRICS_FILE",
    "RANKS_FILE",
    "Metric",
    "MetricsWriter",
    "Record",
    "describe",
    "read_metrics",
    "write_whole",
]
