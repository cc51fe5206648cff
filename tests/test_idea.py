"""The idea in less than 80 lines (analysis/idea.py) is what the library's cache does, and a cache that really drops."""

from __future__ import annotations

import base64
import importlib.util
import io
import math
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import numpy as np
import pytest
import torch
from PIL import Image

ANALYSIS = Path(__file__).parent.parent / "analysis"
SOURCE = (ANALYSIS / "idea.py").read_text()
IDEA, REST = SOURCE.split("# ## Is it the same?\n")
TOKENS = 120


def code_of(part: str) -> list[str]:
    """The lines of code of a part of the notebook; comments that stand alone and blank lines are none."""
    return [line for line in part.splitlines() if line.strip() and not line.startswith("#")]


@pytest.fixture(scope="module")
def idea() -> dict[str, Any]:
    """The notebook's functions, ``one_head`` among them; its own checks and picture are left out."""
    names: dict[str, Any] = {}
    exec(compile(IDEA + REST.split("# %%\nfor budget")[0], "idea.py", "exec"), names)
    return names


def physical(query: np.ndarray, key: np.ndarray, value: np.ndarray, budget: int) -> tuple[np.ndarray, list[float]]:
    """A cache that really drops, in float64, on lists: outputs, and the last step that saw each token."""
    keys, values, names = [], [], []
    outputs, last = [], [math.inf] * len(query)
    for step, (q, k, v) in enumerate(zip(query, key, value, strict=True)):
        keys, values, names = [*keys, k], [*values, v], [*names, step]
        raw = [math.exp(float(q @ other) / math.sqrt(len(q))) for other in keys]
        outputs.append(sum(weight * other for weight, other in zip(raw, values, strict=True)) / sum(raw))
        if len(names) > budget:
            # The newcomer, which nobody else has looked at, is left out.
            lowest = min(range(len(names) - 1), key=lambda slot: raw[slot])
            last[names[lowest]] = step
            keys, values, names = ([x for i, x in enumerate(xs) if i != lowest] for xs in (keys, values, names))
    return np.stack(outputs), last


def test_it_is_less_than_80_lines() -> None:
    lines = code_of(IDEA)
    assert 30 < len(lines) <= 80
    assert [line for line in lines if "import" in line] == ["import torch"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [1, 2, 17, 64, TOKENS])
def test_it_is_what_the_cache_does(idea: dict[str, Any], budget: int, seed: int) -> None:
    """Kept sets exactly, outputs within 1e-5: ``EvictingCache``, the notebook's three functions, and a plain loop."""
    (query, key, value, output), evicted_at = idea["one_head"](seed, budget, TOKENS)
    expected, last = physical(*(x.double().numpy() for x in (query, key, value)), budget)
    assert [math.inf if at == idea["NEVER"] else at for at in evicted_at.tolist()] == last
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5)
    ways = [idea["decode"](query, key, value, budget), idea["replay"](query, key, value, budget)]
    ways += [idea["replay_in_chunks"](query, key, value, budget, chunk) for chunk in (1, 7, 32, TOKENS)]
    for found, when in ways:
        assert torch.equal(when, evicted_at)
        torch.testing.assert_close(found, output, rtol=0, atol=1e-5)


def test_what_is_dropped_is_not_simply_the_oldest(idea: dict[str, Any]) -> None:
    """Otherwise the test above would hold for a window, too."""
    _, evicted_at = idea["one_head"](0, 17, TOKENS)
    assert (evicted_at[evicted_at < idea["NEVER"]].diff() < 0).any()


def executed(name: str) -> nbformat.NotebookNode:
    spec = importlib.util.spec_from_file_location("build", ANALYSIS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build.executed(ANALYSIS / name)


def images_of(notebook: nbformat.NotebookNode) -> list[np.ndarray]:
    """The pictures among a notebook's outputs; they are taken out of it."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if data := output.get("data", {}).pop("image/png", None):
                found.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), dtype=float))
    return found


def test_the_notebook_is_what_its_source_gives() -> None:
    """Cells and what they print to the letter, the picture up to the last bits of its colours."""
    committed, made = nbformat.read(ANALYSIS / "idea.ipynb", as_version=4), executed("idea.py")
    (ours,), (theirs,) = images_of(made), images_of(committed)
    assert made == committed
    assert ours.shape == theirs.shape
    assert abs(ours - theirs).mean() < 0.5


@pytest.mark.parametrize("source", sorted(p.name for p in ANALYSIS.glob("*.py") if p.name != "build.py"))
def test_every_notebook_has_the_cells_of_its_source(source: str) -> None:
    committed = nbformat.read((ANALYSIS / source).with_suffix(".ipynb"), as_version=4)
    cells = jupytext.read(ANALYSIS / source).cells
    assert [(c.cell_type, c.source) for c in committed.cells] == [(c.cell_type, c.source) for c in cells]
    assert "site-packages" not in str(committed)  # a warning that names a folder of whoever built it
