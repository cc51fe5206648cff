"""The Triton kernels and the fixed-point scan decide as the reference does.

Where there is no GPU the kernels run in Triton's interpreter, which conftest.py has asked for.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.interpreter import patch_the_language_once  # noqa: F401
from support.layers import Window, prompt_and_tokens
from support.models import forward, tiny, tokens
from support.own import Everything
from support.policies import STEPWISE, small

from tova import EvictingCache, UsageError, policies, rules
from tova.compat import cache_argument
from tova.policies import Policy, Record, Slots
from tova.policies.base import Schedule
from tova.policies.contract import ContractError, watched
from tova.policies.steps import new_records, ring_names
from tova.replay import NEVER, Attention, LayerState, replay
from tova.scan import Chunk, Decision, fixed_point, oldest_first, reference, select
from tova.scan.select import has_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
kernels = pytest.mark.skipif(not has_triton(DEVICE), reason="triton is not installed (it is for Linux only)")


# name -> policies that between them take every path
POLICIES: dict[str, Policy] = {
    name: small(name, 16) for name in policies.POLICIES if name not in ("full", "h2o_masked")
} | {
    "tova sinks": policies.make("tova", budget=16, sinks=3, recent_window=4),
    "snapkv unpooled": policies.make("snapkv", budget=16, recent_window=1, obs_window=3, pool_kernel=1),
    "snapkv_prefill max": policies.make("snapkv_prefill", budget=16, recent_window=3, pool_kernel=3, pooling="max"),
    "window recent": policies.make("window", budget=16, recent_window=6),
    "everything": Everything(budget=16, sinks=1, recent_window=3),
}
# name -> what is particular about the chunk
CHUNKS: dict[str, dict] = {
    "full cache": {},
    "first chunk, left padding": dict(kept=0, steps=26, padding=5),
    "sliding window": dict(window=9, budget=7),
    "attention sinks": dict(sinks=True),
    "interval": dict(evict_every=4),
    "ragged, padded": dict(kept=12, missing=4, padding=3),
    "one step": dict(steps=1),
    "much at once": dict(kept=6, missing=2, window=10, budget=7, sinks=True, evict_every=2, padding=2),
}


def random_chunk(
    policy: Policy, seed: int, *, kept: int = 16, steps: int = 13, rows: int = 2, heads: int = 3,
    budget: int = 16, evict_every: int = 1, missing: int = 0, padding: int = 0, window: int = 0, sinks: bool = False,
):  # fmt: skip
    """A policy and a chunk in the middle of a text: row 0 has ``missing`` fewer held, or begins with ``padding``."""
    if budget < 16:
        smaller = {"recent_window": min(policy.recent_window, 3)} if "recent_window" in policy.parameters() else {}
        policy = dataclasses.replace(policy, budget=budget, **smaller)
    random = torch.Generator().manual_seed(seed)
    begin = 2 * kept
    before = torch.stack([torch.randperm(max(begin, 1), generator=random)[:kept].sort().values for _ in range(rows)])
    positions = torch.cat([before, (begin + torch.arange(steps)).expand(rows, steps)], 1)
    fresh = new_records(policy, rows, kept + steps, torch.float32)
    held = torch.zeros(rows, kept + steps, dtype=torch.bool)
    held[:, :kept] = True
    held[0, kept - missing : kept] = False
    features = {name: torch.rand(rows, kept + steps, generator=random) for name in ("value_norm", "key_norm", "size")}
    count = torch.full((rows, 1), begin)
    slots = Slots(
        positions, held, fresh, count, count - 1, features if policy.wants_features else {}, rings=ring_names(policy)
    )
    for name, record in fresh.items():
        old = record.narrow(slots.slot_dim(name), 0, kept)
        many = name == "votes" or not record.dtype.is_floating_point
        numbers = torch.randint(0, 5, old.shape, generator=random) if many else torch.rand(old.shape, generator=random)
        old.copy_(numbers)
    not_padding = allowed = None
    if padding:
        not_padding = torch.ones(rows, steps, dtype=torch.bool)
        not_padding[0, :padding] = False
    if window:
        allowed = (begin + torch.arange(steps))[:, None] - positions[:, None] < window
    return policy, Chunk(
        logits=2 * torch.randn(rows, heads, steps, kept + steps, generator=random),
        slots=slots,
        kept=kept,
        schedule=Schedule(policy.layer_budget + evict_every, policy.evicts_to()),  # prompt_only ones, too
        allowed=allowed,
        not_padding=not_padding,
        sink_logits=torch.randn(rows, heads, generator=random) if sinks else None,
    )


def copy_of(chunk: Chunk, device: torch.device = DEVICE) -> Chunk:
    def move(x):
        return None if x is None else x.to(device, copy=True)

    return dataclasses.replace(
        chunk,
        logits=move(chunk.logits),
        allowed=move(chunk.allowed),
        not_padding=move(chunk.not_padding),
        sink_logits=move(chunk.sink_logits),
        slots=chunk.slots.mapped(move),
    )


def check_like_reference(decide, policy: Policy, chunk: Chunk, right: Chunk | None = None) -> torch.Tensor:
    """Decisions, survivors and counters equal, records within 1e-5; returns the decisions.

    ``right`` is what the reference is given, if it is something else.
    """
    right, mine = copy_of(chunk if right is None else right), copy_of(chunk)
    last = reference.decide(policy, right).last
    found = decide(policy, mine).last
    assert found.dtype == torch.int64
    assert (found == last).all()
    a, b = right.slots, mine.slots
    assert (a.held == b.held).all()
    assert (a.newest == b.newest).all()
    assert (a.observed == b.observed).all()
    for name, record in a.records.items():
        assert b.records[name].dtype == record.dtype
        held = a.held if name not in a.rings else a.held.unsqueeze(1).expand_as(record)
        torch.testing.assert_close(b.records[name][held], record[held], rtol=1e-5, atol=1e-5, equal_nan=True)
    return last


# -- the fixed point, in plain torch -------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_fixed_point_is_the_sequential_scan(policy: str, chunk: str) -> None:
    dropped = 0
    for seed in range(3 if policy in ("tova", "h2o") else 1):
        made, case = random_chunk(POLICIES[policy], seed, **CHUNKS[chunk])
        with fixed_point.counting() as heard:
            last = check_like_reference(fixed_point.decide, made, case)
        steps = last.shape[1] - case.kept
        assert all(solved.rounds <= steps + 1 for solved in heard)
        dropped += int(((last >= 0) & (last < steps)).sum())
    assert dropped or chunk == "one step" or made.layer_budgets != "uniform"


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_fixed_point_goes_on_step_by_step_where_rounds_run_out(limit: int) -> None:
    for seed in range(2):
        made, case = random_chunk(POLICIES["tova"], seed, steps=20)
        with fixed_point.counting() as heard:
            check_like_reference(lambda p, c: fixed_point.decide(p, c, limit=limit), made, case)
        (solved,) = heard
        assert solved.rounds <= limit
        assert solved.one_by_one <= 20 - limit
        assert limit > 1 or solved.one_by_one > 0


def test_fixed_point_needs_few_rounds() -> None:
    """Far fewer than steps: what was not dropped after all must not look as if nobody had looked at it."""
    made, case = random_chunk(policies.make("tova", budget=128), 0, kept=128, steps=128, rows=1)
    with fixed_point.counting() as heard:
        fixed_point.decide(made, case)
    assert heard[0].rounds < 12, heard
    assert heard[0].one_by_one == 0


@pytest.mark.parametrize(
    ("name", "policy"), [("llama", "tova"), ("llama", "tova_head"), ("mistral", "h2o_half"), ("gpt_oss", "tova")]
)
def test_fixed_point_in_a_model(name: str, policy: str) -> None:
    """Grouped queries, a sliding window, attention sinks; a left-padded row; chunks that do not divide the text."""
    model = tiny(name)
    ids, padding = tokens(length=80, seed=7), [11, 0]
    made = policies.make(policy, budget=24)
    right = EvictingCache(made, scan="reference", chunk=80)
    expected = forward(model, ids, right, padding)
    cache = EvictingCache(made, scan="fixed_point", chunk=17)
    logits = forward(model, ids, cache, padding)
    assert (cache.evicted_at == right.evicted_at).all()
    assert (logits - expected)[:, 12:].abs().max() < 1e-3


@pytest.mark.parametrize("policy", ["full", "window", "window recent", "streaming_llm"])
def test_closed_form_is_the_scan(policy: str) -> None:
    for seed, options in enumerate(c for c in CHUNKS.values() if "window" not in c):
        made, case = random_chunk(POLICIES["window" if policy == "full" else policy], seed, **options)
        if policy == "full":
            made = policies.make("full")
            case.schedule = made.schedule()
        assert rules.drops_oldest(made)
        check_like_reference(lambda p, c: Decision(oldest_first.last_seen(p, c)), made, case)


def test_scans_by_name() -> None:
    cpu, dtype = torch.device("cpu"), torch.float32
    tova = policies.make("tova")
    assert select("fixed_point", tova, cpu, dtype) is fixed_point.SCAN
    assert select("auto", tova, cpu, dtype).name != "gpu"
    with pytest.raises(UsageError, match="h2o_masked looks at dropped tokens"):
        select("fixed_point", policies.make("h2o_masked"), cpu, dtype)


def test_without_triton_a_scan_on_it_is_refused(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match=r"scan=gpu needs triton 3\.4 or newer, and tensors on CUDA"):
        select("gpu", policies.make("tova"), torch.device("cpu"), torch.float32)


# -- the kernels ---------------------------------------------------------------------------------------------


# Every policy on two chunks, and some policies on every chunk: the interpreter is slow.
PAIRS = [
    (policy, chunk)
    for policy in POLICIES
    for chunk in CHUNKS
    if chunk in ("full cache", "much at once") or policy in ("tova sinks", "h2o", "window", "everything")
]


@kernels
@pytest.mark.parametrize(("policy", "chunk"), PAIRS)
def test_kernel_decides_as_the_reference(policy: str, chunk: str, monkeypatch) -> None:
    from tova.scan import gpu

    made, case = random_chunk(POLICIES[policy], 5, **dict(steps=9, heads=2) | CHUNKS[chunk])
    assert select("gpu", made, DEVICE, torch.float32) is gpu.SCAN
    monkeypatch.setattr(gpu, "reference", None)
    check_like_reference(gpu.decide, made, case)


@kernels
@pytest.mark.parametrize("policy", ["tova", "h2o", "scissorhands", "snapkv", "everything"])
@pytest.mark.parametrize("chunk", ["full cache", "much at once"])
def test_fixed_point_on_kernels(policy: str, chunk: str, monkeypatch) -> None:
    """Rounds as kernels, and, where rounds run out, the scan kernel."""
    from tova.scan import gpu

    monkeypatch.setattr(fixed_point, "TorchRounds", None)
    made, case = random_chunk(POLICIES[policy], 6, **dict(steps=9, heads=2) | CHUNKS[chunk])
    check_like_reference(gpu.decide_by_rounds, made, case)
    if policy == "tova":
        check_like_reference(lambda p, c: gpu.decide_by_rounds(p, c, limit=1), made, case)


@kernels
@pytest.mark.parametrize("chunk", ["full cache", "much at once", "one step"])
def test_kernel_reads_a_step_ahead(chunk: str, monkeypatch) -> None:
    from tova.scan import gpu

    monkeypatch.setattr(gpu, "launch", gpu.Launch(ahead=True))
    for policy in ("tova", "snapkv"):
        check_like_reference(gpu.decide, *random_chunk(POLICIES[policy], 4, **dict(steps=9) | CHUNKS[chunk]))


@kernels
@pytest.mark.parametrize("heads_at_once", [1, 2, 4])
def test_kernel_takes_heads_in_blocks(heads_at_once: int, monkeypatch) -> None:
    from tova.scan import gpu

    monkeypatch.setattr(gpu, "launch", gpu.Launch(tile=32 * heads_at_once))
    check_like_reference(gpu.decide, *random_chunk(POLICIES["h2o"], 8, heads=5))


@kernels
def test_kernel_reads_half_precision() -> None:
    """Logits in bfloat16 are what they are: the decisions are those of the same numbers in float32."""
    from tova.scan import gpu

    made, case = random_chunk(POLICIES["tova"], 1)
    half = dataclasses.replace(case, logits=case.logits.bfloat16(), dtype=torch.bfloat16)
    check_like_reference(gpu.decide, made, half, dataclasses.replace(half, logits=half.logits.float()))


@kernels
def test_kernel_drops_the_lower_of_equals() -> None:
    from tova.scan import gpu

    made, case = random_chunk(POLICIES["tova"], 0)
    case.logits.zero_()
    last = check_like_reference(gpu.decide, made, case)
    assert last[0, :13].tolist() == list(range(13))


@kernels
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", ["tova", "h2o"])
def test_kernels_put_a_raw_product_through(name: str, softcap: float | None) -> None:
    """Scaling and soft capping are left to the kernels: the decisions are those on finished logits."""
    from tova.scan import gpu

    made, right = random_chunk(POLICIES[name], 3, steps=9, sinks=True)
    raw = dataclasses.replace(right, scaling=0.7, softcap=softcap)
    exact = right.logits.double() * 0.7
    right = dataclasses.replace(
        right, logits=(exact if softcap is None else softcap * (exact / softcap).tanh()).float()
    )
    finished = copy_of(raw).scaled()
    torch.testing.assert_close(finished.logits.cpu(), right.logits, rtol=1e-5, atol=1e-5)
    assert (finished.scaling, finished.softcap) == (1.0, None)
    for decide in (gpu.decide, gpu.decide_by_rounds):
        check_like_reference(decide, made, raw, right)


@kernels
@pytest.mark.parametrize("chunk", ["full cache", "much at once"])
def test_kernel_is_told_nothing_by_what_is_not_finite(chunk: str) -> None:
    """A NaN in one query, and in a key from its token on: those steps change nothing, and the rest goes on."""
    from tova.scan import gpu

    for policy in ("tova_official", "snapkv", "everything"):
        made, case = random_chunk(POLICIES[policy], 7, **dict(steps=9) | CHUNKS[chunk])
        case.logits[1, :, 2] = float("nan")
        case.logits[0, :, 5:, case.kept + 5] = float("inf")
        check_like_reference(gpu.decide, made, case)


@dataclass(frozen=True, kw_only=True)
class CannotRank(Policy):
    """One's own, with a score that is not a number for some."""

    name = "cannot_rank"
    reads_attention = False

    def score(self, slots):
        return torch.where(slots.positions % 4 == 1, float("nan"), slots.positions.float())


@dataclass(frozen=True, kw_only=True)
class ProtectsTooMuch(Policy):
    name = "protects_too_much"
    reads_attention = False

    def score(self, slots):
        return -slots.positions.float()

    def protected(self, slots):
        return slots.held & (slots.positions >= 0)


@kernels
@pytest.mark.parametrize("made", [CannotRank(budget=16), ProtectsTooMuch(budget=16)], ids=lambda p: p.name)
def test_kernel_says_what_a_watched_policy_does_wrong(made: Policy) -> None:
    """The sentences of the reference; one that does nothing wrong is decided for by the kernel all the same."""
    from tova.scan import gpu

    _, case = random_chunk(made, 2)
    said = []
    for decide in (reference.decide, gpu.decide):
        with pytest.raises(ContractError) as caught:
            decide(watched(made), copy_of(case))
        said.append(str(caught.value))
    assert said[0] == said[1]
    check_like_reference(gpu.decide, made, case)


@kernels
def test_kernel_decides_for_a_watched_policy_that_does_nothing_wrong(monkeypatch) -> None:
    from tova.scan import gpu

    made, case = random_chunk(POLICIES["everything"], 2)
    right = reference.decide(watched(made), copy_of(case)).last
    monkeypatch.setattr(gpu, "reference", None)
    assert (gpu.decide(watched(made), copy_of(case)).last == right).all()


# name -> batch, query heads, key/value heads, kept sets, kept, steps, query size, value size
ATTENDED = {
    "heads grouped": (2, 4, 2, 1, 20, 21, 16, 16),
    "a set per head, odd sizes": (1, 4, 2, 2, 5, 40, 24, 12),
    "nothing kept": (1, 2, 1, 1, 0, 33, 8, 8),
    "one query": (2, 2, 2, 1, 40, 1, 32, 32),
}


# The interpreter multiplies the bits of bfloat16 as if they were integers.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("options", [{}, dict(softcap=2.0), dict(sinks=True)], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("shape", ATTENDED)
def test_mixing_kernel_is_masked_attention(shape: str, options: dict, dtype: torch.dtype, monkeypatch) -> None:
    """Beside the formula in float64, over several tiles, in the strides a model gives; a query may see nothing."""
    from tova.backends import triton
    from tova.kernels.triton_math import Softmax
    from tova.scan import gpu

    monkeypatch.setattr(triton, "launch", gpu.Launch(mix_rows=16, mix_columns=16))
    batch, heads, groups, sets, kept, steps, size, width = ATTENDED[shape]
    random = torch.Generator().manual_seed(1)
    candidates = kept + steps
    query = torch.randn(batch, steps, heads, size, generator=random).to(DEVICE, dtype).transpose(1, 2)
    key = torch.randn(batch, groups, candidates, size, generator=random).to(DEVICE, dtype)
    value = torch.randn(batch, candidates, groups, width, generator=random).to(DEVICE, dtype).transpose(1, 2)
    index, step = torch.arange(candidates), torch.arange(steps)[:, None]
    last = torch.randint(-1, steps + 1, (batch * sets, candidates), generator=random)
    seen = ((index <= kept + step) & (last[:, None] >= step)).view(batch, sets, 1, steps, candidates).to(DEVICE)
    sinks = torch.randn(batch * sets, heads // sets, generator=random).to(DEVICE) if "sinks" in options else None
    softcap = options.get("softcap")
    repeat = heads // groups
    logits = 0.4 * query.double() @ key.double().repeat_interleave(repeat, 1).transpose(2, 3)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.view(batch, sets, heads // sets, steps, candidates).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        beside = sinks.double().view(batch, sets, heads // sets, 1, 1).expand(-1, -1, -1, steps, 1)
        weights = torch.cat([logits, beside], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1).nan_to_num(0.0)
    expected = weights.view(batch, heads, steps, candidates) @ value.double().repeat_interleave(repeat, 1)
    whole = torch.full((batch, heads, steps + 3, width), float("nan"), dtype=dtype, device=DEVICE)
    out = whole[:, :, 1 : steps + 1]
    triton.masked_attention(query, key, value, last.to(DEVICE), kept, Softmax(0.4, softcap, sinks), out)
    assert (out.double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert whole[:, :, 0].isnan().all()
    assert whole[:, :, steps + 1 :].isnan().all()


# name -> how a text is decoded; see tests/test_decode.py
DECODED = {
    "plain": {},
    "padded": dict(padding=[0, 5]),
    "own window": dict(visibility=Window(9)),
    "softcap, sinks, wide values": dict(how=Attention(0.3, 2.0, torch.tensor([0.5, -1.0, 0.0, 2.0])), width=24),
    "every 3": dict(evict_every=3),
    "three heads a set": dict(heads=(6, 2)),
}


STEPPED: dict[str, Policy] = {
    name: small(name) for name in STEPWISE if name not in ("h2o_masked", "streaming_llm_reindexed")
} | {
    "tova sinks": small("tova", sinks=2, recent_window=3),
    "snapkv_prefill": small("snapkv_prefill"),
    "everything": Everything(budget=12, sinks=1, recent_window=2),
}


@kernels
@pytest.mark.parametrize(
    ("name", "how"),
    [(n, h) for n in STEPPED for h in DECODED if h == "plain" or n in ("tova sinks", "h2o", "everything")],
)
def test_step_kernels_decide_as_torch(name: str, how: str, monkeypatch) -> None:
    """Token by token after a prompt: the same drops at the same steps, outputs, slots and records."""
    from tova.decode import gpu as decode
    from tova.scan import gpu

    taken = [0]
    step = decode.step

    def counting(*arguments):
        taken[0] += 1
        return step(*arguments)

    monkeypatch.setattr(decode, "step", counting)
    made, options = STEPPED[name], DECODED[how] | dict(prompt=14, tokens=22)
    if how == "softcap, sinks, wide values":
        attention = options["how"]
        options["how"] = dataclasses.replace(attention, sink_logits=attention.sink_logits.to(DEVICE))
    expected, slow = prompt_and_tokens(made, reference.SCAN, device=DEVICE, **options)
    assert taken == [0]
    found, fast = prompt_and_tokens(made, gpu.SCAN, device=DEVICE, **options)
    # The first token, and the first eviction, of a policy of one's own is watched, in plain torch.
    assert taken == [8 if name != "everything" else 6 if how == "padded" else 7]
    assert (slow.log.view == fast.log.view).all()
    assert made.prompt_only or (slow.log.view < NEVER).any()
    assert (found - expected).abs().max() < 1e-5
    for part in ("held", "newest", "observed"):
        assert (getattr(slow.slots, part) == getattr(fast.slots, part)).all()
    held = slow.slots.held
    assert (slow.slots.positions[held] == fast.slots.positions[held]).all()
    for record, right in slow.slots.records.items():
        there = held.unsqueeze(1).expand_as(right) if record in slow.slots.rings else held
        mine = fast.slots[record]
        torch.testing.assert_close(mine[there], right[there], equal_nan=True, atol=1e-5, rtol=1e-5)
    assert (slow.most, slow.used, slow.ordered, slow.seen) == (fast.most, fast.used, fast.ordered, fast.seen)


@kernels
@pytest.mark.parametrize("policy", ["tova", "h2o", "tova_official"])
def test_step_kernels_drop_the_lower_of_equals(policy: str) -> None:
    """Equal keys and values: all weights are equal at every step, and slots are in no order."""
    from tova.scan import gpu

    logs = []
    for scan in (reference.SCAN, gpu.SCAN):
        ones = torch.ones(1, 2, 1, 16, device=DEVICE)
        state = LayerState.empty(small(policy), ones, ones, 1, log=True)
        for _ in range(25):
            replay(ones, ones, ones, state, small(policy), Attention(0.25), scan=scan)
        logs.append(state.log.view)
    assert (logs[0] == logs[1]).all()
    assert (logs[0] < NEVER).sum() == 25 - 12


@kernels
def test_step_kernels_in_half_precision() -> None:
    """What decides is rounded as a product in that dtype is, so a replay and decoding go on agreeing."""
    from tova.scan import gpu

    model = tiny("llama").to(DEVICE, HALF)
    ids = tokens(1, 32).to(DEVICE)
    name = cache_argument(model)
    with torch.no_grad():
        whole = EvictingCache(policies.make("tova", budget=12), scan="gpu")
        expected = model(ids, use_cache=True, **{name: whole}).logits
        cache = EvictingCache(policies.make("tova", budget=12), scan="gpu")
        out = [model(ids[:, :20], use_cache=True, **{name: cache}).logits]
        out += [model(one, use_cache=True, **{name: cache}).logits for one in ids[:, 20:].split(1, 1)]
    assert cache.layers[0]._scan is gpu.SCAN
    same = (cache.evicted_at == whole.evicted_at).float().mean()
    difference = (torch.cat(out, 1) - expected).abs().amax(-1)[0]
    print(f"same times {same:.3f}, largest difference of a logit {difference.max():.3f}")
    assert same > 0.9, same
    assert difference.max() < 0.1, difference


@kernels
@pytest.mark.parametrize("scan", ["gpu", "fixed_point"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_kernel_in_a_model(name: str, scan: str, monkeypatch) -> None:
    """Grouped queries, soft capping, windows, sinks, a left-padded row, chunks that do not divide the text."""
    from tova.backends import triton
    from tova.scan import gpu

    calls = [0]
    masked_attention = triton.masked_attention

    def counting(*arguments):
        calls[0] += 1
        masked_attention(*arguments)

    monkeypatch.setattr(triton, "masked_attention", counting)
    monkeypatch.setattr(fixed_point, "SCAN", gpu.FIXED_POINT)  # which on a CPU is not chosen by itself
    model = tiny(name).to(DEVICE)
    ids, padding = tokens(length=22), [5, 0]
    made = policies.make("tova", budget=10)
    right = EvictingCache(made, scan="reference")
    cache = EvictingCache(made, scan=scan, chunk=13)
    with DEVICE:
        expected = forward(model, ids.to(DEVICE), right, padding)
        assert calls == [0]
        logits = forward(model, ids.to(DEVICE), cache, padding)
    assert calls == [2 * model.config.num_hidden_layers]
    assert (cache.evicted_at == right.evicted_at).all()
    assert (logits - expected)[:, 6:].abs().max() < 1e-3


@kernels
def test_kernels_say_what_they_cannot_take(monkeypatch) -> None:
    """It goes to the reference; asked for by name it is refused."""
    from tova.scan import gpu

    @dataclass(frozen=True, kw_only=True)
    class Much(Policy):
        name = "much"

        def records(self):
            return {f"sum{i}": Record() for i in range(9)}

        def observe(self, slots, attn):
            return {name: slots[name] + attn for name in self.records()}

        def score(self, slots):
            return slots["sum0"] + slots["sum8"]

    reasons = {made.name: gpu.why_not(made) for made in (Much(), policies.make("h2o_masked"), policies.make("random"))}
    assert reasons == {
        "much": "it remembers 9 numbers per slot, and the kernels hold 8 at most",
        "h2o_masked": "it looks at dropped tokens",
        "random": None,
    }
    assert gpu.why_not(policies.make("tova_official"), torch.bfloat16) == (
        "it rounds weights to bfloat16 before it combines them"
    )
    with pytest.raises(UsageError, match="scan=gpu cannot take much: it remembers 9 numbers per slot"):
        select("gpu", Much(), DEVICE, torch.float32)
    monkeypatch.setattr(gpu, "MOST_CANDIDATES", 4)
    check_like_reference(gpu.decide, *random_chunk(POLICIES["tova"], 0))
    monkeypatch.setattr(gpu, "reference", None)
    with pytest.raises(AttributeError):
        gpu.decide(*random_chunk(POLICIES["tova"], 0))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "policy", ["everything", *(pytest.param(p, marks=pytest.mark.slow) for p in ("tova", "snapkv"))]
)
def test_kernels_compile_for_an_h200(policy: str) -> None:
    """For a policy of one's own and built-in ones; without a card, and not interpreted."""
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent), str(here)])
    command = [sys.executable, "-m", "support.sm90", policy]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], done.stderr[-3000:])
    assert done.returncode == 0
    for kernel in ("_scan", "_rows", "_attention", "_finite", "_one_by_one", "_place", "_update"):
        assert f"{kernel}_kernel" in done.stdout
