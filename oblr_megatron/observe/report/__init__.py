"""One self-contained HTML file about a run.

history.py (what the run directory holds) -> figures.py (which figures, with their captions) -> chart.py, axes.py
(how they are drawn) -> page.py (the page). alarms.py looks for what should not go unnoticed.
"""

from oblr_megatron.observe.report.page import write_report

__all__ = ["write_report"]
