"""Execute every percent-format notebook of this folder into an ``.ipynb`` that is the same bytes each time.

``python analysis/build.py [NAME ...]``; needs the extra ``analysis``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def executed(source: Path) -> nbformat.NotebookNode:
    """The notebook that running ``source`` from the project's root gives."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": HERE.parent}},
    )
    # A warning about widgets that tqdm gives in notebooks names a folder of this machine.
    client.execute(env={**os.environ, "PYTHONWARNINGS": "ignore:IProgress not found"})
    for key in ("language_info", "jupytext"):
        notebook.metadata.pop(key, None)
    nbformat.validate(notebook)
    return notebook


def build(source: Path) -> Path:
    """Write the notebook of ``source`` beside it."""
    target = source.with_suffix(".ipynb")
    nbformat.write(executed(source), target)
    return target


if __name__ == "__main__":
    names = sys.argv[1:] or [p.stem for p in sorted(HERE.glob("*.py")) if p.name != Path(__file__).name]
    for name in names:
        print(build(HERE / f"{name}.py").relative_to(HERE.parent))
