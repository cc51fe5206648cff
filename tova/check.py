"""Does a policy of one's own keep the contract? ``python -m tova.check my_policies.Decay budget=48 fade=0.8``.

Runs a policy the ways the library will run it, on seeded random queries, keys and values, and compares: what passes
here can be simulated, replayed, batched, padded and generated with, and decides the same each way. Says as well which
engines run it compiled, and why others do not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.kernels import compile
from tova.layer import Attention, LayerState
from tova.policies.base import Policy
from tova.policies.contract import ContractError, Watched
from tova.policies.slots import Slots, Tokens
from tova.policies.steps import named, new_records, ring_names
from tova.replay import replay
from tova.rules import why_not
from tova.scan import reference

_BEYOND = 40
"""Steps past the budget."""


def check(policy: Policy) -> list[str]:
    """Run all checks on ``policy`` as it stands, its budget and parameters included.

    Returns:
        What was checked, a sentence each.

    Raises:
        ContractError: the first thing that is wrong.
    """
    if not isinstance(policy, Policy):
        raise ContractError(f"{policy!r}: is no instance of tova.policies.Policy")
    done = []
    for one in (_pure, _runs, _decides_alike, _rows_are_independent, _for_layers):
        if (sentence := one(policy)) is not None:
            done.append(sentence)
    return done


def engines(policy: Policy) -> list[str]:
    """What of ``policy`` runs compiled from its rule (:mod:`tova.rules`), what in plain torch, and why; a line each."""
    if not compile.available():
        return ["in plain torch: everything; numba is not there, or cannot be imported"]
    from tova import simulation_engine
    from tova.decode import cpu as decode
    from tova.scan import cpu as scan

    reason = why_not(policy)
    # What there is, whether it is compiled, and why it would not be.
    kinds = [
        ("replay", scan.supports(policy), reason),
        ("decoded tokens", decode.supports(policy, torch.float32), reason or "sinks are seen at other positions"),
    ]
    if scan.supports(policy) and not scan.supports(policy, torch.bfloat16):
        kinds.append(("replay in half precision", False, "weights are rounded there"))
    if not (policy.wants_features or policy.prompt_only):  # which a stream of attention weights has nothing for
        kinds.append(("simulation", simulation_engine.supports(policy), reason or "start is its own"))
    lines = ["compiled: " + ", ".join(kind for kind, compiled, _ in kinds if compiled)]
    for why in dict.fromkeys(why for _, compiled, why in kinds if not compiled):
        slow = ", ".join(kind for kind, compiled, other in kinds if not compiled and other == why)
        lines.append(f"in plain torch: {slow}; {why}")
    return lines if lines[0] != "compiled: " else lines[1:]


def _wrong(policy: Policy, what: str) -> ContractError:
    return ContractError(f"{named(policy)}: {what}")


def _pure(policy: Policy) -> str:
    """Shapes and names of what is returned; nothing changed in place."""
    if not policy.name:
        raise ContractError(f"{type(policy).__name__}: has no name; set the class attribute name")
    rows, held = 2, 9
    watched = Watched(policy)
    slots = Slots(
        positions=torch.arange(held, device="cpu").repeat(rows, 1),
        held=torch.ones(rows, held, dtype=torch.bool, device="cpu"),
        records=new_records(policy, rows, held, torch.float32, "cpu"),
        observed=torch.full((rows, 1), held, device="cpu"),
        newest=torch.full((rows, 1), held - 1, device="cpu"),
        features=_features(watched, rows, held),
        rings=ring_names(policy),
    )
    attn = _normal(1, rows, held).softmax(-1)
    if policy.reads_attention:
        watched.observe(slots, attn)
        watched.admitted(attn[:, :1])
    watched.score(slots)
    watched.protected(slots)
    return "records, scores and protection have the right shapes, and nothing is changed in place"


def _normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def _features(policy: Watched, rows: int, held: int) -> dict[str, Tensor]:
    positions = torch.arange(held, device="cpu").repeat(rows, 1)
    found = policy.features(Tokens(_normal(2, rows, 1, held, 4), _normal(3, rows, 1, held, 4), positions, _unturned))
    return {name: feature[:, 0] for name, feature in found.items()}


def _unturned(keys: Tensor, positions: Tensor) -> Tensor:
    return keys


def _runs(policy: Policy) -> str | None:
    """The stepwise contract, token by token, twice: victims are held, enough, ascending, and the same again."""
    if policy.wants_features or policy.prompt_only or policy.uneven:
        return None
    first, again = policy.start(), policy.start()
    budget, held = policy.layer_budget, [0]
    generator = torch.Generator("cpu").manual_seed(3)
    for step in range(1, budget + _BEYOND):
        given = torch.rand(len(held), generator=generator, dtype=torch.float32, device="cpu").double()
        attn = None if step % 17 == 0 else given
        first.on_decode_step(step, attn)
        again.on_decode_step(step, attn)
        held.append(step)
        victims = first.evict(budget)
        if victims != sorted(victims) or not set(victims) <= set(held):
            raise _wrong(
                policy, f"step {step}: evict returned {victims}, which are not held positions in ascending order"
            )
        if step in victims and not policy.newest_competes:
            raise _wrong(policy, f"step {step}: dropped the newest token; protected() must include the newest")
        if again.evict(budget) != victims:
            raise _wrong(policy, f"step {step}: a second run on the same attention dropped others: not deterministic")
        held = [p for p in held if p not in victims]
        if len(held) > budget:
            raise _wrong(policy, f"step {step}: holds {len(held)} positions, more than its budget of {budget}")
        record = first.record(held[0])
        if record is not None and not isinstance(record, float):
            raise _wrong(policy, f"record({held[0]}) must be a float or None, got {record!r}")
    return f"{budget + _BEYOND} steps of the stepwise policy: victims are held, ascending, enough, and the same again"


def _random(seed: int, rows: int, tokens: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _normal(seed, rows, heads, tokens, 8) * 1.5,
        _normal(seed + 10, rows, kv_heads, tokens, 8) * 1.5,
        _normal(seed + 20, rows, kv_heads, tokens, 8),
    )


def _replayed(
    policy: Policy,
    qkv: tuple[Tensor, Tensor, Tensor],
    cuts: Sequence[int],
    chunk: int,
    not_padding: Tensor | None = None,
) -> Tensor:
    """int64 [B, G, T]: ``evicted_at`` of a layer fed in pieces that end at ``cuts``."""
    q, k, v = qkv
    state = LayerState.empty(policy, k, v, k.shape[1] if policy.per_head else 1, log=True)
    begin = 0
    for end in cuts:
        columns = None if not_padding is None else not_padding[:, begin:end]
        replay(
            q[:, :, begin:end],
            k[:, :, begin:end],
            v[:, :, begin:end],
            state,
            policy,
            Attention(8**-0.5, None, None),
            scan=reference.SCAN,
            not_padding=None if columns is None or bool(columns.all()) else columns,
            chunk=chunk,
        )
        begin = end
    assert state.log is not None
    return state.log.view


def _refuses(policy: Policy) -> bool:
    return policy.reindexes  # needs a model's rotation


def _decides_alike(policy: Policy) -> str | None:
    """In one piece, in chunks and token by token (where slots are in no order and empty ones hold garbage)."""
    if _refuses(policy):
        return None
    tokens = policy.layer_budget + _BEYOND
    qkv = _random(4, 2, tokens)
    whole = _replayed(policy, qkv, [tokens], tokens)
    other = {
        "in chunks of 7": _replayed(policy, qkv, [tokens], 7),
        "token by token": _replayed(policy, qkv, [5, *range(6, tokens + 1)], 7),
    }
    for how, log in other.items():
        if not torch.equal(log, whole):
            step = int(torch.minimum(log, whole)[log != whole].min())
            raise _wrong(
                policy,
                f"decides otherwise {how} than in one piece, first at step {step}; slots are in no particular order, "
                "and empty ones hold anything: go by positions and held",
            )
    return f"{tokens} tokens in one piece, in chunks and token by token: the same decisions"


def _rows_are_independent(policy: Policy) -> str | None:
    """A left-padded row of a batch decides as the same row alone."""
    if _refuses(policy):
        return None
    tokens, padding = policy.layer_budget + _BEYOND, 11
    q, k, v = _random(5, 2, tokens)
    not_padding = torch.arange(tokens, device="cpu") >= torch.tensor([[0], [padding]], device="cpu")
    both = _replayed(policy, (q, k, v), [tokens], 16, not_padding)[1:, :, padding:]
    alone = _replayed(policy, (q[1:, :, padding:], k[1:, :, padding:], v[1:, :, padding:]), [tokens - padding], 16)
    both = torch.where(both < tokens, both - padding, both)
    if not torch.equal(both, alone):
        step = int(torch.minimum(both, alone)[both != alone].min())
        raise _wrong(policy, f"a left-padded row decides otherwise than the same row alone, first at step {step}")
    return "a left-padded row of a batch decides as the row alone"


def _for_layers(policy: Policy) -> str:
    for layer in range(4):
        made = policy.for_layer(layer, 4)
        if (made.layer, made.num_layers) != (layer, 4) or made.layer_budget < 1:
            raise _wrong(policy, f"for_layer({layer}, 4) gives layer {made.layer} of {made.num_layers}")
    return "every layer of four has a share of the budget"


def _load(target: str, words: Sequence[str]) -> Policy:
    import yaml

    module, _, name = target.rpartition(".")
    sys.path.insert(0, "")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise UsageError(f"{target}: cannot be imported ({e})") from e
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UsageError(f"{target}: is not a subclass of tova.policies.Policy")
    parameters: dict[str, Any] = {"budget": 48}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{word}: write parameter=value")
        parameters[option] = yaml.safe_load(value)
    try:
        return found(**parameters)
    except TypeError as e:
        raise UsageError(f"{target}: {e}") from e


def main(words: Sequence[str]) -> int:
    """Check the policy named on the command line; 0 if it keeps the contract, 2 if not."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m tova.check module.Policy [budget=48] [parameter=value ...]")
        return 0 if words else 2
    try:
        policy = _load(words[0], words[1:])
        for sentence in check(policy):
            print(f"ok  {sentence}")
        for line in engines(policy):
            print(f"    {line}")
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
