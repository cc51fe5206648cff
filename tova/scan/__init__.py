"""The scan: which step drops which position, given the logits of a chunk of queries.

``reference`` is plain torch and runs any policy on any device; ``cpu`` (numba) and ``gpu`` (Triton) are compiled from a
policy's rule; ``fixed_point`` runs any policy, parallel over steps; ``oldest_first`` just counts. On the same logits
they decide alike. :func:`select` picks one.

Logits that are not finite: a step whose combined weights are not all finite tells the policy nothing (see
:mod:`tova.policies.steps`), and its query's output is NaN. A query that does not see what is not finite, because it
came before, was dropped or is padding, is as if that were not there. Every engine does this, and so keeps the same.
"""

from __future__ import annotations

from tova.scan.chunk import Chunk, Decision, Scan
from tova.scan.select import SCANS, select

__all__ = ["SCANS", "Chunk", "Decision", "Scan", "select"]
