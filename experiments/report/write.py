"""What a sweep leaves behind for people: its table, its figure, its frame."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.files import write_atomically
from experiments.report.figures import figure, png
from experiments.report.table import markdown


def write_report(frame: pd.DataFrame, folder: Path) -> dict[str, Path]:
    """Write ``table.md``, ``figure.png`` and ``cells.csv`` into ``folder``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"table": folder / "table.md", "figure": folder / "figure.png", "cells": folder / "cells.csv"}
    write_atomically(paths["cells"], frame.to_csv(index=False))
    write_atomically(paths["table"], markdown(frame))
    write_atomically(paths["figure"], png(figure(frame)))
    return paths
