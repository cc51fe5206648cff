"""An independent judge: a cache that really evicts, one token at a time, by policies written out once more.

Nothing here uses the library's scan, slots, policies or masks. Keys and values of dropped tokens are gone from the
tensors; policies are a few lines on plain Python numbers. It is slow, and simple enough to be read and believed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NEVER = torch.iinfo(torch.int64).max
HALF = ("h2o_half", "h2o_head")
SUMS = ("h2o", *HALF)
LAST = ("tova", "tova_head", "tova_official", "tova_value")
RINGS = ("snapkv", "pyramidkv")
PER_HEAD = ("tova_head", "h2o_head", "scissorhands_paper", "l2norm")
REINDEXED = "streaming_llm_reindexed"


@dataclass
class Row:
    """One kept set: positions, what the policy remembers of them, and when others were dropped."""

    kept: list[int] = field(default_factory=list)
    memory: dict = field(default_factory=dict)
    norm: dict[int, float] = field(default_factory=dict)
    doubtful: dict[int, int] = field(default_factory=dict)
    evicted_at: dict[int, int] = field(default_factory=dict)
    near_tie: dict[int, bool] = field(default_factory=dict)
    steps: int = 0
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None


def f32(x: float) -> float:
    """Rounded to float32, as records on a model are."""
    return float(np.float32(x))


class Rule:
    """A policy by name; ``options`` as the library's."""

    def __init__(self, name: str, budget: int, layer: int, layers: int, **options) -> None:
        self.name, self.options = name, options
        self.budget = budget
        self.recent = {"h2o": 32, "scissorhands": 32, "snapkv": 32, "pyramidkv": 32, "scissorhands_paper": 10}.get(
            name, 1
        )
        if name in HALF:
            self.recent = budget // 2
        if name == "tova_official":
            self.recent = 0
        self.recent = max(options.get("recent_window", self.recent), 0 if name == "tova_official" else 1)
        self.sinks = options.get("sinks", 4 if name in ("streaming_llm", REINDEXED) else 0)
        self.window = options.get("obs_window", 16)
        self.history = options.get("history", 400)
        self.per_head = options.get("per_head", name in PER_HEAD)
        self.every = options.get("every", 1)
        shares = options.get(
            "layer_budgets", f"linear:{options.get('pyramid_ratio', 4)}" if name == "pyramidkv" else ""
        )
        if isinstance(shares, list):
            self.budget = max(shares[layer], self.sinks + options.get("recent_window", 0) + 1)
        elif shares.startswith("linear") and layers > 1:
            ratio = int(shares.partition(":")[2])
            share = 2 * budget * (ratio * (layers - 1) - layer * (ratio - 1)) // ((ratio + 1) * (layers - 1))
            self.budget = max(
                share, (self.recent if name in RINGS + SUMS else options.get("recent_window", 0)) + self.sinks + 1
            )

    def step(self, row: Row, position: int, weights: list[float], own: float) -> None:
        """``weights`` of the positions in ``row.kept``, before the newest joins; ``own`` is its weight on itself."""
        fair = 1 / len(row.kept) if row.kept else 1.0
        for p, w in zip(row.kept, weights, strict=True):
            if self.name in LAST:
                row.memory[p] = w
            elif self.name in SUMS:
                row.memory[p] = f32(row.memory[p] + w)
            elif self.name == "scissorhands":
                row.memory[p] += w > fair
                row.doubtful[p] = row.doubtful.get(p, 0) + (abs(w / fair - 1) < 1e-5)
            elif self.name == "scissorhands_paper":
                row.memory[p][row.steps % self.history] = w < fair
                row.doubtful[p] = row.doubtful.get(p, 0) + (abs(w / fair - 1) < 1e-5)
            elif self.name in RINGS:
                row.memory[p][row.steps % self.window] = w
        row.kept.append(position)
        row.memory[position] = {
            **dict.fromkeys(RINGS, [0.0] * self.window),
            "scissorhands_paper": [0] * self.history,
            "tova_official": own,
            "h2o_head": own,
        }.get(self.name, 0.0)
        if isinstance(row.memory[position], list):
            row.memory[position] = list(row.memory[position])
        row.steps += 1
        if len(row.kept) >= self.budget + self.every:
            remains = self.budget
            if self.name == "scissorhands_paper":
                remains = max(
                    self.budget - int(self.options.get("drop_share", 0.5) * self.budget), self.sinks + self.recent
                )
            scores = self.scores(row)
            protected = set(row.kept[len(row.kept) - self.recent :]) | {p for p in row.kept if p < self.sinks}
            while len(row.kept) > remains:
                self.drop(row, position, scores, protected)

    def drop(self, row: Row, step: int, scores: dict[int, float], protected: set[int]) -> None:
        candidates = [p for p in row.kept if p not in protected]
        victim = min(candidates, key=lambda p: (scores[p], p))
        others = [p for p in candidates if p != victim]
        if others:
            low, next_low = scores[victim], min(scores[p] for p in others)
            near = abs(next_low - low) <= 1e-5 * max(abs(low), abs(next_low), 1e-30)
            if self.name.startswith("scissorhands"):
                doubt = row.doubtful.get(victim, 0)
                close = [p for p in others if scores[p] - low <= doubt + row.doubtful.get(p, 0)]
                near = any(doubt + row.doubtful.get(p, 0) for p in close)
            row.near_tie[step] = near or row.near_tie.get(step, False)
        row.kept.remove(victim)
        row.evicted_at[victim] = step

    def scores(self, row: Row) -> dict[int, float]:
        if self.name in ("window", "streaming_llm", "full", REINDEXED):
            return {p: float(p) for p in row.kept}
        if self.name == "l2norm":
            return {p: -row.norm[p] for p in row.kept}
        if self.name == "tova_value":
            return {p: f32(row.memory[p] * row.norm[p]) for p in row.kept}
        if self.name == "scissorhands_paper":
            return {p: -float(sum(row.memory[p])) for p in row.kept}
        if self.name in RINGS:
            sums = [math.fsum(row.memory[p]) for p in row.kept]
            radius = self.options.get("pool_kernel", 7) // 2
            return {p: max(sums[max(0, i - radius) : i + radius + 1]) for i, p in enumerate(row.kept)}
        return {p: row.memory[p] for p in row.kept}


class PhysicalLayer(CacheLayerMixin):
    """Keeps the keys and values of what it holds and of nothing else; rows of a batch are separate lists."""

    def __init__(self, cache: PhysicalCache) -> None:
        super().__init__()
        self.cache, self.seen, self.rows, self.rule = cache, 0, None, None

    def lazy_initialization(self, key_states, value_states) -> None:
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        assert key_states.shape[2] == 1, "one token at a time"
        self.is_initialized = True
        tagged = key_states[:]
        tagged._physical = self
        return tagged, value_states

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length):
        steps = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.seen + steps, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class PhysicalCache(Cache):
    """``padding`` is the number of padding columns in front of each row."""

    def __init__(self, name: str, budget: int = 0, padding: list[int] | None = None, **options) -> None:
        super().__init__(layer_class_to_replicate=lambda: PhysicalLayer(self))
        self.name, self.budget, self.options, self.padding = name, budget or 10**9, options, padding
        self.rotary = None

    def evicted_at(self) -> torch.Tensor:
        """int64 [layers, batch, columns] or [layers, batch, heads, columns], as the library states it."""
        first = self.layers[0]
        sets = len(first.rows[0])
        out = torch.full((len(self.layers), len(first.rows), sets, first.seen), NEVER)
        for index, layer in enumerate(self.layers):
            for b, rows in enumerate(layer.rows):
                start = self.padding[b] if self.padding else 0
                for g, row in enumerate(rows):
                    out[index, b, g, :start] = -1
                    for position, step in row.evicted_at.items():
                        out[index, b, g, start + position] = start + step
        return out[:, :, 0] if sets == 1 else out


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[..., n, D] turned by cosines and sines [n, E]: the first E dimensions, paired half by half."""
    turned, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = turned.shape[-1] // 2
    turned = turned * cos + torch.cat([-turned[..., half:], turned[..., :half]], -1) * sin
    return torch.cat([turned, still], -1)


def physical_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    layer = key._physical
    cache = layer.cache
    batch, heads, _, size = query.shape
    if layer.rule is None:
        layers = module.config.num_hidden_layers
        layer.rule = Rule(cache.name, cache.budget, module.layer_idx, layers, **cache.options)
        sets = key.shape[1] if layer.rule.per_head else 1
        share = key.shape[1] // sets
        layer.rows = [
            [
                Row(k=key[b, g * share : (g + 1) * share, :0], v=value[b, g * share : (g + 1) * share, :0])
                for g in range(sets)
            ]
            for b in range(batch)
        ]
    rule = layer.rule
    sets = len(layer.rows[0])
    groups = heads // key.shape[1]
    share, shared_queries = key.shape[1] // sets, heads // sets
    out = torch.zeros(batch, 1, heads, value.shape[-1], dtype=query.dtype)
    cap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    scaling = size**-0.5 if scaling is None else scaling
    for b in range(batch):
        start = cache.padding[b] if cache.padding else 0
        if layer.seen < start:
            continue
        position = layer.seen - start
        for g, row in enumerate(layer.rows[b]):
            if attention_mask is not None:  # what the layer itself no longer looks at is gone
                stay = attention_mask[b, 0, 0, [start + p for p in row.kept]]
                for p in [p for p, seen in zip(row.kept, stay.tolist(), strict=True) if not seen]:
                    row.evicted_at[p] = position - 1
                    row.kept.remove(p)
                row.k, row.v = row.k[:, stay], row.v[:, stay]
            before = list(row.kept)
            q = query[b, g * shared_queries : (g + 1) * shared_queries, 0]
            k = torch.cat([row.k, key[b, g * share : (g + 1) * share]], 1)
            v = torch.cat([row.v, value[b, g * share : (g + 1) * share]], 1)
            q_at, k_at = q, k
            if rule.name == REINDEXED:  # positions counted inside the cache
                n = k.shape[1]
                true = torch.tensor([[*before, position]])
                cos, sin = (x[0] for x in cache.rotary(query, true))
                cos_in, sin_in = (x[0] for x in cache.rotary(query, torch.arange(n)[None]))
                k_at = turn(turn(k, cos, -sin), cos_in, sin_in)
                q_at = turn(turn(q[:, None], cos[-1:], -sin[-1:]), cos_in[-1:], sin_in[-1:])[:, 0]
            logits = torch.einsum("hd,hnd->hn", q_at, k_at.repeat_interleave(groups, 0)).float() * scaling
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            if sinks is not None:
                own_sinks = sinks[g * shared_queries : (g + 1) * shared_queries, None].float()
                weights = torch.cat([logits, own_sinks], 1).softmax(-1)[:, :-1]
            else:
                weights = logits.softmax(-1)
            mixed = torch.einsum("hn,hnd->hd", weights.to(v.dtype), v.repeat_interleave(groups, 0))
            out[b, 0, g * shared_queries : (g + 1) * shared_queries] = mixed
            if rule.name == "l2norm":
                row.norm[position] = float(key[b, g * share : (g + 1) * share, 0].float().norm(dim=-1).mean())
            if rule.name == "tova_value":
                row.norm[position] = float(value[b, g * share : (g + 1) * share, 0].float().abs().sum(-1).mean())
            average = weights.mean(0)
            rule.step(row, position, average[:-1].tolist(), float(average[-1]))
            still = set(row.kept)
            keep = torch.tensor([p in still for p in [*before, position]])
            row.k, row.v = k[:, keep], v[:, keep]
    layer.seen += 1
    return out, None


AttentionInterface.register("physical", physical_attention)
AttentionMaskInterface.register("physical", sdpa_mask)


@torch.inference_mode()
def decode(model, ids: torch.Tensor, cache: PhysicalCache, last_logits_only: bool = False) -> torch.Tensor:
    """Feed ``ids`` [B, T] token by token; float32 logits [B, T, V]. Leaves the model's attention as it was."""
    from tova.compat import cache_argument

    usual = model.config._attn_implementation
    model.set_attn_implementation("physical")
    name = cache_argument(model)
    rotaries = [m for n, m in model.named_modules() if n.split(".")[-1] == "rotary_emb"]
    cache.rotary = rotaries[0] if rotaries else None
    batch, tokens = ids.shape
    padding = torch.tensor(cache.padding or [0] * batch)
    try:
        out = []
        for t in range(tokens):
            more = {}
            if cache.padding:
                mask = torch.arange(t + 1) >= padding.unsqueeze(1)
                more = dict(attention_mask=mask.long(), position_ids=(t - padding).clamp_min(0).unsqueeze(1))
            logits = model(input_ids=ids[:, t : t + 1], use_cache=True, **{name: cache}, **more).logits
            out.append(logits.float())
        return torch.cat(out, 1)
    finally:
        model.set_attn_implementation(usual)


@dataclass(frozen=True)
class Verdict:
    """How far a run's decisions are from the physical decode's.

    ``entries`` kept-set entries (layer, row, token) were compared; ``different`` of them differ; ``excused`` rows have
    their first difference where the physical decode's two lowest scores were closer than float32 resolves.
    """

    entries: int
    different: int
    excused: int
    unexcused: list[str]

    def __str__(self) -> str:
        return f"{self.different} of {self.entries} eviction times differ, {self.excused} rows begin at a near-tie"


def compare(found: torch.Tensor, cache: PhysicalCache) -> Verdict:
    """``found`` int64 [layers, B, T] or [layers, B, heads, T] against what ``cache`` dropped when.

    The first difference of a row (the earliest step, then the lowest layer) must be at a near-tie; whatever follows
    from it in that row is not judged.
    """
    expected = cache.evicted_at()
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if found.ndim == 3:
        found, expected = found.unsqueeze(2), expected.unsqueeze(2)
    wrong = found != expected
    excused, unexcused = 0, []
    for b in range(found.shape[1]):
        if not wrong[:, b].any():
            continue
        layers, heads, tokens = wrong[:, b].nonzero(as_tuple=True)
        steps = torch.minimum(found[layers, b, heads, tokens], expected[layers, b, heads, tokens])
        step, layer, head = min(zip(steps.tolist(), layers.tolist(), heads.tolist(), strict=True))
        start = cache.padding[b] if cache.padding else 0
        if cache.layers[layer].rows[b][head].near_tie.get(step - start, False):
            excused += 1
        else:
            unexcused.append(f"row {b}: step {step}, layer {layer}, head {head}")
    return Verdict(wrong.numel(), int(wrong.sum()), excused, unexcused)
