"""A policy's pure functions, called once with symbols in place of tensors: its rule, or why it is no expression.

Symbols know what torch's tensors know as far as an expression can: operators, methods and functions, with torch's own
promotion of dtypes (a Python number is weak). What depends on the numbers in a tensor, changes one in place or is no
operation of an expression raises :class:`NotExpressibleError` with a few words on what it was.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tova.policies.base import Policy, Record, Ring
from tova.rules.expression import DTYPES, Node, Per, Rule

_RANK = {"number": 0, "row": 1, "slot": 2}
_PROTECTED_BY_ALL = Policy.protected


class NotExpressibleError(Exception):
    """Something that is no part of an expression; the message completes "the function ..."."""


def trace(policy: Policy, dtype: torch.dtype) -> Rule:
    """The rule of ``policy`` with records in ``dtype``.

    Raises:
        NotExpressibleError: it is no expression; the message is a sentence.
    """
    first, again = _trace(policy, dtype), _trace(policy, dtype)
    alike = [str(rule.ints) + str(rule.floats) + rule.key for rule in (first, again)]
    if alike[0] != alike[1]:
        raise NotExpressibleError("its functions give something else when they are called again")
    return first


def _trace(policy: Policy, dtype: torch.dtype) -> Rule:
    tracer = Tracer()
    records = _call("records", policy.records)
    for name, record in records.items():
        if (record.dtype or dtype) not in DTYPES:
            raise NotExpressibleError(f"records: {name!r} is of {_named(record.dtype or dtype)}")
    slots = SymbolicSlots(tracer, records, dtype)
    observed = {}
    if policy.reads_attention:
        weight = tracer.leaf("weight", dtype, "slot")
        observed = _records_of("observe", _call("observe", policy.observe, slots, weight), records, dtype, "slot")
    own = tracer.leaf("self_weight", dtype, "row")
    admitted = _records_of("admitted", _call("admitted", policy.admitted, own), records, dtype, "row")
    score = _call("score", policy.score, slots)
    if not isinstance(score, Symbol) or score.per != "slot" or score.dtype == torch.bool:
        raise NotExpressibleError(f"score returns {_what(score)}, and not a number for each slot")
    protected = _call("protected", policy.protected, slots)
    if not isinstance(protected, Symbol) or protected.per != "slot" or protected.dtype != torch.bool:
        raise NotExpressibleError(f"protected returns {_what(protected)}, and not a bool for each slot")
    fills = {}
    for name, record in records.items():
        of = record.dtype or dtype
        fill = bool(record.fill) if of == torch.bool else int(record.fill) if of == torch.int64 else float(record.fill)
        fills[name] = tracer.number(fill, of)
    ints, floats = tuple(tracer.ints), tuple(tracer.floats)
    usual: Any = _PROTECTED_BY_ALL(policy, slots)  # type: ignore[arg-type]
    ranked = score.node.args[0] if score.node.op == "cast" else score.node
    return Rule(
        name=policy.name or type(policy).__name__,
        dtype=dtype,
        records=records,
        observed=observed,
        admitted=admitted,
        fills=fills,
        score=score.node,
        protected=protected.node,
        reads_attention=policy.reads_attention,
        ints=ints,
        floats=floats,
        drops_oldest=ranked.op == "position"
        and not (records or policy.reads_attention or policy.wants_features)
        and tracer.same(protected.node, usual.node),
    )


def how_heads_combine(policy: Policy) -> str | None:
    """``mean`` or ``rounded mean`` (of weights rounded to the model's dtype), as ``combine`` says; None for others."""
    try:
        found = policy.combine(_Heads())  # type: ignore[arg-type]
    except Exception:  # it asks for something that is neither
        return None
    return found.what if isinstance(found, _HeadWeights) and found.what.endswith("mean") else None


class _HeadWeights:
    """Weights of several heads, or their mean."""

    def __init__(self, what: str) -> None:
        self.what = what

    def mean(self, dim: int) -> _HeadWeights:
        if dim != 1 or self.what.endswith("mean"):
            raise NotExpressibleError("combine takes another mean")
        return _HeadWeights(f"{self.what} mean".lstrip())

    def float(self) -> _HeadWeights:
        if self.what == "rounded":
            raise NotExpressibleError("combine takes the mean of rounded weights in float32")
        return self


class _Heads:
    weights, rounded = _HeadWeights(""), _HeadWeights("rounded")


def _call(function: str, of: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return of(*arguments)
    except NotExpressibleError as e:
        raise NotExpressibleError(f"{function} {e}") from e
    except Exception as e:
        raise NotExpressibleError(f"{function} cannot be called with symbols: {type(e).__name__}: {e}") from e


def _records_of(
    function: str, found: Any, records: Mapping[str, Record], dtype: torch.dtype, per: Per
) -> dict[str, Node]:
    """What a function returned, each in its record's dtype."""
    if not isinstance(found, Mapping):
        raise NotExpressibleError(f"{function} returns {_what(found)}, and not a dict by record")
    out = {}
    for name, value in found.items():
        if name not in records:
            raise NotExpressibleError(f"{function} returns {name!r}, which records() does not name")
        if records[name].width and not isinstance(records[name], Ring):
            raise NotExpressibleError(f"{function} changes {name!r}, which has several numbers per slot and is no Ring")
        of = records[name].dtype or dtype
        if not isinstance(value, Symbol) or value.per != per or not torch.can_cast(value.dtype, of):
            raise NotExpressibleError(
                f"{function} returns {name!r} as {_what(value)}, its record is {_named(of)} per {per}"
            )
        out[name] = value.tracer.cast(value, of).node
    return out


def _what(value: Any) -> str:
    return f"{_named(value.dtype)} per {value.per}" if isinstance(value, Symbol) else type(value).__name__


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Tracer:
    """Makes nodes, equal ones once, and collects a policy's numbers."""

    def __init__(self) -> None:
        self.ints: list[int] = []
        self.floats: list[float] = []
        self._nodes: dict[Any, Node] = {}

    def node(self, op: str, args: tuple[Node, ...], dtype: torch.dtype, per: Per, data: Any = None) -> Node:
        key = op, tuple(id(a) for a in args), dtype, per, repr(data)
        return self._nodes.setdefault(key, Node(op, args, dtype, per, data))

    def leaf(self, op: str, dtype: torch.dtype, per: Per, data: Any = None) -> Symbol:
        return Symbol(self, self.node(op, (), dtype, per, data), per)

    def literal(self, value: Any, dtype: torch.dtype) -> Node:
        return self.node("literal", (), dtype, "number", value)

    def number(self, value: Any, dtype: torch.dtype) -> Node:
        """A Python number as one of the policy's, in ``dtype``."""
        if dtype == torch.bool:
            return self.literal(bool(value), dtype)
        if dtype == torch.int64:
            if isinstance(value, float) and not value.is_integer():
                raise NotExpressibleError(f"makes an integer of {value}")
            self.ints.append(int(value))
            return self.node("constant", (), dtype, "number", len(self.ints) - 1)
        self.floats.append(float(value))
        return self.node("constant", (), dtype, "number", len(self.floats) - 1)

    def cast(self, value: Any, dtype: torch.dtype) -> Symbol:
        """A symbol or number in ``dtype``."""
        if not isinstance(value, Symbol):
            return Symbol(self, self.number(value, dtype), "number")
        if dtype not in DTYPES:
            raise NotExpressibleError(f"converts to {_named(dtype)}")
        node = value.node
        if node.dtype != dtype:
            node = self.node("cast", (node,), dtype, node.per)
        return Symbol(self, node, value.per)

    def apply(self, op: str, *values: Symbol, dtype: torch.dtype | None = None) -> Symbol:
        """An elementwise operation; the result has the last value's dtype unless told."""
        nodes = tuple(v.node for v in values)
        per = max((n.per for n in nodes), key=lambda p: _RANK[p])
        node = self.node(op, nodes, values[-1].dtype if dtype is None else dtype, per)
        return Symbol(self, node, max((v.per for v in values), key=lambda p: _RANK[p]))

    def same(self, a: Node, b: Node) -> bool:
        """Whether two nodes are of one structure, and of the same numbers."""
        if a is b:
            return True
        if (a.op, a.dtype, a.per, len(a.args)) != (b.op, b.dtype, b.per, len(b.args)):
            return False
        if a.op == "constant":
            values: Any = self.ints if a.dtype == torch.int64 else self.floats
            return bool(values[a.data] == values[b.data])
        return a.data == b.data and all(self.same(x, y) for x, y in zip(a.args, b.args, strict=True))


class SymbolicSlots:
    """What a policy sees in place of :class:`~tova.policies.slots.Slots`."""

    def __init__(self, tracer: Tracer, records: Mapping[str, Record], dtype: torch.dtype) -> None:
        leaf = tracer.leaf
        given = {
            "_tracer": tracer,
            "_kinds": records,
            "positions": leaf("position", torch.int64, "slot"),
            "held": leaf("held", torch.bool, "slot"),
            "count": leaf("count", torch.int64, "row"),
            "observed": leaf("observed", torch.int64, "row"),
            "newest": leaf("newest", torch.int64, "row"),
            "records": _ByName(lambda name: self._record(name, dtype), records),
            "features": _ByName(lambda name: leaf("feature", torch.float32, "slot", name)),
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotExpressibleError(f"sets slots.{name}")

    def __getattr__(self, name: str) -> Any:
        raise NotExpressibleError(f"asks for slots.{name}")

    def __getitem__(self, record: str) -> Symbol:
        return self.records[record]

    def _record(self, name: str, dtype: torch.dtype) -> Symbol:
        record = self._kinds[name]
        if isinstance(record, Ring):
            raise NotExpressibleError(f"looks into the ring {name!r} itself, and not by slots.ring_sum({name!r})")
        if record.width:
            raise NotExpressibleError(f"reads {name!r}, which has several numbers per slot and is no Ring")
        return self._tracer.leaf("record", record.dtype or dtype, "slot", name)

    def first(self, n: int) -> Symbol:
        return self.held & (self.positions < n)

    def newest_held(self, n: int) -> Symbol:
        tracer = self._tracer
        floor = tracer.node("recent_floor", (tracer.number(_plain(n), torch.int64),), torch.int64, "row")
        return self.held & (self.positions >= Symbol(tracer, floor, "row"))

    def max_pool(self, x: Any, kernel: int) -> Symbol:
        return self._pool("max_pool", x, kernel)

    def average_pool(self, x: Any, kernel: int) -> Symbol:
        return self._pool("average_pool", x, kernel)

    def _pool(self, op: str, x: Any, kernel: int) -> Symbol:
        if not isinstance(x, Symbol) or x.per != "slot" or not x.dtype.is_floating_point:
            raise NotExpressibleError(f"pools {_what(x)}")
        if _plain(kernel) == 1:
            return x
        tracer = self._tracer
        size = tracer.number(kernel, torch.int64)
        return Symbol(tracer, tracer.node(op, (x.node, size), x.dtype, "slot"), "slot")

    def ring_sum(self, name: str) -> Symbol:
        if not isinstance(self._kinds[name], Ring):
            raise NotExpressibleError(f"asks for the sum of {name!r}, which is no Ring")
        return self._tracer.leaf("ring_sum", torch.float64, "slot", name)


class _ByName(Mapping[str, Any]):
    """Symbols by name, made when asked for."""

    def __init__(self, make: Callable[[str], Symbol], names: Mapping[str, Any] | None = None) -> None:
        self._make, self._names = make, names

    def __getitem__(self, name: str) -> Symbol:
        if self._names is not None and name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        if self._names is None:
            raise NotExpressibleError("goes through all features")
        return iter(self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _plain(value: Any) -> int:
    """``value`` as a number that is known while tracing."""
    if isinstance(value, Symbol):
        raise NotExpressibleError("uses a number in a tensor as a size")
    return int(value)


class Symbol:
    """Stands for a tensor [R, S] (``per`` slot) or [R, 1] (row) of which only the expression is known."""

    __array_ufunc__ = None  # numpy's numbers leave operators to this class

    def __init__(self, tracer: Tracer, node: Node, per: Per) -> None:
        self.tracer, self.node, self.per = tracer, node, per

    @property
    def dtype(self) -> torch.dtype:
        return self.node.dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if _OTHER_NAMES.get(name, name) in _OPERATIONS:
            return lambda *args, **kwargs: _apply(name, (self, *args), kwargs)
        if name.endswith("_"):
            raise NotExpressibleError(f"changes a tensor in place ({name})")
        raise NotExpressibleError(f"uses {name}, which is no operation of an expression")

    def where(self, condition: Any, other: Any) -> Symbol:
        return _apply("where", (condition, self, other), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(getattr(func, "__name__", str(func)).strip("_"), args, kwargs or {})

    def __setitem__(self, index: Any, value: Any) -> None:
        raise NotExpressibleError("changes a tensor in place")

    def __getitem__(self, index: Any) -> Symbol:
        raise NotExpressibleError("looks at parts of a tensor by index")

    def _number(self, *_: Any) -> Any:
        raise NotExpressibleError("depends on the numbers in a tensor (a branch, a loop, a number taken out of it)")

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = __array__ = _number

    def _in_place(self, other: Any) -> Any:
        raise NotExpressibleError("changes a tensor in place")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _in_place
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _in_place
    __hash__ = object.__hash__


def _operator(name: str, swapped: bool = False) -> Callable[..., Symbol]:
    def operator(self: Symbol, *other: Any) -> Symbol:
        return _apply(name, (*other, self) if swapped else (self, *other), {})

    return operator


for _symbol, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}.items():  # fmt: skip
    setattr(Symbol, f"__{_symbol}__", _operator(_name))
    setattr(Symbol, f"__r{_symbol}__", _operator(_name, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs"):
    setattr(Symbol, f"__{_name}__", _operator(_name))
setattr(Symbol, "__invert__", _operator("bitwise_not"))  # noqa: B010


def _apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
    """``torch.name`` or ``Tensor.name`` of symbols and numbers."""
    name = _OTHER_NAMES.get(name, name)
    if name not in _OPERATIONS:
        raise NotExpressibleError(f"uses {name}, which is no operation of an expression")
    if kwargs.get("out") is not None:
        raise NotExpressibleError("changes a tensor in place (out=)")
    tracer = next(x.tracer for x in (*args, *kwargs.values()) if isinstance(x, Symbol))
    try:
        return _OPERATIONS[name](tracer, *args, **kwargs)
    except TypeError as e:
        raise NotExpressibleError(f"calls {name} in a way that is no part of an expression ({e})") from e


# -- operations: each of a tracer, then as torch's -------------------------------------------------------------------


def _operand(value: Any) -> Any:
    """A symbol, or a number that is known while tracing."""
    if isinstance(value, Symbol):
        return value
    if isinstance(value, Tensor):
        if value.ndim:
            raise NotExpressibleError("uses a tensor of its own")
        return value
    if hasattr(value, "item"):  # numpy's
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise NotExpressibleError(f"uses {type(value).__name__} where a tensor or number belongs")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise NotExpressibleError(f"uses {value}, which 64 bits do not hold")
    return value


def _promoted(*values: Any) -> torch.dtype:
    """The dtype torch gives to these together."""
    one: Any = None
    for value in values:
        like = torch.empty(1, dtype=value.dtype) if isinstance(value, Symbol) else value
        one = like if one is None else torch.empty(_dims(one, like), dtype=torch.result_type(one, like))
    dtype = torch.result_type(one, one)
    if dtype not in DTYPES:
        raise NotExpressibleError(f"computes in {_named(dtype)}")
    return dtype


def _dims(a: Any, b: Any) -> tuple[int, ...]:
    return (1,) if any(isinstance(x, Tensor) and x.ndim for x in (a, b)) else ()


def _together(tracer: Tracer, *values: Any, floating: bool = False) -> list[Symbol]:
    """All in the dtype torch promotes them to, a float one at least if ``floating``."""
    operands = [_operand(v) for v in values]
    dtype = _promoted(*operands)
    if floating and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
        if dtype not in DTYPES:
            raise NotExpressibleError(f"computes in {_named(dtype)}")
    return [tracer.cast(x.item() if isinstance(x, Tensor) else x, dtype) for x in operands]


def _arithmetic(op: str) -> Callable[..., Symbol]:
    def apply(tracer: Tracer, a: Any, b: Any) -> Symbol:
        a, b = _together(tracer, a, b)
        if a.dtype == torch.bool:
            if op == "sub":
                raise NotExpressibleError("subtracts bools, which torch does not")
            return tracer.apply({"add": "or", "mul": "and", "minimum": "and", "maximum": "or"}[op], a, b)
        return tracer.apply(op, a, b)

    return apply


def _comparison(op: str) -> Callable[..., Symbol]:
    def apply(tracer: Tracer, a: Any, b: Any) -> Symbol:
        return tracer.apply(op, *_together(tracer, a, b), dtype=torch.bool)

    return apply


def _div(tracer: Tracer, a: Any, b: Any) -> Symbol:
    return tracer.apply("div", *_together(tracer, a, b, floating=True))


def _floor_divide(tracer: Tracer, a: Any, b: Any) -> Symbol:
    a, b = _together(tracer, a, b)
    if a.dtype != torch.int64:
        raise NotExpressibleError(f"divides {_named(a.dtype)} by //, which is of integers here")
    return tracer.apply("floordiv", a, b)


def _remainder(tracer: Tracer, a: Any, b: Any) -> Symbol:
    a, b = _together(tracer, a, b)
    if a.dtype == torch.bool:
        raise NotExpressibleError("takes the remainder of bools")
    return tracer.apply("remainder", a, b)


def _pow(tracer: Tracer, a: Any, b: Any) -> Symbol:
    exponent = b.item() if isinstance(b, Tensor) else b
    a_, b_ = _together(tracer, a, b)
    if not isinstance(exponent, Symbol):
        if exponent in (1, 2, 3) and a_.dtype != torch.bool:
            out = a_
            for _ in range(int(exponent) - 1):
                out = tracer.apply("mul", out, a_)
            return out
        if exponent in (0.5, -0.5, -1, -2) and a_.dtype.is_floating_point:
            of = a_ if exponent == -1 else _sqrt(tracer, a_) if abs(exponent) == 0.5 else tracer.apply("mul", a_, a_)
            return of if exponent > 0 else _reciprocal(tracer, of)
    if not a_.dtype.is_floating_point:
        raise NotExpressibleError(f"takes powers of {_named(a_.dtype)} other than square and cube")
    return tracer.apply("pow", a_, b_)


def _bits(op: str) -> Callable[..., Symbol]:
    def apply(tracer: Tracer, a: Any, b: Any) -> Symbol:
        operands = [_operand(x) for x in (a, b)]
        dtype = _promoted(*operands)
        if dtype.is_floating_point:
            raise NotExpressibleError(f"uses & | ^ on {_named(dtype)}")
        return tracer.apply(op, *(_structural(tracer, x, dtype) for x in operands))

    return apply


def _structural(tracer: Tracer, value: Any, dtype: torch.dtype) -> Symbol:
    """A mask or a number of bits is part of the structure: engines compile for it."""
    if isinstance(value, Symbol):
        return tracer.cast(value, dtype)
    number = value.item() if isinstance(value, Tensor) else value
    return Symbol(tracer, tracer.literal(bool(number) if dtype == torch.bool else int(number), dtype), "number")


def _shift(op: str) -> Callable[..., Symbol]:
    def apply(tracer: Tracer, a: Any, b: Any) -> Symbol:
        bits = _operand(b)
        if isinstance(bits, (Symbol, Tensor)) or not isinstance(bits, int) or not 0 <= bits < 64:
            raise NotExpressibleError("shifts by other than a plain number from 0 to 63")
        if not isinstance(a, Symbol) or a.dtype != torch.int64:
            raise NotExpressibleError("shifts other than an int64 tensor")
        return tracer.apply(op, a, _structural(tracer, bits, torch.int64))

    return apply


def _logical(op: str) -> Callable[..., Symbol]:
    def apply(tracer: Tracer, *values: Any) -> Symbol:
        return tracer.apply(op, *(_structural(tracer, _operand(x), torch.bool) for x in values))

    return apply


def _bitwise_not(tracer: Tracer, a: Symbol) -> Symbol:
    if a.dtype.is_floating_point:
        raise NotExpressibleError(f"inverts the bits of {_named(a.dtype)}")
    return tracer.apply("not", a)


def _floating(op: str) -> Callable[..., Symbol]:
    def apply(tracer: Tracer, a: Symbol) -> Symbol:
        (a,) = _together(tracer, a, floating=True)
        return tracer.apply(op, a)

    return apply


_sqrt = _floating("sqrt")


def _neg(tracer: Tracer, a: Symbol) -> Symbol:
    if a.dtype == torch.bool:
        raise NotExpressibleError("takes the negative of bools, which torch does not")
    return tracer.apply("neg", a)


def _abs(tracer: Tracer, a: Symbol) -> Symbol:
    if a.dtype == torch.bool:
        raise NotExpressibleError("takes abs of bools")
    return tracer.apply("abs", a)


def _floor(tracer: Tracer, a: Symbol) -> Symbol:
    return tracer.apply("floor", a) if a.dtype.is_floating_point else a


def _ceil(tracer: Tracer, a: Symbol) -> Symbol:
    return _neg(tracer, tracer.apply("floor", _neg(tracer, a))) if a.dtype.is_floating_point else a


def _square(tracer: Tracer, a: Symbol) -> Symbol:
    return _pow(tracer, a, 2)


def _reciprocal(tracer: Tracer, a: Symbol) -> Symbol:
    return _div(tracer, 1.0, a)


def _sigmoid(tracer: Tracer, a: Symbol) -> Symbol:
    (a,) = _together(tracer, a, floating=True)
    return _reciprocal(tracer, _arithmetic("add")(tracer, 1.0, tracer.apply("exp", tracer.apply("neg", a))))


def _isnan(tracer: Tracer, a: Symbol) -> Symbol:
    if a.dtype.is_floating_point:
        return tracer.apply("isnan", a, dtype=torch.bool)
    return Symbol(tracer, tracer.literal(False, torch.bool), a.per)


def _isfinite(tracer: Tracer, a: Symbol) -> Symbol:
    if a.dtype.is_floating_point:
        return tracer.apply("isfinite", a, dtype=torch.bool)
    return Symbol(tracer, tracer.literal(True, torch.bool), a.per)


def _isinf(tracer: Tracer, a: Symbol) -> Symbol:
    if a.dtype.is_floating_point:
        return _comparison("eq")(tracer, tracer.apply("abs", a), math.inf)
    return Symbol(tracer, tracer.literal(False, torch.bool), a.per)


def _clamp(tracer: Tracer, a: Any, min: Any = None, max: Any = None) -> Symbol:
    if min is None and max is None:
        raise NotExpressibleError("clamps to nothing")
    values = _together(tracer, *(x for x in (a, min, max) if x is not None))
    out = values.pop(0)
    if min is not None:
        out = tracer.apply("maximum", out, values.pop(0))
    return out if max is None else tracer.apply("minimum", out, values.pop(0))


def _clamp_min(tracer: Tracer, a: Any, min: Any) -> Symbol:
    return _clamp(tracer, a, min)


def _clamp_max(tracer: Tracer, a: Any, max: Any) -> Symbol:
    return _clamp(tracer, a, None, max)


def _where(tracer: Tracer, condition: Any, input: Any, other: Any) -> Symbol:
    if not isinstance(condition, Symbol) or condition.dtype != torch.bool:
        raise NotExpressibleError(f"chooses by {_what(condition)}, and not by a bool tensor")
    a, b = _together(tracer, input, other)
    return tracer.apply("where", condition, a, b)


def _masked_fill(tracer: Tracer, a: Any, mask: Any, value: Any) -> Symbol:
    if not (isinstance(a, Symbol) and isinstance(mask, Symbol)) or mask.dtype != torch.bool:
        raise NotExpressibleError("fills other than one tensor where another, a bool, is true")
    return tracer.apply("where", mask, tracer.cast(_operand(value), a.dtype), a)


def _to(tracer: Tracer, a: Symbol, dtype: Any, *, non_blocking: bool = False, copy: bool = False) -> Symbol:
    if isinstance(dtype, Symbol):
        dtype = dtype.dtype
    if not isinstance(dtype, torch.dtype):
        raise NotExpressibleError("moves a tensor to a device")
    return tracer.cast(a, dtype)


def _as(dtype: torch.dtype) -> Callable[..., Symbol]:
    def apply(tracer: Tracer, a: Symbol) -> Symbol:
        return tracer.cast(a, dtype)

    return apply


def _same(tracer: Tracer, a: Symbol) -> Symbol:
    return a


def _over_slots(op: str) -> Callable[..., Symbol]:
    def apply(tracer: Tracer, a: Symbol, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Symbol:
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            (dim,) = dim
        if dim not in (-1, 1):
            raise NotExpressibleError("goes over all rows at once; over slots is dim=-1")
        if not keepdim:
            raise NotExpressibleError("goes over slots without keepdim=True")
        if a.per != "slot":
            raise NotExpressibleError("goes over slots of what has none")
        if dtype is not None:
            a = tracer.cast(a, dtype)
        if op == "row_sum" and a.dtype == torch.bool:
            a = tracer.cast(a, torch.int64)
        if a.dtype == torch.bool:
            raise NotExpressibleError("takes the largest or smallest of bools; any and all are for these")
        return Symbol(tracer, tracer.node(op, (a.node,), a.dtype, "row"), "row")

    return apply


_sum = _over_slots("row_sum")


def _max_or_min(op: str) -> Callable[..., Any]:
    def apply(tracer: Tracer, a: Any, b: Any = None, keepdim: bool = False, *, dim: Any = None) -> Any:
        if isinstance(b, (Symbol, Tensor)):
            return _arithmetic(op)(tracer, a, b)
        return _Values(
            _over_slots("row_max" if op == "maximum" else "row_min")(tracer, a, b if dim is None else dim, keepdim)
        )

    return apply


class _Values:
    """What ``max`` and ``min`` over slots return: values, and indices that are no part of an expression."""

    def __init__(self, values: Symbol) -> None:
        self.values = values

    @property
    def indices(self) -> Any:
        raise NotExpressibleError("asks where a slot is")

    def __getitem__(self, index: int) -> Any:
        return self.values if index == 0 else self.indices


def _any(tracer: Tracer, a: Symbol, dim: Any = None, keepdim: bool = False) -> Symbol:
    return _comparison("gt")(tracer, _sum(tracer, tracer.cast(a, torch.bool), dim, keepdim), 0)


def _all(tracer: Tracer, a: Symbol, dim: Any = None, keepdim: bool = False) -> Symbol:
    others = _bitwise_not(tracer, tracer.cast(a, torch.bool))
    return _comparison("eq")(tracer, _sum(tracer, others, dim, keepdim), 0)


def _mean(tracer: Tracer, a: Symbol, dim: Any = None, keepdim: bool = False) -> Symbol:
    raise NotExpressibleError(
        "takes a mean over slots, empty ones among them; a sum over held ones, by slots.count, is one"
    )


def _full_like(tracer: Tracer, a: Symbol, fill_value: Any, *, dtype: Any = None) -> Symbol:
    return Symbol(tracer, tracer.number(_operand(fill_value), dtype or a.dtype), a.per)


def _zeros_like(tracer: Tracer, a: Symbol, *, dtype: Any = None) -> Symbol:
    return _full_like(tracer, a, 0, dtype=dtype)


def _ones_like(tracer: Tracer, a: Symbol, *, dtype: Any = None) -> Symbol:
    return _full_like(tracer, a, 1, dtype=dtype)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _arithmetic("add"), "sub": _arithmetic("sub"), "mul": _arithmetic("mul"), "div": _div,
    "minimum": _arithmetic("minimum"), "maximum": _arithmetic("maximum"), "floor_divide": _floor_divide,
    "remainder": _remainder, "pow": _pow, "neg": _neg, "abs": _abs, "exp": _floating("exp"), "log": _floating("log"),
    "sqrt": _sqrt, "floor": _floor, "ceil": _ceil, "square": _square, "reciprocal": _reciprocal, "sigmoid": _sigmoid,
    "lt": _comparison("lt"), "le": _comparison("le"), "gt": _comparison("gt"), "ge": _comparison("ge"),
    "eq": _comparison("eq"), "ne": _comparison("ne"),
    "bitwise_and": _bits("and"), "bitwise_or": _bits("or"), "bitwise_xor": _bits("xor"), "bitwise_not": _bitwise_not,
    "bitwise_left_shift": _shift("shl"), "bitwise_right_shift": _shift("shr"),
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "isnan": _isnan, "isfinite": _isfinite, "isinf": _isinf, "where": _where, "masked_fill": _masked_fill,
    "clamp": _clamp, "clamp_min": _clamp_min, "clamp_max": _clamp_max,
    "to": _to, "double": _as(torch.float64), "float": _as(torch.float32), "long": _as(torch.int64),
    "bool": _as(torch.bool), "clone": _same, "detach": _same, "contiguous": _same,
    "sum": _sum, "amax": _over_slots("row_max"), "amin": _over_slots("row_min"), "max": _max_or_min("maximum"),
    "min": _max_or_min("minimum"), "any": _any, "all": _all, "mean": _mean,
    "full_like": _full_like, "zeros_like": _zeros_like, "ones_like": _ones_like,
}  # fmt: skip
_OTHER_NAMES = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "truediv": "div", "negative": "neg",
    "absolute": "abs", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne",
    "clip": "clamp", "type_as": "to", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "invert": "bitwise_not", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "floordiv": "floor_divide", "mod": "remainder",
}  # fmt: skip
