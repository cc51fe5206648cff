"""What a layer holds, as a policy sees it.

Shape letters used throughout ``tova``:

    B batch rows      G kept sets per sequence (1: one per layer; H_kv: one per key/value head)
    R = B * G rows that are evicted from independently      S slots of a row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tova.errors import UsageError

_NOWHERE = torch.iinfo(torch.int64).max


@dataclass
class Slots:
    """The entries of R independent kept sets, S slots each; empty slots hold garbage and are never looked at.

    Slots are in no particular order: use the helpers, which go by position.

    Attributes:
        positions: int64 [R, S], counted from the sequence's first real token (padding has no position).
        held: bool [R, S], which slots are occupied.
        records: what the policy remembers, name -> [R, S, ...].
        observed: int64 [R, 1], how many steps have been observed so far.
        newest: int64 [R, 1], the position of the newest token.
        features: what is fixed of each token, name -> [R, S]; see ``Policy.features``.
    """

    positions: Tensor
    held: Tensor
    records: dict[str, Tensor]
    observed: Tensor
    newest: Tensor
    features: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, record: str) -> Tensor:
        return self.records[record]

    @property
    def count(self) -> Tensor:
        """int64 [R, 1]: how many positions are held."""
        return self.held.sum(-1, keepdim=True)

    def first(self, n: int) -> Tensor:
        """bool [R, S]: the held ones among the sequence's first ``n`` tokens."""
        return self.held & (self.positions < n)

    def newest_held(self, n: int) -> Tensor:
        """bool [R, S]: the last ``n`` held positions, the newest token among them."""
        if n <= 0:
            return torch.zeros_like(self.held)
        if n >= self.held.shape[-1]:
            return self.held.clone()
        ordered = self.positions.masked_fill(~self.held, -1)
        return self.held & (ordered >= ordered.topk(n, dim=-1).values[..., -1:])

    def in_position_order(self) -> tuple[Tensor, Tensor]:
        """int64 [R, S] twice: slot indices by ascending position with empty slots last, and each slot's rank."""
        order = self.positions.masked_fill(~self.held, _NOWHERE).argsort(dim=-1, stable=True)
        return order, order.argsort(dim=-1)

    def max_pool(self, x: Tensor, kernel: int) -> Tensor:
        """[R, S] -> [R, S]: maximum of ``x`` over the ``kernel`` adjacent *held* positions centred on each slot."""
        if kernel == 1 or not x.numel():
            return x
        order, rank = self.in_position_order()
        held = self.held.gather(-1, order)
        dense = x.gather(-1, order).masked_fill(~held, float("-inf"))
        pooled = torch.nn.functional.max_pool1d(dense.unsqueeze(1), kernel, stride=1, padding=kernel // 2).squeeze(1)
        return pooled.gather(-1, rank)

    def average_pool(self, x: Tensor, kernel: int) -> Tensor:
        """[R, S] -> [R, S]: sum of ``x`` over ``kernel`` adjacent held positions, over ``kernel``: ends count as 0."""
        if kernel == 1 or not x.numel():
            return x
        order, rank = self.in_position_order()
        held = self.held.gather(-1, order)
        dense = x.gather(-1, order).masked_fill(~held, 0.0)
        pooled = torch.nn.functional.avg_pool1d(dense.unsqueeze(1), kernel, stride=1, padding=kernel // 2).squeeze(1)
        return pooled.gather(-1, rank)


@dataclass(frozen=True)
class Tokens:
    """New tokens as a layer writes them, for a policy that wants to know more of them than attention.

    Attributes:
        key: [B, K, T, D], rotated as the layer stores it.
        value: [B, K, T, D].
        positions: int64 [B, T], what the keys are rotated by.
        unrotate: turns [B, K, T, D] keys back by their positions; None if the model's rotation is not known.
    """

    key: Tensor
    value: Tensor
    positions: Tensor
    unrotate: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def unrotated_key(self) -> Tensor:
        """[B, K, T, D]: the keys before rotation.

        Raises:
            UsageError: the model rotates its keys in a way not known here.
        """
        if self.unrotate is None:
            raise UsageError("this policy wants keys before rotation, which this model's attention does not tell")
        return self.unrotate(self.key, self.positions)
