"""The functions of a rule for the Triton kernels: source that is written once for each structure, and imported.

A kernel takes them as arguments, in a :class:`tova.kernels.triton_math.Rule`, and compiles them in, as FlexAttention
does with a user's function of a score. A policy's numbers come in two small tensors, so that budgets, sinks and seeds
share what was compiled.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from tova.kernels import generated
from tova.kernels.triton_math import Rule as KernelRule
from tova.policies.base import Ring
from tova.rules.expression import Node, Rule, in_order

MOST_NUMBERS = 8
"""Records and features of a slot that a kernel takes: it holds them in registers from step to step."""

_TYPES = {
    torch.bool: "tl.int1",
    torch.int64: "tl.int64",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
_CALLED = {
    "minimum": "math.minimum({}, {})", "maximum": "math.maximum({}, {})", "remainder": "math.remainder({}, {})",
    "floordiv": "math.floor_divide({}, {})", "div": "math.divide({}, {})", "sqrt": "math.square_root({})",
    "neg": "-{}", "abs": "tl.abs({})", "exp": "tl.exp({})", "log": "tl.log({})", "floor": "tl.floor({})",
    "where": "tl.where({}, {}, {})", "isnan": "{0} != {0}", "isfinite": 'tl.abs({}) < float("inf")',
    "row_sum": "math.row_sum({}, slots)", "row_max": "math.row_max({}, slots)", "row_min": "math.row_min({}, slots)",
    "max_pool": "math.max_pool({}, {}, ranks, slots)", "average_pool": "math.average_pool({}, {}, ranks, slots)",
}  # fmt: skip


def why_not(rule: Rule) -> str | None:
    """Why the Triton kernels cannot take ``rule``, a sentence; None if they can."""
    numbers = sum(not isinstance(r, Ring) for r in rule.records.values()) + len(rule.features)
    if numbers > MOST_NUMBERS:
        return f"it remembers {numbers} numbers per slot, and the kernels hold {MOST_NUMBERS} at most"
    wide = [name for name, r in rule.records.items() if r.width and not isinstance(r, Ring)]
    if wide:
        return f"its record {wide[0]!r} has several numbers per slot and is no Ring"
    silent = [name for name in rings(rule) if name not in rule.observed]
    if silent:
        return f"its ring {silent[0]!r} is not what observe returns"
    if rule.admitted and not rule.reads_attention:
        return "its own weight counts, though it reads no attention"
    if any(node.op == "pow" for node in in_order(*rule.outputs.values())):
        return "it takes a power that is no whole or half number, which Triton has no function for"
    return None


def kernel_rule(rule: Rule, device: torch.device) -> KernelRule:
    """``rule`` as kernels on ``device`` take it.

    Numbers are put there at the first call; in a CUDA graph they must be there already.
    """
    module = _module(rule)
    ints, floats = _numbers(rule.ints, rule.floats, device)
    return KernelRule(
        ints,
        floats,
        module.numbers,
        module.observe if rule.reads_weights else None,
        module.admit if rule.reads_weights else None,
        module.fill,
        module.rank,
    )


def plain_records(rule: Rule) -> list[str]:
    """Names of the records of one number each, in the order the functions take them in."""
    return [name for name, record in rule.records.items() if not isinstance(record, Ring)]


def rings(rule: Rule) -> list[str]:
    """Names of the rings, in the order the functions take them in."""
    return [name for name, record in rule.records.items() if isinstance(record, Ring)]


def needs_order(rule: Rule) -> bool:
    """Whether the functions put slots in order of position, for which they need scratch memory."""
    return any(node.op in ("max_pool", "average_pool") for node in in_order(*rule.outputs.values()))


def counts_steps(rule: Rule) -> bool:
    """Whether the functions or rings ask how many steps were observed."""
    return bool(rings(rule)) or any(node.op == "observed" for node in in_order(*rule.outputs.values()))


@cache  # and never given back: a CUDA graph may point to them
def _numbers(
    ints: tuple[int, ...], floats: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        return (
            torch.tensor(ints or (0,), dtype=torch.int64, device=device),
            torch.tensor(floats or (0.0,), dtype=torch.float64, device=device),
        )


_modules: dict[str, ModuleType] = {}


def _module(rule: Rule) -> ModuleType:
    found = _modules.get(rule.key)
    if found is None:
        found = _modules[rule.key] = generated.load("triton", source(rule))
    return found


def source(rule: Rule) -> str:
    """The module's text."""
    numbers = [f"tl.load(ints + {i})" for i in range(len(rule.ints))]
    numbers += [f"tl.load(floats + {i})" for i in range(len(rule.floats))]
    records, entries = plain_records(rule), rings(rule)
    lines = [
        '"""A policy\'s rule for the Triton kernels, made by tova.rules.triton_code."""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        "from tova.kernels import triton_math as math",
        *_function("numbers", "ints, floats", [], [_tuple(numbers)]),
    ]
    of = _Writer(rule, joined=False)
    observed = of.tuple_of([rule.observed.get(n) or _record(rule, n) for n in records])
    newest = of.tuple_of([rule.observed[n] for n in entries])
    lines += _function("observe", "weight, slots, numbers", of.lines, [observed, newest])
    of = _Writer(rule, joined=False, spread=False)
    admitted = of.tuple_of([rule.admitted.get(n) or rule.fills[n] for n in records])
    newest = of.tuple_of([rule.admitted.get(n) or rule.fills[n] for n in entries])
    lines += _function("admit", "self_weight, numbers", of.lines, [admitted, newest])
    of = _Writer(rule, joined=False, spread=False)
    filled = of.tuple_of([rule.fills[n] for n in records])
    lines += _function("fill", "numbers", of.lines, [filled])
    of = _Writer(rule, joined=True)
    score, protected = of.value(rule.score), of.value(rule.protected)
    if not rule.score.dtype.is_floating_point:
        score = f"({score}).to(tl.float64)"
    lines += _function(
        "rank", "slots, numbers", of.lines, [f"math.spread({score}, slots)", f"slots.held & ({protected} == 0)"]
    )
    return "\n".join(lines) + "\n"


def _function(name: str, arguments: str, body: list[str], results: list[str]) -> list[str]:
    indented = [f"    {line}" for line in [*body, f"return {', '.join(results)}"]]
    return ["", "", "@triton.jit", f"def {name}({arguments}):", *indented]


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)},)" if items else "()"


def _record(rule: Rule, name: str) -> Node:
    return Node("record", (), rule.records[name].dtype or rule.dtype, "slot", name)


class _Writer:
    """Lines that compute nodes, each once.

    Args:
        joined: whether the newest token is held where they are computed.
        spread: whether a number of the row is to be given at every slot.
    """

    def __init__(self, rule: Rule, *, joined: bool, spread: bool = True) -> None:
        self._rule, self._joined, self._spread = rule, joined, spread
        self._names: dict[int, str] = {}
        self._kept: list[Node] = []
        self._ranked = False
        self.lines: list[str] = []

    def tuple_of(self, nodes: list[Node]) -> str:
        """A tuple of the values of nodes."""
        return _tuple([self._given(node) for node in nodes])

    def value(self, node: Node) -> str:
        """The name of a node's value, having written how it is computed."""
        self._kept.append(node)  # a name is by identity
        for n in in_order(node):
            if id(n) not in self._names:
                self._names[id(n)] = self._written(n)
        return self._names[id(node)]

    def _given(self, node: Node) -> str:
        value = self.value(node)
        if node.dtype == torch.bool:  # in memory, and so in registers between steps, a byte
            value = f"tl.where({value}, 1, 0)"
        return f"math.spread({value}, slots)" if self._spread and node.per != "slot" else value

    def _written(self, node: Node) -> str:
        leaf = self._leaf(node)
        if leaf is not None:
            return leaf
        if node.op in ("max_pool", "average_pool") and not self._ranked:
            self.lines.append("ranks = math.ranks(slots)")
            self._ranked = True
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {self._operation(node, [self._names[id(a)] for a in node.args])}")
        return name

    def _leaf(self, node: Node) -> str | None:
        rule, names = self._rule, {"weight": "weight", "self_weight": "self_weight", "position": "slots.position"}
        if node.op in names:
            return names[node.op]
        if node.op in ("held", "count", "newest", "observed"):
            return f"slots.{node.op}"
        if node.op == "literal":
            return repr(node.data)
        if node.op == "constant":
            at = node.data if node.dtype == torch.int64 else len(rule.ints) + node.data
            value = f"numbers[{at}]"
            return f"{value}.to(tl.float32)" if node.dtype == torch.float32 else value
        if node.op == "record":
            value = f"slots.records[{plain_records(rule).index(node.data)}]"
            return f"({value} != 0)" if node.dtype == torch.bool else value
        if node.op == "feature":
            return f"slots.features[{rule.features.index(node.data)}]"
        return None

    def _operation(self, node: Node, args: list[str]) -> str:
        if node.op in _BINARY:
            return f"{args[0]} {_BINARY[node.op]} {args[1]}"
        if node.op in _CALLED:
            return _CALLED[node.op].format(*args)
        if node.op == "not":
            return f"{args[0]} == 0" if node.dtype == torch.bool else f"~{args[0]}"
        if node.op == "cast":
            return f"{args[0]} != 0" if node.dtype == torch.bool else f"{args[0]}.to({_TYPES[node.dtype]})"
        if node.op == "recent_floor":
            return f"math.recent_floor({args[0]}, slots, {self._joined})"
        if node.op == "ring_sum":
            i = rings(self._rule).index(node.data)
            return f"math.ring_sum(slots.rings[{i}], slots.widths[{i}], slots)"
        raise AssertionError(f"an expression has an operation {node.op} that Triton's functions do not know")
