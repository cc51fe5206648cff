"""Shapes in signatures are checked while the tests run, and nothing else is touched."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import jaxtyping
import numba
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from support import shapes

from tova import measures
from tova.shapes import Float, Int

WRONG = {
    "another number of tokens": lambda: measures._cross_entropy(torch.zeros(2, 5, 9), torch.zeros(2, 4).long()),
    "a dimension too many": lambda: measures._cross_entropy(torch.zeros(1, 2, 5, 9), torch.zeros(2, 5).long()),
    "another kind of number": lambda: measures.lifetimes(torch.zeros(2, 5)),
    "in a method": lambda: measures.AttentionMeasures()._append(0, torch.zeros(2, 5, 9)),
    "in what a dataclass makes": lambda: measures.AttentionReport(*[torch.zeros(3, 2, 5)] * 4),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_shape_is_noticed(what: str) -> None:
    with pytest.raises(BeartypeCallHintViolation):
        WRONG[what]()


def test_so_is_a_wrong_result(monkeypatch) -> None:
    monkeypatch.setattr(torch, "where", lambda *_: torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        measures.lifetimes(torch.full((2, 5), measures.NEVER))


@pytest.mark.parametrize("name", shapes.MODULES)
def test_what_is_listed_is_checked(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__.endswith(".py")
    assert isinstance(module.__loader__, shapes._Loader)


def test_only_functions_with_shapes_are_wrapped() -> None:
    """What numba compiled is no function of Python's, and annotations that are for type checkers only are left."""
    module = types.ModuleType("pretended")

    def plain(x: NotThere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def shaped(x: Float[torch.Tensor, "B T"], other: NotThere = 3) -> Int[torch.Tensor, " T"]:  # type: ignore[name-defined]  # noqa: F821
        return x.sum(0).long()

    compiled = numba.njit(lambda x: x + 1)
    module.plain, module.shaped, module.compiled = plain, shaped, compiled
    for function in (plain, shaped):
        function.__module__ = "pretended"
    assert shapes.check(module, "pretended") == 1
    assert module.plain is plain
    assert module.compiled is compiled
    assert module.shaped is not shaped
    assert module.shaped(torch.ones(2, 3)).tolist() == [2, 2, 2]
    with pytest.raises(BeartypeCallHintViolation):
        module.shaped(torch.ones(3))


def test_the_library_does_without() -> None:
    """To anybody else an annotation is a plain tensor, and neither jaxtyping nor beartype is imported."""
    assert jaxtyping.Float is not Float
    script = "import sys, tova, tova.measures; print([m for m in ('jaxtyping', 'beartype') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
