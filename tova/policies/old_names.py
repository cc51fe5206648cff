"""What policies called things until version 0.1: they keep working for one release, with a warning."""

from __future__ import annotations

from typing import Any

from tova.errors import renamed


class OldNames:
    """Old names of a policy's methods, for those who call them and those who override them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: dict[str, Any] = dict(vars(cls))
        for old, new, translate in _OVERRIDDEN:
            if old in own and not cls.__module__.startswith("tova."):
                renamed(f"{cls.__name__}.{old}", new)
                translate(cls, own[old])

    @property
    def effective_budget(self) -> int:
        """Old name of ``layer_budget``."""
        renamed("effective_budget", "layer_budget")
        return self.layer_budget  # type: ignore[attr-defined,no-any-return]

    def keeps(self, asked: int) -> int:
        """Old name of ``evicts_to(asked)``."""
        renamed("keeps(asked)", "evicts_to(asked)")
        return self.evicts_to(asked)  # type: ignore[attr-defined,no-any-return]

    def remains(self, seen: int) -> int:
        """Old name of ``keeps_of_prompt`` for a prompt that is longer than the budget."""
        renamed("remains(seen)", "evicts_to() or keeps_of_prompt(tokens, held)")
        return self.keeps_of_prompt(seen, 2**62)  # type: ignore[attr-defined,no-any-return]


def _budget(cls: Any, old: Any) -> None:
    cls.layer_budget = old


def _keeps(cls: Any, old: Any) -> None:
    cls.evicts_to = lambda self, asked=None: old(self, self.layer_budget if asked is None else asked)


def _remains(cls: Any, old: Any) -> None:
    usual = cls.evicts_to
    cls.evicts_to = lambda self, asked=None: old(self, 0) if asked is None else usual(self, asked)

    def keeps_of_prompt(self: Any, tokens: int, held: int) -> int:
        fits = held <= self.layer_budget and not self.prompt_only
        return held if fits else min(held, old(self, tokens))

    cls.keeps_of_prompt = keeps_of_prompt


def _rounds(cls: Any, old: bool) -> None:
    cls.combine = lambda self, heads: (heads.rounded if old else heads.weights).mean(1).float()


_OVERRIDDEN = (
    ("effective_budget", "layer_budget", _budget),
    ("keeps", "evicts_to(asked=None)", _keeps),
    ("remains", "evicts_to() and keeps_of_prompt(tokens, held)", _remains),
    ("rounds_weights", "combine(heads), which may return heads.rounded.mean(1).float()", _rounds),
)
