"""The log of evictions: for every token the last step that saw it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int64).max
"""``evicted_at`` of a token that was never dropped."""
PADDING = -1
"""``evicted_at`` of a padding column."""


@dataclass
class EvictionLog:
    """``evicted_at`` of one layer, int64 [B, G, columns], growing with the text."""

    evicted_at: Tensor | None = None
    columns: int = 0

    def extend(self, batch: int, kept_sets: int, columns: int, device: torch.device) -> None:
        """Make room for ``columns`` columns in all, not dropped so far."""
        room = columns + 1  # the last is a place for what is not to be written
        if self.evicted_at is None:
            self.evicted_at = torch.full((batch, kept_sets, max(room, 64)), NEVER, device=device)
        if room > self.evicted_at.shape[-1]:
            more = max(room, 2 * self.evicted_at.shape[-1]) - self.evicted_at.shape[-1]
            fresh = torch.full((batch, kept_sets, more), NEVER, device=device)
            self.evicted_at = torch.cat([self.evicted_at, fresh], -1)
        self.columns = columns

    def write(self, column: Tensor, step: Tensor | int, where: Tensor) -> None:
        """Note that ``column`` [R, N] was dropped after query column ``step``, wherever ``where`` holds."""
        assert self.evicted_at is not None
        flat = self.evicted_at.view(-1, self.evicted_at.shape[-1])
        # Looking up where it holds would make a GPU's caller wait, and rows in streams wait for each other.
        flat.scatter_(1, torch.where(where, column, flat.shape[1] - 1), torch.where(where, step, NEVER))

    @property
    def view(self) -> Tensor:
        """int64 [B, G, columns]."""
        assert self.evicted_at is not None
        return self.evicted_at[..., : self.columns]
