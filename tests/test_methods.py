"""Methods of the field as policies of one's own, by their parts (docs/policies.md): each runs, decides the same in one
piece, in chunks, token by token and beside a padded row, and is compiled where the page says so."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tova import check
from tova.policies import Policy, Record, Ring, Tova
from tova.rules import why_not


@dataclass(frozen=True, kw_only=True)
class DuoAttention(Policy):
    """Retrieval heads keep everything, the others the first tokens and a window."""

    name = "duo_attention"
    reads_attention = False
    per_head: bool = True
    sinks: int = 4
    retrieval_heads: tuple = ((1,), (0, 1), (), (0,))  # of each layer

    def score(self, slots):
        return slots.positions

    def excess(self, slots, schedule):
        head = torch.arange(len(slots.held)) % slots.kept_sets
        free = torch.isin(head, torch.tensor(self.retrieval_heads[self.layer]))
        return super().excess(slots, schedule).masked_fill(free.unsqueeze(1), 0)


@dataclass(frozen=True, kw_only=True)
class HeadKV(Tova):
    """A budget for each head of each layer."""

    name = "head_kv"
    per_head: bool = True
    budgets: tuple = ((40, 56), (48, 48), (30, 66), (48, 48))

    def excess(self, slots, schedule):
        budgets = torch.tensor(self.budgets[self.layer]).repeat(len(slots.held) // slots.kept_sets)
        return (slots.count - budgets.unsqueeze(1)).clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class AdaKV(Tova):
    """The lowest of all heads of a layer go, each head keeping its ``floor`` best; the maximum over a group counts."""

    name = "ada_kv"
    per_head: bool = True
    floor: int = 10

    def combine(self, heads):
        return heads.weights.amax(1)

    def protected(self, slots):
        score = slots["weight"].masked_fill(~slots.held | slots["weight"].isnan(), -torch.inf)
        best = score.argsort(dim=-1, descending=True).argsort(dim=-1) < self.floor
        return super().protected(slots) | best & slots.held

    def excess(self, slots, schedule):
        sets, size = slots.kept_sets, slots.held.shape[1]
        score = self.score(slots).masked_fill(~slots.held | self.protected(slots), torch.inf)
        rank = score.view(-1, sets * size).argsort(dim=-1, stable=True).argsort(dim=-1)
        too_many = slots.count.view(-1, sets).sum(1, keepdim=True) - sets * schedule.leaves
        return (rank < too_many).view(-1, size).sum(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class RoCo(Policy):
    """The lowest mean weight goes, among those whose weights vary least."""

    name = "roco"
    recent_window: int = 10

    def records(self):
        return {"sum": Record(), "square": Record(), "steps": Record()}

    def observe(self, slots, attn):
        return {"sum": slots["sum"] + attn, "square": slots["square"] + attn**2, "steps": slots["steps"] + 1}

    def score(self, slots):
        return slots["sum"] / slots["steps"]

    def protected(self, slots):
        unseen = slots["steps"] == 0
        variance = slots["square"] / slots["steps"] - (slots["sum"] / slots["steps"]) ** 2
        variance = variance.masked_fill(super().protected(slots) | unseen | ~slots.held, torch.inf)
        rank = variance.argsort(dim=-1, stable=True).argsort(dim=-1)
        return unseen | (rank >= self.layer_budget - self.recent_window - self.sinks)


@dataclass(frozen=True, kw_only=True)
class Keyformer(Policy):
    """The lowest sum of softmaxes of logits with Gumbel noise, warmer at every step; the noise is a hash."""

    name = "keyformer"
    recent_window: int = 12

    def combine(self, heads):
        return (heads.weights.log() + heads.logsumexp).mean(1)

    def records(self):
        return {"sum": Record()}

    def observe(self, slots, attn):
        uniform = ((slots.positions * 7919 + slots.observed * 104729) % 65536 + 0.5) / 65536
        warm = (attn - (-uniform.log()).log()) / (1 + 0.01 * slots.observed)
        raw = (warm - warm.masked_fill(~slots.held, -torch.inf).amax(-1, keepdim=True)).exp()
        raw = raw.masked_fill(~slots.held, 0.0)
        return {"sum": slots["sum"] + raw / raw.sum(-1, keepdim=True)}

    def score(self, slots):
        return slots["sum"]


@dataclass(frozen=True, kw_only=True)
class Cake(Policy):
    """Mean and variance of the last ``steps`` weights, pooled; shares of layers are a list."""

    name = "cake"
    recent_window: int = 8
    steps: int = 8
    spread: float = 200.0

    def records(self):
        return {"weights": Ring(self.steps), "squares": Ring(self.steps)}

    def observe(self, slots, attn):
        return {"weights": attn, "squares": attn**2}

    def score(self, slots):
        mean = slots.ring_sum("weights") / self.steps
        variance = (slots.ring_sum("squares") - self.steps * mean**2) / (self.steps - 1)
        return slots.max_pool(mean + self.spread * variance, 5)


@dataclass(frozen=True, kw_only=True)
class RKV(Policy):
    """Pooled weights of the last ``steps`` queries, less the likeness to other keys held."""

    name = "r_kv"
    per_head: bool = True
    recent_window: int = 8
    steps: int = 8
    share: float = 0.1

    def records(self):
        return {"looks": Ring(self.steps)}

    def observe(self, slots, attn):
        return {"looks": attn}

    def score(self, slots):
        keys = torch.nn.functional.normalize(slots.keys.flatten(0, 1), dim=-1)
        keys = keys.masked_fill(~slots.held.unsqueeze(-1), 0.0)
        alike = (keys @ keys.transpose(1, 2)).sum(-1) / slots.count
        return self.share * slots.max_pool(slots.ring_sum("looks"), 7) - (1 - self.share) * alike


@dataclass(frozen=True, kw_only=True)
class TrimKV(Policy):
    """A share per token, given as it is written, that decays with its age."""

    name = "trim_kv"
    reads_attention = False
    per_head: bool = True

    def features(self, tokens):
        return {"share": torch.sigmoid(tokens.key.float().mean(-1))}  # stands for a trained gate

    def score(self, slots):
        return (slots.newest - slots.positions) * slots.features["share"].log()


@dataclass(frozen=True, kw_only=True)
class MorphKV(Policy):
    """The lowest sum of the last ``steps`` queries' weights, at every step."""

    name = "morph_kv"
    per_head: bool = True
    recent_window: int = 16
    steps: int = 16

    def records(self):
        return {"looks": Ring(self.steps)}

    def observe(self, slots, attn):
        return {"looks": attn}

    def score(self, slots):
        return slots.ring_sum("looks")


COMPILED = (Cake, TrimKV, MorphKV)
REFERENCE = {
    DuoAttention: "excess",
    HeadKV: "excess",
    AdaKV: "excess",
    RoCo: "argsort",
    Keyformer: "combine",
    RKV: "slots.keys",
}


@pytest.mark.parametrize("method", [*COMPILED, *REFERENCE], ids=lambda method: method.name)
def test_a_method_of_the_field_runs_and_decides_alike_each_way(method: type[Policy]) -> None:
    policy = method(budget=48)
    if method is RKV:  # the checks of single functions have no keys to show
        assert check._decides_alike(policy)
        assert check._rows_are_independent(policy)
    else:
        assert len(check.check(policy)) >= 4


@pytest.mark.parametrize("method", [*COMPILED, *REFERENCE], ids=lambda method: method.name)
def test_it_is_compiled_where_it_is_an_expression_and_the_reason_is_named_where_not(method: type[Policy]) -> None:
    reason = why_not(method(budget=48))
    if method in COMPILED:
        assert reason is None
    else:
        assert REFERENCE[method] in str(reason)
