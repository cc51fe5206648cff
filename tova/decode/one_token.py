"""Which engine takes a decoded token, and what they all have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from tova.call import Call
from tova.decode import plain
from tova.kernels import compile
from tova.layer import LayerState
from tova.scan.chunk import Scan


def decode(query: Tensor, key: Tensor, value: Tensor, state: LayerState, call: Call, scan: Scan) -> Tensor:
    """[B, H, 1, E]: attention of one new token over what is held and itself; ``state`` moves on.

    Taken by compiled code where the chosen scan is compiled too; shapes as in :func:`tova.replay.replay`.
    """
    if not (query.is_cuda and torch.cuda.is_current_stream_capturing()):
        call = call.watched(state, 1, first=state.ordered)
    used = state.open_slot(call.policy, call.schedule)
    if call.visibility is not None:
        _expire(state, call)
    if not call.one_shot and _on_gpu(scan, call, query, value, used):
        from tova.decode import gpu

        step = gpu.step
    elif not call.one_shot and _on_cpu(scan, call, query):
        from tova.decode import cpu

        step = cpu.step
    else:
        step = plain.step
    out = step(query, key, value, state, call, used)
    state.advance(call.policy, call.schedule)
    return out


def _expire(state: LayerState, call: Call) -> None:
    """Let go of what the query may no longer look at: the layer's own sliding window has moved on."""
    assert call.visibility is not None
    batch, slots = state.keys.shape[0], state.slots
    now = torch.tensor([state.seen], device=state.keys.device)
    allowed = call.visibility.block(now, state.columns.view(batch, state.kept_sets, -1))
    gone = slots.held & ~allowed.expand(batch, state.kept_sets, 1, -1).reshape(slots.held.shape)
    slots.held = slots.held & ~gone
    state.write_log(state.seen - 1, gone)


def _on_cpu(scan: Scan, call: Call, query: Tensor) -> bool:
    if scan.name == "reference" or query.device.type != "cpu" or not compile.available():
        return False
    from tova.decode import cpu

    return cpu.supports(call.policy, query.dtype)


def _on_gpu(scan: Scan, call: Call, query: Tensor, value: Tensor, used: int) -> bool:
    if not scan.reads_products:
        return False
    from tova.decode import gpu

    return gpu.supports(call.policy, query, value, used)
