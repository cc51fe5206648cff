"""Names for the parts of a replay in torch's profiler: ``tova::logits``, ``scan``, ``mix`` and ``carry``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NOTHING = nullcontext()


def span(part: str) -> AbstractContextManager:
    """What runs within is ``tova::part`` to a profiler; where none is on, asking costs a third of a microsecond.

    ``torch.profiler.record_function`` alone costs seven, whether or not anybody listens.
    """
    return profiler.record_function(f"tova::{part}") if profiler._is_profiler_enabled else _NOTHING
