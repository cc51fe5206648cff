"""One-shot prefill on the real model against formulas written out on the model's own attention maps.

With a one-shot prompt every token sees all before it, so the maps are those of plain eager attention; what is kept is
what ``topk`` of the right numbers picks, at every layer.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.models import forward, tiny, tokens

import tova
from tova import EvictingCache, policies
from tova.replay import NEVER

TOKENS, BUDGET = 288, 96


@pytest.fixture(scope="module")
def maps(smollm2, books):
    """The prompt, and float32 [layers, H, T, T] of the model's own attention."""
    model = smollm2.model
    ids = torch.tensor([smollm2.tokenizer(books["lcet10"][:6000])["input_ids"][:TOKENS]])
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model(ids, output_attentions=True, use_cache=False).attentions
    tova.enable(model)
    return ids, torch.stack([a[0] for a in attentions])


def kept(smollm2, ids, name: str, **options) -> list[list[list[int]]]:
    """Per layer and kept set, the positions that survive the prompt."""
    cache = EvictingCache(policies.make(name, budget=BUDGET, **options), prefill="one_shot")
    forward(smollm2.model, ids, cache)
    log = cache.evicted_at
    assert ((log == NEVER) | (log == TOKENS - 1)).all()
    log = log[:, 0].unsqueeze(1) if log.ndim == 3 else log[:, 0]
    return [[(heads == NEVER).nonzero()[:, 0].tolist() for heads in layer] for layer in log]


def top(values: torch.Tensor, k: int) -> list[int]:
    return sorted(values.topk(k).indices.tolist())


def by_head(map_: torch.Tensor) -> torch.Tensor:
    """[K, T, T]: averaged over the query heads that share keys (3 of 9)."""
    return map_.view(3, 3, TOKENS, TOKENS).mean(1)


def test_tova_official_is_top_k_of_the_last_row(smollm2, maps) -> None:
    ids, attention = maps
    found = kept(smollm2, ids, "tova_official")
    assert len(found) == 30
    for layer, (positions,) in enumerate(found):
        assert positions == top(attention[layer].mean(0)[-1], BUDGET), layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tova_official_rounds_as_the_models_dtype_does(dtype) -> None:
    """In half precision weights tie, and rounding decides: the first layer's kept sets are those of its rounded map.

    Later layers see what rounding the attention's output did before them, which is another matter.
    """

    class Unrounded(policies.TovaOfficial):
        combine = policies.Policy.combine

    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 0.01  # nearly even attention: many weights round to the same
    model = model.to(dtype)
    ids = tokens(4, 100, seed=5)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        map_ = model(ids, output_attentions=True, use_cache=False).attentions[0]
    tova.enable(model)
    assert map_.dtype == dtype
    official = EvictingCache(policies.make("tova_official", budget=60), prefill="one_shot")
    unrounded = EvictingCache(Unrounded(budget=60), prefill="one_shot")
    forward(model, ids, official)
    forward(model, ids, unrounded)
    score = map_.mean(1)[:, -1]
    for row in range(4):
        order = sorted(range(100), key=lambda j, row=row: (float(score[row, j]), j))
        assert official.kept(0, row) == sorted(order[40:])
    assert any(unrounded.kept(0, row) != official.kept(0, row) for row in range(4))


def test_tova_keeps_the_newest_beside_the_top(smollm2, maps) -> None:
    ids, attention = maps
    for layer, (positions,) in enumerate(kept(smollm2, ids, "tova")):
        assert positions == [*top(attention[layer].mean(0)[-1, :-1], BUDGET - 1), TOKENS - 1], layer


def test_tova_head(smollm2, maps) -> None:
    ids, attention = maps
    for layer, heads in enumerate(kept(smollm2, ids, "tova_head")):
        rows = by_head(attention[layer])[:, -1, :-1]
        assert heads == [[*top(row, BUDGET - 1), TOKENS - 1] for row in rows], layer


def test_h2o_and_its_halves(smollm2, maps) -> None:
    """Column sums of the whole map, below the diagonal: a token's own weight does not count."""
    ids, attention = maps
    for name, recent in (("h2o", 32), ("h2o_half", BUDGET // 2)):
        for layer, (positions,) in enumerate(kept(smollm2, ids, name)):
            sums = attention[layer].mean(0).double().tril(-1).sum(0)
            heavy = top(sums[: TOKENS - recent], BUDGET - recent)
            assert positions == [*heavy, *range(TOKENS - recent, TOKENS)], (name, layer)


def test_h2o_head_counts_a_tokens_own_weight(smollm2, maps) -> None:
    ids, attention = maps
    recent = BUDGET // 2
    for layer, heads in enumerate(kept(smollm2, ids, "h2o_head")):
        sums = by_head(attention[layer]).double().sum(1)
        expected = [[*top(s[: TOKENS - recent], BUDGET - recent), *range(TOKENS - recent, TOKENS)] for s in sums]
        assert heads == expected, layer


@pytest.mark.parametrize(("pooling", "kernel"), [("average", 5), ("max", 7), ("average", 1)])
def test_snapkv_prefill(smollm2, maps, pooling: str, kernel: int) -> None:
    """Votes of the last 32 queries on what is before them, pooled there; the window itself is kept."""
    ids, attention = maps
    window = 32
    pool = {"average": F.avg_pool1d, "max": F.max_pool1d}[pooling]
    found = kept(smollm2, ids, "snapkv_prefill", pooling=pooling, pool_kernel=kernel)
    for layer, heads in enumerate(found):
        votes = by_head(attention[layer])[:, -window:, : TOKENS - window].double().sum(1)
        pooled = pool(votes.unsqueeze(1), kernel, stride=1, padding=kernel // 2).squeeze(1)
        for head, positions in enumerate(heads):
            if pooling == "max":  # neighbours share a maximum: of equal ones the later is kept
                order = sorted(range(TOKENS - window), key=lambda j, row=pooled[head]: (float(row[j]), j))
                expected = sorted(order[-(BUDGET - window) :])
            else:
                expected = top(pooled[head], BUDGET - window)
            assert positions == [*expected, *range(TOKENS - window, TOKENS)], (layer, head)


def test_pyramidkv_prefill(smollm2, maps) -> None:
    """The same votes; layer l keeps what the code's schedule gives it for this prompt."""
    ids, attention = maps
    window, beta, layers = 32, 20, 30
    beyond = BUDGET - window
    least = beyond // beta
    most = beyond * 2 - least
    step = (most - least) // (layers - 1)
    for layer, heads in enumerate(kept(smollm2, ids, "pyramidkv_prefill")):
        capacity = most - layer * step
        votes = by_head(attention[layer])[:, -window:, : TOKENS - window].double().sum(1)
        pooled = F.avg_pool1d(votes.unsqueeze(1), 5, stride=1, padding=2).squeeze(1)
        expected = [[*top(row, capacity), *range(TOKENS - window, TOKENS)] for row in pooled]
        assert heads == expected, layer


def test_schedules_of_pyramidkv() -> None:
    """Capacity 512, window 8: 991 for the first of 32 layers, 61 for the last; short prompts are cut evenly."""
    made = policies.make("pyramidkv_prefill", budget=512, recent_window=8)
    remains = [made.for_layer(layer, 32).keeps_of_prompt(100_000, 10**6) for layer in range(32)]
    assert (remains[0], remains[31]) == (991, 61)
    assert (
        made.for_layer(0, 32).keeps_of_prompt(600, 10**6) == made.for_layer(31, 32).keeps_of_prompt(600, 10**6) == 512
    )
    assert made.for_layer(0, 32).keeps_of_prompt(1008, 10**6) == 991  # 2 * 504: no longer short
    assert made.for_layer(0, 32).keeps_of_prompt(1007, 10**6) == 512
    # A prompt of 960 has no 968 positions for the first layer: it is left whole, what is missing goes to the last.
    wide = policies.make("pyramidkv_prefill", budget=512, recent_window=32)
    assert [wide.for_layer(layer, 32).keeps_of_prompt(960, 10**6) for layer in (0, 31)] == [960, 92]
    assert [wide.for_layer(layer, 32).keeps_of_prompt(10_000, 10**6) for layer in (0, 31)] == [968, 69]
    slope = policies.make("tova", budget=512, layer_budgets="slope:20")
    assert [slope.for_layer(layer, 32).layer_budget for layer in (0, 31)] == [999, 38]


def test_scissorhands_paper(smollm2, maps) -> None:
    """Low-attention counts over the last 100 rows; half the budget is freed at once."""
    ids, attention = maps
    history, recent = 100, 10
    found = kept(smollm2, ids, "scissorhands_paper", history=history)
    share = 1.0 / torch.arange(TOKENS).double().unsqueeze(1)
    agree, total = 0, 0
    for layer, heads in enumerate(found):
        low = (by_head(attention[layer]).double() < share).tril(-1)[:, -history:].sum(1)
        for head, positions in enumerate(heads):
            order = sorted(range(TOKENS - recent), key=lambda j, row=low[head]: (-int(row[j]), j))
            dropped = set(order[: TOKENS - BUDGET // 2])
            expected = [j for j in range(TOKENS) if j not in dropped]
            agree += len(set(expected) & set(positions))
            total += len(expected)
            assert len(positions) == BUDGET // 2
    # A weight that equals its fair share to the last bit may count on one side only.
    print(f"{agree} of {total} kept positions agree")
    assert agree >= total - 6


@pytest.mark.parametrize("policy", ["snapkv_prefill", "pyramidkv_prefill"])
def test_some_policies_take_one_prompt_only(policy: str) -> None:
    """What follows the first prompt is all kept, however it is fed."""
    model, ids = tiny("llama"), tokens(2, 90)
    cache = EvictingCache(policies.make(policy, budget=20, recent_window=4), prefill="one_shot")
    forward(model, ids[:, :50], cache)
    held = [len(cache.kept(layer)) for layer in range(2)]
    first = cache.evicted_at
    forward(model, ids[:, 50:80], cache)
    for t in range(80, 90):
        forward(model, ids[:, t : t + 1], cache)
    assert [len(cache.kept(layer)) for layer in range(2)] == [n + 40 for n in held]
    assert (cache.evicted_at[..., :50] == first).all()
    assert (cache.evicted_at[..., 50:] == NEVER).all()


def test_a_second_prompt_of_reindexed_positions_is_taken_step_by_step() -> None:
    model, ids = tiny("llama"), tokens(2, 90)
    made = policies.make("streaming_llm_reindexed", budget=20)
    found = []
    for cuts in ([50, 90], [50, *range(51, 91)]):
        cache = EvictingCache(made, prefill="one_shot")
        found.append(torch.cat([forward(model, ids[:, a:b], cache) for a, b in zip([0, *cuts], cuts, strict=False)], 1))
    assert (found[0] - found[1]).abs().max() < 1e-3
