"""Tables and figures of a sweep, for the runner's last lines and for the notebooks alike."""

from experiments.report.console import cell_lines, console_report, console_table
from experiments.report.figures import figure, png
from experiments.report.layout import groups, names, varying
from experiments.report.table import footnotes, long_table, markdown, wide_markdown
from experiments.report.write import write_report

__all__ = [
    "cell_lines", "console_report", "console_table", "figure", "footnotes", "groups", "long_table", "markdown", "names",
    "png", "varying", "wide_markdown", "write_report",
]  # fmt: skip
