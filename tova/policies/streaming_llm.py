"""StreamingLLM: a sliding window that never drops the first few tokens, the attention sinks.

Xiao et al.: "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, https://arxiv.org/abs/2309.17453.
The paper re-indexes positions inside the cache; ``streaming_llm`` keeps the original ones, as every policy here does,
and ``streaming_llm_reindexed`` is the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tova.policies.window import Window


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Window):
    """Drops the oldest position that is not among the first ``sinks`` tokens; ``sinks=0`` is the plain window."""

    name: ClassVar[str] = "streaming_llm"

    sinks: int = 4


@dataclass(frozen=True, kw_only=True)
class StreamingLLMReindexed(StreamingLLM):
    """StreamingLLM with positions counted inside the cache, keys re-rotated, as its paper and code do.

    The window's tokens keep their distances; what changes is how far the sinks seem: from a query that has lost tokens
    they are as far as the cache is long.
    """

    name: ClassVar[str] = "streaming_llm_reindexed"
    reindexes: ClassVar[bool] = True

    per_head: bool = field(default=False, init=False)
