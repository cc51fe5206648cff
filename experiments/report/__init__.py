"""Tables and figures of a sweep, for the runner's last lines and for the notebooks alike."""

from experiments.report.figures import figure, png
from experiments.report.table import console_table, long_table, markdown, pivot
from experiments.report.write import write_report

__all__ = ["console_table", "figure", "long_table", "markdown", "pivot", "png", "write_report"]
