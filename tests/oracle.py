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


@dataclass
class Row:
    """One kept set: positions, what the policy remembers of them, and when others were dropped."""

    kept: list[int] = field(default_factory=list)
    memory: dict[int, float | list[float]] = field(default_factory=dict)
    doubtful: dict[int, int] = field(default_factory=dict)
    evicted_at: dict[int, int] = field(default_factory=dict)
    near_tie: dict[int, bool] = field(default_factory=dict)
    steps: int = 0


def f32(x: float) -> float:
    """Rounded to float32, as records on a model are."""
    return float(np.float32(x))


class Rule:
    """A policy by name; ``options`` as the library's."""

    def __init__(self, name: str, budget: int, layer: int, layers: int, **options: int) -> None:
        self.name, self.options = name, options
        self.budget = budget
        self.recent = {"h2o": 32, "scissorhands": 32, "snapkv": 32, "pyramidkv": 32}.get(name, 1)
        if name == "h2o_half":
            self.recent = budget // 2
        self.recent = options.get("recent_window", self.recent)
        self.sinks = options.get("sinks", 4 if name == "streaming_llm" else 0)
        if name == "pyramidkv" and layers > 1:
            ratio = options.get("pyramid_ratio", 4)
            share = 2 * budget * (ratio * (layers - 1) - layer * (ratio - 1)) // ((ratio + 1) * (layers - 1))
            self.budget = max(share, self.recent + 1)

    def step(self, row: Row, position: int, weights: list[float]) -> None:
        """``weights`` are of the positions in ``row.kept``, before the newest joins."""
        fair = 1 / len(row.kept) if row.kept else 1.0
        for p, w in zip(row.kept, weights, strict=True):
            if self.name == "tova":
                row.memory[p] = w
            elif self.name in ("h2o", "h2o_half"):
                row.memory[p] = f32(row.memory[p] + w)
            elif self.name == "scissorhands":
                row.memory[p] += w > fair
                row.doubtful[p] = row.doubtful.get(p, 0) + (abs(w / fair - 1) < 1e-5)
            elif self.name in ("snapkv", "pyramidkv"):
                window = self.options.get("obs_window", 16)
                row.memory[p][row.steps % window] = w
        row.steps += 1
        row.kept.append(position)
        blank = self.name in ("snapkv", "pyramidkv")
        row.memory[position] = [0.0] * self.options.get("obs_window", 16) if blank else 0.0
        if len(row.kept) > self.budget:
            self.evict(row, position)

    def evict(self, row: Row, step: int) -> None:
        protected = set(row.kept[-self.recent :]) | {p for p in row.kept if p < self.sinks}
        scores = self.scores(row)
        candidates = [p for p in row.kept if p not in protected]
        victim = min(candidates, key=lambda p: (scores[p], p))
        others = [p for p in candidates if p != victim]
        if others:
            low, next_low = scores[victim], min(scores[p] for p in others)
            row.near_tie[step] = abs(next_low - low) <= 1e-5 * max(abs(low), abs(next_low), 1e-30)
            if self.name == "scissorhands":
                doubt = row.doubtful.get(victim, 0)
                close = [p for p in candidates if scores[p] - low <= doubt + row.doubtful.get(p, 0)]
                row.near_tie[step] = any(doubt + row.doubtful.get(p, 0) for p in close)
        row.kept.remove(victim)
        row.evicted_at[victim] = step

    def scores(self, row: Row) -> dict[int, float]:
        if self.name in ("window", "streaming_llm", "full"):
            return {p: float(p) for p in row.kept}
        if self.name in ("snapkv", "pyramidkv"):
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
        batch = key_states.shape[0]
        if self.rows is None:
            self.rows = [Row() for _ in range(batch)]
            self.k = [key_states[b, :, :0] for b in range(batch)]
            self.v = [value_states[b, :, :0] for b in range(batch)]
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

    def __init__(self, name: str, budget: int = 0, padding: list[int] | None = None, **options: int) -> None:
        super().__init__(layer_class_to_replicate=lambda: PhysicalLayer(self))
        self.name, self.budget, self.options, self.padding = name, budget or 10**9, options, padding

    def evicted_at(self) -> torch.Tensor:
        """int64 [layers, batch, columns], as the library states it."""
        columns = self.layers[0].seen
        out = torch.full((len(self.layers), len(self.layers[0].rows), columns), NEVER)
        for index, layer in enumerate(self.layers):
            for b, row in enumerate(layer.rows):
                start = self.padding[b] if self.padding else 0
                out[index, b, :start] = -1
                for position, step in row.evicted_at.items():
                    out[index, b, start + position] = start + step
        return out


def physical_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    layer = key._physical
    cache = layer.cache
    if layer.rule is None:
        layers = module.config.num_hidden_layers
        layer.rule = Rule(cache.name, cache.budget, module.layer_idx, layers, **cache.options)
    batch, heads = query.shape[:2]
    groups = heads // key.shape[1]
    out = torch.zeros(batch, 1, heads, value.shape[-1], dtype=query.dtype)
    window = kwargs.get("sliding_window")
    cap = kwargs.get("softcap")
    for b in range(batch):
        start = cache.padding[b] if cache.padding else 0
        if layer.seen < start:
            continue
        position = layer.seen - start
        row = layer.rows[b]
        while window and row.kept and row.kept[0] <= position - window:  # the layer's own window moves on
            row.evicted_at[row.kept[0]] = row.kept[0] + window - 1
            del row.kept[0]
            layer.k[b], layer.v[b] = layer.k[b][:, 1:], layer.v[b][:, 1:]
        before = list(row.kept)
        k = torch.cat([layer.k[b], key[b]], 1)
        v = torch.cat([layer.v[b], value[b]], 1)
        logits = torch.einsum("hd,hnd->hn", query[b, :, 0], k.repeat_interleave(groups, 0)).float() * scaling
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        weights = logits.softmax(-1)
        out[b, 0] = torch.einsum("hn,hnd->hd", weights.to(v.dtype), v.repeat_interleave(groups, 0))
        layer.rule.step(row, position, weights.mean(0)[:-1].tolist())
        still = set(row.kept)
        keep = torch.tensor([p in still for p in [*before, position]])
        layer.k[b], layer.v[b] = k[:, keep], v[:, keep]
    layer.seen += 1
    return out, None


AttentionInterface.register("physical", physical_attention)
AttentionMaskInterface.register("physical", sdpa_mask)


@torch.inference_mode()
def decode(model, ids: torch.Tensor, cache: PhysicalCache) -> torch.Tensor:
    """Feed ``ids`` [B, T] token by token; float32 logits [B, T, V]. Leaves the model's attention as it was."""
    from tova.compat import cache_argument

    usual = model.config._attn_implementation
    model.set_attn_implementation("physical")
    name = cache_argument(model)
    batch, tokens = ids.shape
    padding = torch.tensor(cache.padding or [0] * batch)
    try:
        out = []
        for t in range(tokens):
            mask = torch.arange(t + 1) >= padding.unsqueeze(1)
            positions = (t - padding).clamp_min(0).unsqueeze(1)
            logits = model(
                input_ids=ids[:, t : t + 1],
                attention_mask=mask.long(),
                position_ids=positions,
                use_cache=True,
                **{name: cache},
            ).logits
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
    """``found`` int64 [layers, B, T] against what ``cache`` dropped when.

    The first difference of a row (the earliest step, then the lowest layer) must be at a near-tie; whatever follows
    from it in that row is not judged.
    """
    expected = cache.evicted_at()
    assert found.shape == expected.shape, (found.shape, expected.shape)
    wrong = found != expected
    excused, unexcused = 0, []
    for b in range(found.shape[1]):
        if not wrong[:, b].any():
            continue
        layers, tokens = wrong[:, b].nonzero(as_tuple=True)
        steps = torch.minimum(found[layers, b, tokens], expected[layers, b, tokens])
        first = min(zip(steps.tolist(), layers.tolist(), strict=True))
        start = cache.padding[b] if cache.padding else 0
        if cache.layers[first[1]].rows[b].near_tie.get(first[0] - start, False):
            excused += 1
        else:
            unexcused.append(f"row {b}: step {first[0]}, layer {first[1]}")
    return Verdict(wrong.numel(), int(wrong.sum()), excused, unexcused)
