"""One self-contained HTML page per run: verdict, before and after, pair matrices, curves, times, config.

`write_report` builds it from a run's folder and can build it again at any time, while the run is going on too.
The pieces (`pair_matrix_svg`, `data_url`, `render`) serve other pages as well.
"""

from __future__ import annotations

from pacorl.report.figures import data_url, pair_matrix_svg
from pacorl.report.page import render, write_report

__all__ = ["data_url", "pair_matrix_svg", "render", "write_report"]
