"""Models and texts kept for the next cell, and policies compiled before anything is timed."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tova.errors import UsageError

if TYPE_CHECKING:
    from experiments.cells import Cell
    from experiments.data import Document
    from experiments.models import Loaded


@dataclass
class Kept:
    """One model and one dataset, the last used ones; and which could not be loaded, so that nobody tries again."""

    _model: tuple[str, Loaded] | None = None
    _documents: tuple[str, list[Document]] | None = None
    _failed: dict[str, Exception] = field(default_factory=dict)
    _warm: set[str] = field(default_factory=set)

    def model(self, cell: Cell) -> Loaded:
        """The cell's model, ready, with the cell's policy compiled."""
        assert cell.model is not None
        key = _key(cell.model, cell.device)
        if self._model is None or self._model[0] != key:
            self.forget_model()
            self._model = (key, self._load(key, lambda: cell.model.load(cell.device)))  # type: ignore[union-attr]
            _check_unchanged("model", cell.model, cell)
        loaded = self._model[1]
        self._warm_up(loaded, cell)
        return loaded

    def documents(self, cell: Cell) -> list[Document]:
        """The cell's documents."""
        assert cell.dataset is not None
        key = _key(cell.dataset, "")
        if self._documents is None or self._documents[0] != key:
            self._documents = (key, self._load(key, cell.dataset.load))
            _check_unchanged("dataset", cell.dataset, cell)
        return self._documents[1]

    def forget_model(self) -> None:
        """Free its memory."""
        self._model = None
        self._warm.clear()
        free_memory()

    def _load(self, key: str, load: Any) -> Any:
        if key in self._failed:
            raise self._failed[key]
        try:
            return load()
        except Exception as e:
            self._failed[key] = e.with_traceback(None)
            raise

    def _warm_up(self, loaded: Loaded, cell: Cell) -> None:
        """A few tokens by the cell's policy, so that a cell's speed is not that of compiling its scan."""
        policy = f"{cell.policy_class.__module__}.{cell.policy_class.__qualname__} {cell.policy_parameters}"
        if policy in self._warm:
            return
        self._warm.add(policy)
        import contextlib

        import torch

        from tova import EvictingCache
        from tova.limits import positions, vocabulary
        from tova.measures import AttentionMeasures, token_nll

        # What goes wrong here goes wrong in the cell, and is said there.
        with contextlib.suppress(Exception), torch.random.fork_rng():
            small = _small(cell)
            tokens = (small.budget if cell.budget is not None else 12) + 6
            ids = torch.arange(2, tokens)[: positions(loaded.model)].unsqueeze(0) % (vocabulary(loaded.model) or 18)
            cache = EvictingCache(small, observers=[AttentionMeasures()])
            token_nll(loaded.model, ids.to(loaded.model.device), cache)


def _check_unchanged(group: str, part: Any, cell: Cell) -> None:
    """Raise if files were edited since the cell got its address: results would lie under what they no longer are."""
    if part.identity() != cell.identity[group]:
        raise UsageError(f"{group}: its files were changed after the sweep was begun; start the sweep again")


def _small(cell: Cell) -> Any:
    """The cell's policy at the smallest of a few budgets that it takes."""
    if cell.budget is None:
        return cell.policy_class(**cell.policy_parameters)
    for budget in (4, 12, 40, 72):
        try:
            return cell.policy_class(budget=budget, **cell.policy_parameters)
        except Exception as e:
            error = e
    raise error


def _key(part: Any, device: str) -> str:
    return f"{type(part).__qualname__} {json.dumps(part.identity(), sort_keys=True, default=str)} {device}"


def free_memory() -> None:
    """Give back what nothing refers to any more, the card's memory too."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
