"""One self-contained HTML file about a run.

history.py (reads the run directory) -> sections.py, costs.py, panel.py (which charts, with captions)
-> chart.py, axes.py (draw them as SVG) -> page.py (the page).
"""

from oblr_megatron.observe.report.page import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
