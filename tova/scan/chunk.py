"""What a scan works on and what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tova.policies.base import Policy, Schedule
from tova.policies.slots import Slots
from tova.threads import Team


@dataclass
class Chunk:
    """R kept sets, H_g query heads that share one, C queries, N candidates.

    Attributes:
        logits: float32 [R, H_g, C, N]. Candidates are ``kept`` slots in position order, then the chunk's own tokens.
            May be overwritten.
        slots: [R, N] candidates; ``held`` is False for the chunk's own tokens. Updated in place: after the scan it
            holds what survives, with records as of the last step.
        kept: how many of the N candidates come from before the chunk.
        schedule: when the layer evicts, and down to what.
        allowed: bool [R, C, N], what the model itself lets each query see beside causality; None if everything.
        not_padding: bool [R, C], False where the chunk's token is padding; None if none is.
        sink_logits: float32 [R, H_g], a logit per head that only adds to the sum of weights (GPT-OSS); None without.
        dtype: the model's, to which some policies round weights.
        scaling, softcap: what the logits still have to be put through, ``softcap * tanh(logits * scaling / softcap)``;
            other than the defaults only for a scan that ``reads_products``.
        threads: to share the rows among, None if the caller is alone.
    """

    logits: Tensor
    slots: Slots
    kept: int
    schedule: Schedule
    allowed: Tensor | None = None
    not_padding: Tensor | None = None
    sink_logits: Tensor | None = None
    dtype: torch.dtype = torch.float32
    threads: Team | None = None
    scaling: float = 1.0
    softcap: float | None = None

    @property
    def steps(self) -> int:
        """C, how many queries there are."""
        return self.logits.shape[2]

    def scaled(self) -> Chunk:
        """The same with logits in float32 that need nothing done to them; its slots are these very ones."""
        logits = self.logits.float()
        if self.scaling != 1.0:
            logits = logits * self.scaling
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return dataclasses.replace(self, logits=logits, scaling=1.0, softcap=None)

    def present(self) -> Tensor:
        """bool [R, N]: what is held before the chunk, and the chunk's own tokens that are no padding."""
        present = self.slots.held.clone()
        present[:, self.kept :] = True if self.not_padding is None else self.not_padding
        return present

    def count_steps(self, policy: Policy) -> None:
        """Note in the slots which token is the newest now, and how many steps the policy has observed."""
        slots = self.slots
        positions = slots.positions[:, self.kept :]
        if self.not_padding is None:
            slots.newest = positions[:, -1:].clone()
            observed: Tensor | int = self.steps
        else:
            at = torch.arange(self.steps, device=positions.device)
            latest = torch.where(self.not_padding, at, -1).amax(1, keepdim=True)
            slots.newest = torch.where(latest >= 0, positions.gather(1, latest.clamp_min(0)), slots.newest)
            observed = self.not_padding.sum(1, keepdim=True)
        if policy.reads_attention:
            slots.observed = slots.observed + observed


@dataclass
class Decision:
    """Which step drops which candidate.

    Attributes:
        last: int64 [R, N], the last step of the chunk (0-based) that saw the candidate, C if it survives, -1 if the
            chunk never saw it. Query i sees candidate n if ``n - kept <= i <= last[n]``.
        weights: [R, H_g, C, N], not yet divided, where the scan has made them; None if not.
        sums: float32 [R, H_g, C, 1], what they are to be divided by.
    """

    last: Tensor
    weights: Tensor | None = None
    sums: Tensor | None = None


@dataclass(frozen=True)
class Scan:
    """How the evictions of a chunk are decided, as if the policy had evicted step by step.

    Attributes:
        decide: of a policy and a chunk, whose slots move on.
        reads_products: whether the chunk's logits may be a raw product of queries and keys in the model's dtype.
    """

    name: str
    decide: Callable[[Policy, Chunk], Decision]
    reads_products: bool = False


def visible(last: Tensor, kept: int, begin: int, end: int) -> Tensor:
    """bool [R, end - begin, N]: which candidates the steps from ``begin`` see; ``last`` is a :class:`Decision`'s."""
    index = torch.arange(last.shape[1], device=last.device)
    step = torch.arange(begin, end, device=last.device).unsqueeze(1)
    return (index - kept <= step) & (step <= last.unsqueeze(1))


def weights_under(chunk: Chunk, last: Tensor) -> tuple[Tensor, Tensor]:
    """Undivided weights float32 [R, H_g, C, N] and their sums [R, H_g, C, 1], if drops are as in ``last``."""
    logits = chunk.logits.float()
    seen = visible(last, chunk.kept, 0, chunk.steps).unsqueeze(1)
    logits = logits.masked_fill(~seen, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    if chunk.sink_logits is not None:
        top = torch.maximum(top, chunk.sink_logits[:, :, None, None])
    # A query of padding sees nothing, and gets nothing; one that sees but minus infinity gets NaN, as of any softmax.
    top = top.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    weights = logits.sub_(top).exp_()
    sums = weights.sum(-1, keepdim=True)
    if chunk.sink_logits is not None:
        sums = sums + (chunk.sink_logits[:, :, None, None] - top).exp()
    return weights, sums


def softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """[R, H_g, N] beside ``sink_logits`` [R, H_g] if any."""
    if sink_logits is not None:
        return torch.cat([logits, sink_logits.unsqueeze(-1)], -1).softmax(-1)[..., :-1]
    return logits.softmax(-1)


def known_rows(weights: Tensor, *, ask: bool = True) -> tuple[Tensor, Tensor | None]:
    """Combined weights [R, N], zero in rows that are not finite, and bool [R, 1]: which are; None if all.

    ``ask`` whether all are where that does not mean waiting; a step that may be part of a graph must not.
    """
    known = weights.isfinite().all(-1, keepdim=True)
    if ask and weights.device.type == "cpu" and bool(known.all()):
        return weights, None
    return weights.masked_fill(~known, 0.0), known
