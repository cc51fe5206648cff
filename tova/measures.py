"""What a run lost by forgetting: perplexity, retained mass, heavy-hitter recall, lifetimes.

Steps count from a sequence's first real token. Before step k (the budget) nothing has been dropped, so averages over
all steps dilute every comparison: the primary figures are over the *saturated* steps t >= k.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tova import compat
from tova.errors import UsageError
from tova.eviction_log import NEVER, PADDING
from tova.limits import check_text, vocabulary
from tova.observers import Seen
from tova.shapes import Bool, Float, Int

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

HEAVY_HITTERS = 32
_LOGITS_AT_ONCE = 2**27
_MANY_WORDS = 2**18
_NUMBERS_AT_ONCE = 2**20  # few enough to stay in a processor's cache


def token_nll(
    model: PreTrainedModel,
    ids: Tensor,
    cache: Cache | None = None,
    segment: int = 0,
    prompt: int = 0,
) -> Tensor:
    """Negative log-likelihood of every token but the first, in nats, teacher-forced.

    Args:
        model: a causal language model; with an evicting cache, one switched over by :func:`tova.enable`.
        ids: integers [B, T] on any device, no padding. Nothing is put before it: if the model wants a BOS, it is
            ids[:, 0].
        cache: an empty cache, evicting or any of transformers'; None lets the model see everything.
        segment: tokens per forward, so that logits of T x vocabulary never exist at once; 0 chooses. With a cache the
            text may be fed in any pieces; without one it is a single forward.
        prompt: the first ``prompt`` tokens are one call, prefilled as the cache says; all that follows is as if
            decoded. It makes a difference to ``prefill=one_shot`` only, which then needs the prompt's logits at once.

    Returns:
        float32 [B, T - 1], float64 from a float64 model; index t is the loss of token t + 1, predicted by the query at
        step t. A NaN on the way stays one.

    Raises:
        UsageError: the text is none the model can read, the cache has been used, or the model does not use it.
    """
    ids = _checked(model, ids, cache, segment, prompt)
    batch, tokens = ids.shape
    if cache is None:
        segment = tokens
    elif segment < 1:
        segment = max(128, _LOGITS_AT_ONCE // ((vocabulary(model) or _MANY_WORDS) * batch))
    cached = {"use_cache": False} if cache is None else {compat.cache_argument(model): cache, "use_cache": True}
    one_shot = getattr(cache, "prefill", None) == "one_shot"
    if one_shot and not 2 <= prompt < tokens:
        raise UsageError(f"prompt must be at least 2 and below the text's {tokens} tokens, got {prompt}")
    begins = [*range(prompt, tokens - 1, segment)] if one_shot else [*range(0, tokens - 1, segment)]
    if one_shot:
        begins.insert(0, 0)
    losses = []
    try:
        with torch.inference_mode():
            for begin, end in zip(begins, [*begins[1:], tokens - 1], strict=True):
                if one_shot and begin:
                    _prefill(cache, "every_step")
                logits = model(input_ids=ids[:, begin:end], **cached).logits
                targets = ids[:, begin + 1 : end + 1].to(logits.device)
                losses.append(_cross_entropy(logits, targets))
    except IndexError as e:
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(most, int) and tokens > most:  # a table of positions that was not known to be one
            raise UsageError(f"{tokens} tokens are more than the {most} positions this model has ({e})") from e
        raise
    finally:
        if one_shot:
            _prefill(cache, "one_shot")
    if cache is not None and (seen := _seen(cache)) != tokens - 1:
        raise UsageError(
            f"{type(model).__name__} does not use the cache it is given: of {tokens - 1} tokens it has seen {seen}"
        )
    return torch.cat(losses, 1)


def _checked(model: PreTrainedModel, ids: Tensor, cache: Cache | None, segment: int, prompt: int) -> Int[Tensor, "B T"]:
    """int64 [B, T], where the model reads it; raises for what :func:`token_nll` cannot measure."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        got = (
            f"{str(ids.dtype).removeprefix('torch.')} {[*ids.shape]}" if isinstance(ids, Tensor) else type(ids).__name__
        )
        raise UsageError(f"ids must be a tensor of integers [batch, tokens], got {got}")
    batch, tokens = ids.shape
    if tokens < 2:
        raise UsageError(f"perplexity needs at least 2 tokens, got {tokens}")
    if not batch:
        raise UsageError("ids has no rows")
    for name, value in (("segment", segment), ("prompt", prompt)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{name} must be an integer of at least 0, got {value!r}")
    if prompt >= tokens:
        raise UsageError(f"prompt must be below the text's {tokens} tokens, got {prompt}")
    check_text(model, ids)
    if cache is not None:
        if not hasattr(cache, "get_seq_length"):
            raise UsageError(
                f"cache must be a tova.EvictingCache or one of transformers' caches, got {type(cache).__name__}"
            )
        if _seen(cache):
            raise UsageError(
                f"the cache has been used, for {_seen(cache)} tokens: losses are measured from a text's beginning; "
                "take a new cache, or reset() this one"
            )
    # Of a model that is spread out, or kept elsewhere, the hooks that did so move what comes in.
    return ids.long() if model.device.type == "meta" else ids.to(model.device, torch.int64)


def _seen(cache: Cache) -> int:
    """Tokens that have gone into a cache, or into one of those side by side."""
    return max(int(one.get_seq_length()) for one in (cache, *getattr(cache, "caches", ())))


def _prefill(cache: Any, how: str) -> None:
    cache.prefill = how


def _cross_entropy(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Logarithm of the sum of exponentials minus the target's logit: float32 [B, T], float64 for float64 logits.

    ``torch.nn.functional.cross_entropy`` adds up exponentials in float32, which over a whole vocabulary is off by 1e-5,
    always to the same side. Here all is float64, a little at a time, and rounded once at the end: each loss is right to
    1e-7 of itself. A NaN among the logits gives NaN; an infinite one gives infinity, or NaN if it is the target's.

    Args:
        logits: [B, T, V] of any floating dtype.
        targets: int64 [B, T].
    """
    dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
    wide = _wide(logits.device)
    out = torch.empty(targets.shape, dtype=dtype, device=logits.device)
    rows = max(1, _NUMBERS_AT_ONCE // logits.shape[-1])
    for b in range(targets.shape[0]):
        for begin in range(0, targets.shape[1], rows):
            part = slice(begin, begin + rows)
            piece = logits[b, part].to(wide)
            wanted = piece.gather(-1, targets[b, part].unsqueeze(-1)).squeeze(-1)
            out[b, part] = piece.logsumexp(-1) - wanted
    return out


def _wide(device: torch.device) -> torch.dtype:
    """What sums are added up in: float64, which Apple's GPUs do not know."""
    return torch.float32 if device.type == "mps" else torch.float64


def perplexity(losses: Iterable[Tensor]) -> float:
    """exp of the mean loss over all tokens of all documents: long documents weigh more."""
    total, count = 0.0, 0
    for loss in losses:
        total += float(loss.double().sum())
        count += loss.numel()
    return perplexity_of(total / count) if count else float("nan")


def perplexity_of(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is more than a float holds, NaN for NaN."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class AttentionReport:
    """Per layer and step, how much of the attention was on what the query could see.

    All arrays are [layers, B, steps] on the CPU; step t is at index t. Step 0 has no earlier positions: its mass
    without itself is NaN and it counts in no average. So it is for padding.

    Attributes:
        mass: share of the weight on *earlier* positions that lay on visible ones, the query's own position left out
            of both: the measure of the canonical trace, where tokens do not attend to themselves.
        mass_with_self: share of the whole row on visible positions, the query's own among them.
        hits: how many of the ``min(32, t)`` most-attended earlier positions were visible; 0 where the attention is NaN,
            as the masses are then.
        possible: ``min(32, t)``, or fewer where the layer has a window of its own.
    """

    mass: Float[Tensor, "L B T"]
    mass_with_self: Float[Tensor, "L B T"]
    hits: Int[Tensor, "L B T"]
    possible: Int[Tensor, "L B T"]

    def over(self, first_step: int, row: int = 0) -> LayerMeans:
        """Means per layer of batch row ``row`` over the steps from ``first_step`` on, added up in float64.

        A step that counts and is NaN makes its layer's mean NaN.
        """
        counted = self.possible[:, row, first_step:] > 0

        def means(shares: Tensor) -> list[float]:
            counting = shares[:, row, first_step:].double().masked_fill(~counted, 0.0)
            return (counting.sum(-1) / counted.sum(-1)).tolist()

        return LayerMeans(
            steps=int(counted[0].sum()) if len(counted) else 0,
            retained_mass=means(self.mass),
            retained_mass_with_self=means(self.mass_with_self),
            hits=self.hits[:, row, first_step:].sum(-1).tolist(),
            possible=self.possible[:, row, first_step:].sum(-1).tolist(),
        )


@dataclass(frozen=True)
class LayerMeans:
    """Means per layer over ``steps`` steps; recall is hits over possible, pooled over steps."""

    steps: int
    retained_mass: list[float]
    retained_mass_with_self: list[float]
    hits: list[int]
    possible: list[int]


class AttentionMeasures:
    """Observer: retained mass and heavy-hitter recall of a run, in closed loop.

    For query t of layer l the row is the softmax of that run's own query over that run's own keys of all positions
    0..t, dropped ones included, as if nothing had been forgotten, averaged over the query heads that share a kept
    set. Where a layer has a window of its own, only positions inside it count. It costs about one more full
    attention and keeps all keys; rows are made in blocks, never T x T.

    With a kept set per key/value head the figures are averaged over sets, hits summed.

    Args:
        block: queries at a time.
        compiled: take the compiled pass where it can (CPU, numba); the figures are the same up to rounding.
    """

    def __init__(self, block: int = 128, compiled: bool = True) -> None:
        self._block = block
        self._compiled = compiled and importlib.util.find_spec("numba") is not None
        self._keys: dict[int, Tensor] = {}
        self._filled: dict[int, int] = {}
        self._found: dict[int, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}

    def see(self, seen: Seen) -> None:
        """Measure the new queries of one layer."""
        steps = seen.query.shape[2]
        keys = self._append(seen.layer, seen.key)
        found = self._found.setdefault(seen.layer, [])
        for begin in range(0, steps, self._block):
            end = min(begin + self._block, steps)
            found.append(self._measure(seen, begin, end, keys[:, :, : seen.first + end]))

    def _append(self, layer: int, key: Float[Tensor, "B K n D"]) -> Float[Tensor, "B K T D"]:
        filled = self._filled.get(layer, 0)
        total = filled + key.shape[2]
        if layer not in self._keys:
            self._keys[layer] = key.clone()
        else:
            stored = self._keys[layer]
            if total > stored.shape[2]:
                room = max(total, stored.shape[2] + stored.shape[2] // 2)
                stored = torch.nn.functional.pad(stored[:, :, :filled], (0, 0, 0, room - filled))
                self._keys[layer] = stored
            stored[:, :, filled:total] = key
        self._filled[layer] = total
        return self._keys[layer][:, :, :total]

    def _measure(
        self, seen: Seen, begin: int, end: int, keys: Float[Tensor, "B K T D"]
    ) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B n"], Int[Tensor, "B n"], Int[Tensor, "B n"]]:
        device = keys.device
        batch, heads = seen.query.shape[:2]
        columns = keys.shape[2]
        evicted_at = seen.evicted_at[..., :columns]
        sets = evicted_at.shape[1]
        steps = torch.arange(seen.first + begin, seen.first + end, device=device)
        logits = seen.attention.logits(seen.query[:, :, begin:end], keys).view(batch, sets, heads // sets, -1, columns)
        if self._compiled and device.type == "cpu" and seen.visibility is None and not (evicted_at == PADDING).any():
            from tova import measures_cpu

            on_visible, mass, hits = measures_cpu.measure(
                logits.flatten(0, 1), evicted_at.flatten(0, 1), seen.first + begin, HEAVY_HITTERS
            )
            hits = hits.masked_fill(on_visible.isnan(), 0)
            possible = steps.clamp_max(HEAVY_HITTERS).expand(batch, -1) * sets
            mass = mass.masked_fill(steps == 0, float("nan")).view(batch, sets, -1)
            return mass.mean(1), on_visible.view_as(mass).mean(1), hits.view_as(mass).sum(1), possible
        # [B, G, R, n]: what the model itself would let the query see, self included.
        column = torch.arange(columns, device=device)
        allowed = (evicted_at != PADDING).unsqueeze(2) & (column <= steps.unsqueeze(1))
        if seen.visibility is not None:
            everything = column.expand(batch, sets, columns)
            allowed = allowed & seen.visibility.block(steps, everything)
        row = logits.masked_fill_(~allowed.unsqueeze(2), float("-inf")).softmax(-1).mean(2)
        visible = allowed & (evicted_at.unsqueeze(2) >= steps.unsqueeze(1))
        itself = column == steps.unsqueeze(1)
        earlier = allowed & ~itself

        def on(where: Tensor) -> Tensor:
            return (row * where).sum(-1, dtype=_wide(device))

        on_visible = on(visible).float()
        possible = earlier.sum(-1).clamp_max(HEAVY_HITTERS)
        hits = _hits(row.masked_fill(~earlier, -1.0), visible, possible)
        # Not one minus the query's own weight: where that is nearly all, the difference would be rounding.
        mass = (on(visible & earlier) / on(earlier).clamp_min(torch.finfo(torch.float32).tiny)).float()
        mass = mass.masked_fill(possible == 0, float("nan"))
        return mass.mean(1).cpu(), on_visible.mean(1).cpu(), hits.sum(1).cpu(), possible.sum(1).cpu()

    @property
    def report(self) -> AttentionReport:
        """Everything measured so far."""
        if not self._found:
            raise UsageError("attention measures: nothing has been processed yet")
        layers = [
            [torch.cat(parts, 1) for parts in zip(*self._found[layer], strict=True)] for layer in sorted(self._found)
        ]
        return AttentionReport(*(torch.stack(arrays) for arrays in zip(*layers, strict=True)))


def _hits(
    row: Float[Tensor, "*rows T"], visible: Bool[Tensor, "*rows T"], wanted: Int[Tensor, "*rows"]
) -> Int[Tensor, "*rows"]:
    """int64 [...]: of the ``wanted`` largest entries of each row, ties to the lower position, how many are visible.

    Entries that do not count are negative.
    """
    top = row.topk(min(HEAVY_HITTERS, row.shape[-1]), dim=-1).values
    least = top.gather(-1, (wanted - 1).clamp_min(0).unsqueeze(-1))
    above = row > least
    tied = row == least
    room = wanted.unsqueeze(-1) - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1) <= room))
    return (chosen & visible & (row >= 0)).sum(-1)


def lifetimes(evicted_at: Int[Tensor, "*rows T"]) -> tuple[Int[Tensor, "*rows T"], Bool[Tensor, "*rows T"]]:
    """How long each token was kept: steps from its own to the last that saw it.

    Args:
        evicted_at: int64 [..., T] as :attr:`tova.EvictingCache.evicted_at` gives it.

    Returns:
        int64 [..., T], -1 for padding, and bool [..., T]: True where the token was still held at the end, so that
        the lifetime is censored at ``T - 1 - position``.
    """
    tokens = evicted_at.shape[-1]
    position = torch.arange(tokens, device=evicted_at.device)
    censored = evicted_at == NEVER
    last = evicted_at.masked_fill(censored, tokens - 1)
    return torch.where(evicted_at == PADDING, -1, last - position), censored
