"""StreamingLLM: a sliding window that never drops the first few tokens, the attention sinks.

Xiao et al.: "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, https://arxiv.org/abs/2309.17453.
The paper also re-indexes positions inside the cache; here rotary positions stay the original ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tova.policies.window import Window


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Window):
    """Drops the oldest position that is not among the first ``sinks`` tokens; ``sinks=0`` is the plain window."""

    name: ClassVar[str] = "streaming_llm"

    sinks: int = 4
