"""How a model turns queries and keys by their positions, for the few policies that ask."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

from torch import Tensor, nn

_NOTE = "_tova_rotation"


class ModelRotation:
    """A model's own rotary embedding, asked for positions of our choosing; see :class:`tova.layer.Rotation`.

    ``rotary`` gives cosines and sines for positions, ``apply`` is the modeling file's ``apply_rotary_pos_emb``, which
    knows how dimensions are paired and how many are turned.
    """

    def __init__(self, rotary: nn.Module, apply: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._rotary = rotary
        self._apply = apply

    def turn(self, x: Tensor, positions: Tensor, to: Tensor | None) -> Tensor:
        """[B, H, T, D] turned from ``positions`` int64 [B, T] to those of ``to``, or back to none."""
        cos, sin = self._rotary(x, positions)
        # A scaled embedding (YaRN) multiplies by more than one: turning back divides by its square.
        size = (cos[..., :1].double().square() + sin[..., :1].double().square()).to(x.dtype)
        still, _ = self._apply(x, x, cos / size, -sin / size)
        if to is None:
            return still
        cos, sin = self._rotary(x, to)
        moved, _ = self._apply(still, still, cos, sin)
        return moved


def note_rotations(model: nn.Module) -> None:
    """Note at the attention modules of ``model`` how they rotate, where one rotary embedding serves them all.

    The note is an attribute of the module: a copy of the model has it too, with the copy's embedding in it.
    """
    rotaries = [m for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
    if len(rotaries) != 1:
        return
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
            if apply is not None and list(inspect.signature(apply).parameters)[:4] == ["q", "k", "cos", "sin"]:
                setattr(module, _NOTE, ModelRotation(rotaries[0], apply))


def rotation_of(module: nn.Module) -> ModelRotation | None:
    """How an attention module rotates; None if that is not known."""
    return getattr(module, _NOTE, None)
