"""What all tests share: no network but the package index, few threads, small models and the packaged one."""

from __future__ import annotations

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["WANDB_SILENT"] = "true"
# Threads that wait should sleep: where cores are shared, spinning ones cost more than they gain.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
for variable in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "WANDB_API_KEY"):
    os.environ.pop(variable, None)

import pytest
import torch

if not torch.cuda.is_available():  # the GPU's kernels are interpreted; to be said before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

pytest.register_assert_rewrite("support")

from support import shapes

shapes.install()


@pytest.fixture(autouse=True)
def few_threads(request):
    """Two for the packaged model; one for tiny ones, whose products gain nothing from a second."""
    torch.set_num_threads(2 if "smollm2" in request.fixturenames else 1)


@pytest.fixture(scope="session")
def smollm2():
    """The packaged model, float32 on the CPU, switched to the evicting attention."""
    from experiments.models import SmolLM2

    return SmolLM2().load("cpu")


@pytest.fixture(scope="session")
def books():
    """The packaged texts by title."""
    from experiments.data import Books

    return {document.name: document.text for document in Books().load()}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory with two texts."""
    from support.commands import PAGE

    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(PAGE)
    (tmp_path / "texts" / "b.txt").write_text(PAGE[::-1])
    return tmp_path


def pytest_terminal_summary(terminalreporter):
    """The matrix model x way of running, as far as this run went (the README keeps the whole)."""
    matrix = sys.modules.get("test_matrix")
    if matrix is not None and matrix.OUTCOMES:
        terminalreporter.section("policies per model and way of running")
        for line in matrix.summary():
            terminalreporter.write_line(line)
