"""One layer on random numbers: queries, keys and values, a window of its own, a prompt and tokens one at a time."""

from __future__ import annotations

import torch

from support.models import not_padding
from tova.replay import Attention, LayerState, replay

SIZE = 16
"""Numbers in a key."""


def qkv(
    batch: int = 2, heads: tuple[int, int] = (4, 2), tokens: int = 40, size: int = 8, *, width: int | None = None,
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0), seed: int | torch.Generator = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """Normal float32 numbers times ``scales``: query [B, H, T, D], key [B, K, T, D], value [B, K, T, ``width`` or D].

    ``heads`` are those of queries and of keys; ``seed`` may be a generator that goes on being used.
    """
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    shapes = ((heads[0], size), (heads[1], size), (heads[1], width or size))
    return [
        torch.randn(batch, h, tokens, d, generator=generator, dtype=torch.float32) * scale
        for (h, d), scale in zip(shapes, scales, strict=True)
    ]


class Window:
    """A layer's own window: a query sees the ``width`` columns up to its own."""

    def __init__(self, width: int) -> None:
        self.width = width

    def block(self, queries: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return columns.unsqueeze(2) > queries.view(1, 1, -1, 1) - self.width


def prompt_and_tokens(
    policy, scan, *, heads=(4, 2), padding=None, how=None, batch=2, prompt=16, tokens=50, width=SIZE, device="cpu",
    **more,
):  # fmt: skip
    """Outputs [B, H, tokens, D] and the state after a prompt and one token at a time."""
    query, key, value = (x.to(device) for x in qkv(batch, heads, tokens, SIZE, width=width, scales=(2, 1, 1), seed=3))
    state = LayerState.empty(policy, key, value, heads[1] if policy.per_head else 1, log=True)
    real = None if padding is None else not_padding(padding, prompt).to(device)
    out = []
    for begin, end in ((0, prompt), *((t, t + 1) for t in range(prompt, tokens))):
        out.append(
            replay(
                query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end], state, policy,
                how or Attention(SIZE**-0.5), scan=scan, not_padding=real if begin == 0 else None, **more,
            )
        )  # fmt: skip
    return torch.cat(out, 2), state
