"""A policy of one's own that uses much at once, for tests of engines that know none by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tova.policies import Policy, Record, Ring


@dataclass(frozen=True, kw_only=True)
class Everything(Policy):
    """A fading sum with the token's own weight, a ring, a count in int64, a flag, a number in float64, a feature, both
    poolings, numbers of the row, and a protection of its own."""

    name = "everything"

    fade: float = 0.9
    window: int = 5

    def records(self):
        return {
            "sum": Record(),
            "ring": Ring(self.window),
            "hits": Record(dtype=torch.int64),
            "seen": Record(dtype=torch.bool),
            "fine": Record(dtype=torch.float64, fill=0.5),
        }

    def observe(self, slots, attn):
        share = attn.double() * slots.count
        return {
            "sum": self.fade * slots["sum"] + attn,
            "ring": attn / attn.amax(-1, keepdim=True).clamp_min(1e-6),
            "hits": slots["hits"] + (share > 1.0) * (1 + slots.observed % 3),
            "seen": slots["seen"] | (share > 2.0),
            "fine": (slots["fine"] + share).sqrt(),
        }

    def admitted(self, self_weight):
        return {"sum": 2.0 * self_weight, "hits": (self_weight > 0.1).long()}

    def features(self, tokens):
        return {"size": tokens.value.float().abs().amax(-1)}

    def score(self, slots):
        smooth = slots.average_pool(slots["fine"], 3) + slots.max_pool(slots.ring_sum("ring"), 5)
        weighed = torch.where(slots["seen"], smooth, 0.5 * smooth) * (1 + slots["hits"])
        return weighed + slots["sum"] * slots.features["size"] - (slots.positions % 3 == 0) / slots.count

    def protected(self, slots):
        liked = slots["seen"] & (slots.newest - slots.positions < 7) & (slots.positions // 2 % 2 == 1)
        return super().protected(slots) | liked
