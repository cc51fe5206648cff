"""The expression that a policy's pure functions are: what an engine is made from.

A rule is a few expressions over what a row of slots holds. Each is a :class:`Node`, an operation on nodes; equal nodes
are one object, so that what is used twice is computed once. The operations (``Node.op``), arguments in order:

``weight``, ``self_weight``   of the newest query: on each slot (observe) and on its own token (admitted)
``position``, ``held``        int64 and bool, of each slot
``record``, ``feature``       of each slot, by name (``data``)
``count``, ``newest``, ``observed``   int64, of the row: how many are held, the newest position, steps observed so far
``constant``                  a number of the policy's: ``data`` is its index in ``Rule.ints`` (int64) or in
                              ``Rule.floats``
``literal``                   a number that is part of the structure (a mask, a shift, true, false): ``data`` is it
elementwise                   add sub mul div neg abs minimum maximum pow exp log sqrt floor floordiv remainder,
                              lt le gt ge eq ne, and or xor not, shl shr, where, cast, isnan, isfinite
``row_sum row_max row_min``   over all slots of a row
``recent_floor``              of n: int64 of the row, the lowest position among the n newest held; the largest int64 if
                              n <= 0, at most the lowest position held if fewer are
``max_pool average_pool``     of x and a kernel: over adjacent held positions; what it is at empty slots is not defined
``ring_sum``                  of a ring, by name (``data``): float64 of each slot, entry 0 upward

Arguments of an elementwise operation have the dtype of its result, or, where it gives a bool, one dtype among them;
``cast`` converts. ``minimum`` and ``maximum`` give NaN where either is; ``remainder`` has the sign of the divisor;
``floordiv`` is of int64 and rounds down; ``shl`` and ``shr`` are of int64 and shift by a literal from 0 to 63; ``and``,
``or``, ``xor`` and ``not`` are of bools or of int64. Float operations are those of their dtype, each rounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from tova.policies.base import Record, Ring

DTYPES = (torch.bool, torch.int64, torch.float32, torch.float64)
"""What a node may be of."""
LEAVES = (
    "weight", "self_weight", "position", "held", "record", "feature", "count", "newest", "observed", "constant",
    "literal",
)  # fmt: skip
OVER_SLOTS = ("row_sum", "row_max", "row_min")
"""What one number of a row is made of all its slots."""
IN_ORDER = ("recent_floor", "max_pool", "average_pool")
"""What goes by the order of positions."""

Per = Literal["slot", "row", "number"]


@dataclass(frozen=True, eq=False)
class Node:
    """An operation and what it is of.

    Attributes:
        per: one value for each slot [R, S], for each row [R, 1], or one for all.
        data: what beside arguments tells it from others: a name, an index, a number.
    """

    op: str
    args: tuple[Node, ...]
    dtype: torch.dtype
    per: Per
    data: Any = None


@dataclass(frozen=True, eq=False)
class Rule:
    """A policy's pure functions as expressions.

    ``observe`` sees the slots before the newest token joins, ``score`` and ``protected`` afterwards, so the leaves have
    other values there.

    Attributes:
        dtype: of records without one of their own, and of weights.
        records: as the policy's ``records()``.
        observed: what a step makes of the records that it changes, in the record's dtype, per slot; of a
            :class:`~tova.policies.base.Ring` the newest entry. Steps that are not finite change nothing.
        admitted: what the newest token joins with by its own weight, in the record's dtype, per row or number; of a
            ring the newest entry.
        fills: what it joins with otherwise, and with all records that are not ``admitted``: numbers.
        score: per slot (or row, or number), a float or int64.
        protected: bool, per slot (or row, or number).
        reads_attention: as the policy's; without it a step does not count as observed.
        ints, floats: the policy's numbers, which ``constant`` nodes point to.
        drops_oldest: the score is the position, nothing is remembered and the protection is what every policy has.
    """

    name: str
    dtype: torch.dtype
    records: Mapping[str, Record]
    observed: Mapping[str, Node]
    admitted: Mapping[str, Node]
    fills: Mapping[str, Node]
    score: Node
    protected: Node
    reads_attention: bool
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    drops_oldest: bool = False

    @cached_property
    def reads_weights(self) -> bool:
        """Whether weights combined over heads are needed at all."""
        return self.reads_attention or bool(self.admitted)

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Names of the features that are used, sorted."""
        return tuple(sorted({n.data for n in in_order(*self.outputs.values()) if n.op == "feature"}))

    @cached_property
    def outputs(self) -> dict[str, Node]:
        """Every expression by what it is for."""
        out = {f"observed {name}": node for name, node in self.observed.items()}
        out |= {f"admitted {name}": node for name, node in self.admitted.items()}
        out |= {f"fill {name}": node for name, node in self.fills.items()}
        return out | {"score": self.score, "protected": self.protected}

    @cached_property
    def key(self) -> str:
        """A digest of the structure: rules of one key differ in ``ints``, ``floats`` and widths of rings alone."""
        nodes = in_order(*self.outputs.values())
        number = {id(node): i for i, node in enumerate(nodes)}
        lines = [
            f"{n.op} {[number[id(a)] for a in n.args]} {n.dtype} {n.per} {n.data!r}" for n in nodes
        ]  # fmt: skip
        lines += [f"{what}: {number[id(node)]}" for what, node in self.outputs.items()]
        lines += [f"{name}: {isinstance(r, Ring)} {r.dtype or self.dtype}" for name, r in self.records.items()]
        lines.append(f"{self.dtype} {self.reads_attention}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def in_order(*nodes: Node) -> list[Node]:
    """All nodes that these are made of, arguments before what is made of them, each once."""
    out: list[Node] = []
    done: set[int] = set()
    todo = [(node, False) for node in reversed(nodes)]
    while todo:
        node, ready = todo.pop()
        if id(node) in done:
            continue
        if ready:
            done.add(id(node))
            out.append(node)
        else:
            todo.append((node, True))
            todo += [(a, False) for a in reversed(node.args)]
    return out
