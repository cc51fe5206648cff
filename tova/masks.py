"""Masks for an evicting cache: a rule that is asked for by block, in a tensor that a copy cannot part it from.

A layer that evicts looks at a few of the columns a mask has, so a mask T x T is never made for it. Where transformers
asks for a mask on behalf of an evicting cache (which it is told by :class:`Columns`), it gets a :class:`LazyMask`: a
tensor without memory that carries the rule (:class:`MaskRule`). Copying or moving it keeps the rule; any other
operation is done on the mask it stands for, made then; changing it in place is refused. Every other mask is the one
the model would have had anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tova import compat
from tova.errors import UsageError

AHEAD = "the mask lets tokens look ahead; an evicting cache is for causal attention only"
_BLOCK = 256
"""Queries whose columns are looked through at once."""
_HIDDEN = -1e4
"""What a mask that is added may hide columns with, at most: half precision's lowest number is -65,504."""


class Columns(int):
    """A number of key columns that an evicting cache says: masks of that length are for it."""


class MaskRule:
    """A mask that is a rule over column indices; blocks of it are computed when asked for.

    Args:
        rule: transformers' mask function of (batch, head, query column, key column), broadcast over index tensors;
            None if there is nothing beside causality and padding.
        padding: bool [B, columns] of real tokens, or None if all are.
        offset: column of the first query.
        columns: key columns in all.
        whole: makes the whole mask [B, 1, T, columns], for attention that is not ours.
        known: whether the rule is known to be one that an evicting cache can follow; if not it is tried out.
        device: where the rule's own tensors are.
    """

    def __init__(
        self,
        rule: Callable[..., Tensor] | None,
        padding: Tensor | None,
        offset: int,
        columns: int,
        whole: Callable[[], Tensor],
        *,
        known: bool,
        device: torch.device,
    ) -> None:
        self.rule = rule
        self.padding = padding
        self.offset = offset
        self.columns = columns
        self._make = whole
        self.last_row: Tensor | None = None
        """bool [B, columns]: what the last query may look at; None of a rule that is known."""
        self._checked = False
        self._known = known
        self._device = device
        self._not_padding: tuple[Tensor | None] | None = None
        self._whole: Tensor | None = None

    def block(self, queries: Tensor, columns: Tensor) -> Tensor:
        """bool [B, G, C, N]; see :class:`tova.layer.Visibility`."""
        assert self.rule is not None
        back, queries, columns = columns.device, queries.to(self._device), columns.to(self._device)
        batch = torch.arange(columns.shape[0], device=self._device).view(-1, 1, 1, 1)
        head = torch.zeros((), dtype=torch.int64, device=self._device)
        return self.rule(batch, head, queries.view(1, 1, -1, 1), columns.clamp_min(0).unsqueeze(2)).to(back)

    def not_padding(self, steps: int) -> Tensor | None:
        """bool [B, T] of the queries' own columns, None if none is padding; worked out once per forward."""
        if self._not_padding is None:
            own = None if self.padding is None else self.padding[:, self.offset : self.offset + steps]
            self._not_padding = (None if own is None or bool(own.all()) else own,)
        return self._not_padding[0]

    def check(self, steps: int, start: Tensor) -> None:
        """Raise if an evicting cache cannot follow the rule, or if padding is not what it was; once per forward.

        Args:
            start: int64 [B]: each row's first real column, as the cache knows it.
        """
        if self._checked:
            return
        if not self._known:
            self._try_out(len(start))
        if self.padding is not None and not bool(self.padding.all()):
            if self.padding.shape[1] < self.offset + steps:
                raise UsageError(
                    f"attention_mask must have a column for every token seen so far and every new one, "
                    f"{self.offset + steps} in all, got {self.padding.shape[1]}"
                )
            before = self.padding[:, : self.offset]
            known = torch.arange(self.offset, device=before.device) >= start.to(before.device).unsqueeze(1)
            if bool((before != known).any()):
                raise UsageError(
                    "attention_mask says otherwise of earlier tokens than it did when they were seen, and an evicting "
                    "cache cannot hide a token later: pass the same mask with a column more for each new token"
                )
        self._checked = True

    def _try_out(self, batch: int) -> None:
        """Look through the whole rule, a few queries at a time."""
        column = torch.arange(self.columns, device=self._device)
        before: Tensor | None = None
        for begin in range(self.offset, self.columns, _BLOCK):
            queries = column[begin : begin + _BLOCK]
            seen = self.block(queries, column.expand(batch, 1, -1)).expand(batch, 1, -1, -1)
            if self.padding is not None:
                seen = seen & self.padding[:, None, None, : self.columns]
            refuse_unlike(seen, queries, before)
            before = seen[:, :, -1:]
        self.last_row = None if before is None else before[:, 0, 0]

    def whole(self, device: torch.device) -> Tensor:
        """The whole mask, made once however many layers ask."""
        if self._whole is None:
            self._whole = self._make()
        return self._whole.to(device)


def refuse_unlike(seen: Tensor, queries: Tensor, before: Tensor | None = None) -> None:
    """Raise unless no query looks ahead and what one may not see no later one may: then dropping it is no loss.

    Args:
        seen: bool [B, 1, C, columns], what each query may look at; queries that do not see themselves are padding.
        queries: int64 [C], their columns.
        before: bool [B, 1, 1, columns], what the query before them may look at, None if there is none.
    """
    column = torch.arange(seen.shape[-1], device=seen.device)
    if bool((seen & (column > queries.unsqueeze(1))).any()):
        raise UsageError(AHEAD)
    rows = seen if before is None else torch.cat([before, seen], 2)
    own = queries if before is None else torch.cat([queries[:1] - 1, queries])
    real = rows.gather(-1, own.view(1, 1, -1, 1).expand(*rows.shape[:3], 1))
    again = rows[:, :, 1:] & ~rows[:, :, :-1] & real[:, :, :-1] & (column <= own[:-1].unsqueeze(1))
    if bool(again.any()):
        raise UsageError(
            "the mask hides a token from one query and shows it to a later one; an evicting cache drops what is "
            "hidden, and cannot bring it back"
        )


class LazyMask(Tensor):
    """A mask [B, 1, T, columns] without memory that carries its rule through copies; see the module's docstring."""

    rule: MaskRule

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"LazyMask({list(self.shape)})"

    @staticmethod
    def of(rule: MaskRule, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> LazyMask:
        made = torch.zeros((), dtype=dtype, device=device).expand(shape).as_subclass(LazyMask)
        made.rule = rule
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if tells(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        mask = args[0] if args else None
        if isinstance(mask, LazyMask):
            if writes(func) or isinstance(kwargs.get("out"), LazyMask):
                raise UsageError(
                    f"the mask of an evicting cache cannot be changed in place ({name_of(func)}); change a copy of it"
                )
            if name_of(func) == "__deepcopy__" or copies(func, args):
                like = _like(func, mask, args[1:], kwargs)
                if like.dtype == mask.dtype:
                    return LazyMask.of(mask.rule, mask.shape, like.dtype, like.device)
        args, kwargs = pytree.tree_map_only(LazyMask, lambda m: m.rule.whole(m.device), (args, kwargs))
        return func(*args, **kwargs)


def _like(func: Any, tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
    """A tensor of the dtype and on the device that ``func`` would give."""
    small = torch.zeros((1,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device)
    return small if name_of(func) in ("__getitem__", "__deepcopy__") else func(small, *args, **kwargs)


_TELLING = frozenset(
    {
        "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse",
        "is_nested", "is_quantized", "is_leaf", "requires_grad", "grad_fn", "names", "_version", "itemsize", "size",
        "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
        "element_size", "get_device", "__len__", "is_inference", "storage_offset", "untyped_storage", "__hash__",
    }
)  # fmt: skip
"""What only tells something of a tensor: attributes and methods that read no number of it."""
_COPYING = frozenset({"contiguous", "clone", "detach", "to", "cpu", "cuda", "pin_memory", "alias", "requires_grad_"})


def name_of(func: Any) -> str:
    """What a function handed to ``__torch_function__`` is called; an attribute that is read by the attribute's name."""
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def tells(func: Any) -> bool:
    """Whether ``func`` reads no number of a tensor."""
    return name_of(func) in _TELLING


def writes(func: Any) -> bool:
    """Whether ``func`` changes the tensor it is called on."""
    name = name_of(func)
    if name == "requires_grad_":
        return False
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.startswith("__")) or name[:3] == "__i"


def copies(func: Any, args: Any) -> bool:
    """Whether ``func`` gives the same numbers once more: a copy, moved or converted, or a slice of everything."""
    name = name_of(func)
    if name != "__getitem__":
        return name in _COPYING
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if sum(i is Ellipsis for i in index) > 1 or any(i is not Ellipsis and not isinstance(i, slice) for i in index):
        return False
    size = args[0].shape
    if any(i is Ellipsis for i in index):
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (len(size) - len(index) + 1), *index[at + 1 :])
    return len(index) <= len(size) and all(i.indices(n) == (0, n, 1) for i, n in zip(index, size, strict=False))


_WINDOWS = ("sliding_window_overlay.<locals>.inner_mask", "chunked_overlay.<locals>.inner_mask")
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"


def is_known(rule: Callable[..., Any] | None) -> bool:
    """Whether a mask function is one of transformers' own of which it is known that an evicting cache can follow it.

    That is causality and what only narrows it: windows and chunks that move on, and texts packed one after the other.
    """
    parts = _parts(rule)
    return compat.causal_mask_function in parts and all(
        part is compat.causal_mask_function or getattr(part, "__qualname__", "") in (*_WINDOWS, _PACKED)
        for part in parts
    )


def _parts(rule: Callable[..., Any] | None) -> list[Callable[..., Any]]:
    """The functions that all have to hold, if ``rule`` is transformers' conjunction of some; else ``rule`` itself."""
    if rule is None:
        return [compat.causal_mask_function]
    if rule.__module__ == compat.causal_mask_function.__module__ and rule.__qualname__ == "and_masks.<locals>.and_mask":
        (functions,) = (cell.cell_contents for cell in rule.__closure__ or ())
        return [part for function in functions for part in _parts(function)]
    return [rule]


def mask_maker(ordinary: str) -> Callable[..., Tensor | None]:
    """The mask function to register beside an attention that treats ordinary caches as ``ordinary`` does.

    It is called as transformers calls its own. Only masks for an evicting cache are lazy ones; the rest are made by
    the mask function of ``ordinary``, called with the very same arguments.
    """

    def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        columns = kwargs.get("kv_length")
        if not isinstance(columns, Columns):
            return compat.mask_function_of(ordinary)(*args, **kwargs)
        asked = compat.asked_by_length(kwargs)
        arguments = kwargs | {"kv_length": int(columns), "allow_is_causal_skip": False}
        if "allow_is_bidirectional_skip" in arguments:
            arguments["allow_is_bidirectional_skip"] = False

        def make_whole() -> Tensor:
            return compat.mask_function_of(ordinary)(**arguments)

        if asked.use_vmap:  # no rule over indices
            return make_whole()
        function = asked.mask_function
        plain = function is None or function is compat.causal_mask_function
        rule = MaskRule(
            None if plain else function,
            asked.attention_mask,
            asked.q_offset,
            asked.kv_length,
            make_whole,
            known=is_known(function),
            device=torch.device(asked.device),
        )
        shape = torch.Size((asked.batch_size, 1, asked.q_length, asked.kv_length))
        dtype = torch.bool if ordinary != "eager" else asked.dtype
        return LazyMask.of(rule, shape, dtype, torch.device(asked.device))

    return make_mask


def rule_of(mask: Tensor | None, batch: int, columns: int) -> MaskRule | None:
    """The rule a mask carries, or one made of a mask that somebody passed whole; None if there is no mask.

    Args:
        mask: [B or 1, H or 1, T, columns]; True or 0 where a query may look, False or very low where not.

    Raises:
        UsageError: the mask has another shape, differs between heads, adds a bias, or looks ahead.
    """
    if mask is None:
        return None
    if isinstance(mask, LazyMask):
        return mask.rule
    return _given(mask, batch, columns)


def _given(mask: Tensor, batch: int, columns: int) -> MaskRule:
    offset = columns - mask.shape[-2] if mask.ndim == 4 else -1
    if mask.ndim != 4 or mask.shape[0] not in (1, batch) or mask.shape[3] != columns or offset < 0:
        raise UsageError(
            f"an evicting cache needs a mask of shape [{batch}, 1, new tokens, {columns} columns], got "
            f"{list(mask.shape)}"
        )
    if mask.shape[1] > 1 and bool((mask != mask[:, :1]).any()):
        raise UsageError("the mask differs between heads; an evicting cache needs one for all")
    allowed = mask = mask[:, :1]
    if mask.dtype != torch.bool:
        allowed = mask == 0
        if bool((~allowed & ~(mask <= _HIDDEN)).any()):
            raise UsageError(
                "the mask adds a bias to the logits (it has numbers beside 0 and the lowest); an evicting cache does "
                "not honour one"
            )
    allowed = allowed.expand(batch, -1, -1, -1)
    refuse_unlike(allowed, torch.arange(offset, columns, device=mask.device))
    own = allowed[:, 0, :, offset:].diagonal(dim1=-2, dim2=-1)
    if not bool(own.any()):
        raise UsageError("the mask hides every new token from itself; this model's masks cannot be followed")

    def rule(row: Tensor, head: Tensor, query: Tensor, column: Tensor) -> Tensor:
        return allowed[row, 0, query - offset, column]

    made = MaskRule(rule, None, offset, columns, lambda: mask, known=True, device=mask.device)
    made._not_padding = (None if bool(own.all()) else own,)
    made.last_row = allowed[:, 0, -1]
    return made
