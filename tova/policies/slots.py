"""What a layer holds, as a policy sees it.

Shape letters used throughout ``tova``:

    B batch rows      G kept sets per sequence (1: one per layer; H_kv: one per key/value head)
    R = B * G rows that are evicted from independently      S slots of a row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
        records: what the policy remembers, name -> [R, S, ...]; of a ring, [R, W, S].
        observed: int64 [R, 1], how many steps have been observed so far.
        newest: int64 [R, 1], the position of the newest token.
        features: what is fixed of each token, name -> [R, S] or [R, S, n]; see ``Policy.features``.
        kept_sets: how many of the R rows are one sequence's; they are next to each other.
        keys, values: [B, K, S, D], what is held, for a policy that looks at them itself; None in a compiled engine, and
            where there are none (a stream of attention rows).
        rings: which records are rings (see :class:`tova.policies.base.Ring`).
    """

    positions: Tensor
    held: Tensor
    records: dict[str, Tensor]
    observed: Tensor
    newest: Tensor
    features: dict[str, Tensor] = field(default_factory=dict)
    kept_sets: int = 1
    keys: Tensor | None = None
    values: Tensor | None = None
    rings: frozenset[str] = frozenset()

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

    def ring_sum(self, name: str) -> Tensor:
        """float64 [R, S]: the sum over the ring ``name`` of each slot, entry 0 upward."""
        ring = self.records[name]
        if name not in self.rings:
            raise UsageError(f"ring_sum: {name!r} is not a Ring in records()")
        total = torch.zeros_like(self.positions, dtype=torch.float64)
        for entry in ring.unbind(1):
            total = total + entry
        return total

    # -- what the engines do with them -----------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """All that is remembered."""
        return [self.positions, self.held, self.observed, self.newest, *self.records.values(), *self.features.values()]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Slots:
        """Every tensor changed, the first dimension being rows."""
        return replace(
            self,
            positions=change(self.positions),
            held=change(self.held),
            records={name: change(record) for name, record in self.records.items()},
            observed=change(self.observed),
            newest=change(self.newest),
            features={name: change(feature) for name, feature in self.features.items()},
        )

    def selected(self, order: Tensor) -> Slots:
        """Slot i becomes what was in ``order[r, i]`` (int64 [R, S'])."""

        def select(entries: Tensor, dim: int) -> Tensor:
            shape = [*entries.shape]
            shape[dim] = order.shape[1]
            index = order.view([n if d in (0, dim) else 1 for d, n in enumerate(shape)]).expand(shape)
            return entries.gather(dim, index)

        return self.with_each(select)

    def padded(self, records: dict[str, Tensor], more: int) -> Slots:
        """The same followed by ``more`` empty slots with these records."""
        rows = len(self.positions)
        nowhere = torch.full((rows, more), -1, dtype=torch.int64, device=self.positions.device)
        fresh = {name: feature.new_zeros(rows, more, *feature.shape[2:]) for name, feature in self.features.items()}
        return self.followed_by(nowhere, records, fresh)

    def followed_by(self, positions: Tensor, records: dict[str, Tensor], features: dict[str, Tensor]) -> Slots:
        """The same followed by slots for tokens at ``positions`` [R, C], which have yet to join."""
        return replace(
            self,
            positions=torch.cat([self.positions, positions], 1),
            held=torch.nn.functional.pad(self.held, (0, positions.shape[1])),
            records={name: torch.cat([old, records[name]], self.slot_dim(name)) for name, old in self.records.items()},
            features={
                name: torch.cat([self.features[name], new], 1) if name in self.features else new
                for name, new in features.items()
            },
        )

    def slot_dim(self, record: str) -> int:
        """Which dimension of a record's tensor goes over slots."""
        return 2 if record in self.rings else 1

    def with_each(self, change: Callable[[Tensor, int], Tensor]) -> Slots:
        """Everything that is per slot changed by ``change(tensor, dimension of slots)``."""
        return replace(
            self,
            positions=change(self.positions, 1),
            held=change(self.held, 1),
            records={name: change(record, self.slot_dim(name)) for name, record in self.records.items()},
            features={name: change(feature, 1) for name, feature in self.features.items()},
        )

    def scattered(self, name: str, slot: Tensor, values: Tensor | float) -> Tensor:
        """Record ``name`` with ``values`` in slot int64 [R, 1] of each row.

        ``values`` is a number, or as the record with one slot.
        """
        old, dim = self.records[name], self.slot_dim(name)
        shape = [*old.shape]
        shape[dim] = 1
        index = slot.view([len(slot), *[1] * (old.ndim - 1)]).expand(shape)
        if isinstance(values, Tensor):
            return old.scatter(dim, index, values.to(old.dtype).reshape(shape))
        return old.scatter(dim, index, values)


@dataclass(frozen=True)
class HeadWeights:
    """What the query heads that share a kept set gave to each slot in one step, or in several.

    Attributes:
        weights: float32 [R, H_g, S] or [R, H_g, C, S], 0 where the slot is not seen.
        logits: what they are the softmax of; minus infinity where the slot is not seen.
        sink_logits: [R, H_g], logits that only add to the sums; None without.
        dtype: the model's.
    """

    weights: Tensor
    logits: Tensor
    sink_logits: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def rounded(self) -> Tensor:
        """The weights as a model in half precision has them: rounded to its dtype."""
        return self.weights.to(self.dtype)

    @property
    def logsumexp(self) -> Tensor:
        """[R, H_g, 1] or [R, H_g, C, 1]: ``logits = weights.log() + logsumexp``."""
        total = self.logits.logsumexp(-1, keepdim=True)
        if self.sink_logits is None:
            return total
        return torch.logaddexp(total, self.sink_logits.view(*total.shape[:2], *[1] * (total.ndim - 2)))


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
