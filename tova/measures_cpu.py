"""Retained mass and heavy hitters of a block of queries in one pass over their logits, compiled for the CPU.

What :class:`tova.measures.AttentionMeasures` computes in plain torch, for the common case: float32 on the CPU, no
padding, and no window of the model's own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tova.kernels.compile import jit
from tova.kernels.numba_math import F, exp
from tova.threads import team


def measure(logits: Tensor, evicted_at: Tensor, first: int, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
    """The head-averaged full rows of queries ``first``..``first + C - 1``, looked at once and not kept.

    Args:
        logits: float32 [R, H, C, N] against all columns 0..N - 1; overwritten.
        evicted_at: int64 [R, N], the last step at which each column was visible.
        first: column of the first query.
        wanted: heavy hitters per query.

    Returns:
        float32 [R, C] twice: the weight on visible columns, the query's own among them, and the share of the weight on
        *earlier* columns that lay on visible ones; and int64 [R, C]: how many of the ``min(wanted, t)`` most-attended
        earlier columns were visible, ties to the lower one.
    """
    rows, _, steps, _ = logits.shape
    visible, mass = (torch.empty(rows, steps, dtype=torch.float32, device=logits.device) for _ in range(2))
    hits = torch.empty(rows, steps, dtype=torch.int64, device=logits.device)
    gone = evicted_at.contiguous()

    def part(queries: slice) -> None:
        for r in range(rows):
            _measure(
                logits[r].numpy(), gone[r].numpy(), first, queries.start, queries.stop, wanted,
                visible[r].numpy(), mass[r].numpy(), hits[r].numpy(),
            )  # fmt: skip

    with team() as threads:
        if threads is None:
            part(slice(0, steps))
        else:
            threads.share(part, [(piece,) for piece in threads.parts(steps)])
    return visible, mass, hits


@jit
def _measure(logits, gone, first, begin, end, wanted, visible, mass, hits):  # type: ignore[no-untyped-def]
    """One kept set's queries ``begin`` to ``end``; arrays as in :func:`measure`, without rows."""
    heads, _, columns = logits.shape
    attn = np.empty(columns, np.float32)
    weight = np.empty(wanted, np.float32)
    place = np.empty(wanted, np.int64)
    for i in range(begin, end):
        t = first + i
        for j in range(t + 1):
            attn[j] = F(0.0)
        for h in range(heads):
            row = logits[h, i]
            top = row[t]
            for j in range(t):
                top = max(top, row[j])
            total = F(0.0)
            for j in range(t + 1):
                e = exp(row[j] - top)
                row[j] = e
                total += e
            share = F(1.0) / (total * F(heads))
            for j in range(t + 1):
                attn[j] += row[j] * share
        # Earlier columns are added up themselves: taking the own weight from 1 would leave little where it is nearly 1.
        seen = 0.0
        earlier = 0.0
        for j in range(t):
            weight_of = np.float64(attn[j])
            earlier += weight_of
            seen += weight_of if gone[j] >= t else 0.0
        visible[i] = F(seen + np.float64(attn[t]))
        mass[i] = F(seen / earlier) if earlier != 0.0 else F(0.0)
        count = 0
        least = F(-1.0)
        at = 0
        for j in range(t):
            w = attn[j]
            if count < wanted:
                weight[count] = w
                place[count] = j
                count += 1
            elif w > least:
                weight[at] = w
                place[at] = j
            else:
                continue
            if count == wanted:  # the next to go: the lowest, of equal ones the later
                at = 0
                for c in range(1, wanted):
                    if weight[c] < weight[at] or (weight[c] == weight[at] and place[c] > place[at]):
                        at = c
                least = weight[at]
        found = 0
        for c in range(count):
            found += gone[place[c]] >= t
        hits[i] = found
