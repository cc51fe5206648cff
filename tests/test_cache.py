"""The evicting cache where people use it: generate, batches, beams, ordinary caches beside it, and clear refusals."""

from __future__ import annotations

import pytest
import torch
from support.layers import qkv
from support.models import TINY, forward, not_padding, tiny, tokens
from support.policies import small
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

import tova
from tova import EvictingCache, UsageError, policies
from tova.compat import cache_argument


@pytest.fixture(scope="module", params=TINY)
def model(request):
    return tiny(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def generate(model, ids, cache, **more):
    options = dict(max_new_tokens=24, do_sample=False, pad_token_id=0) | more
    return model.generate(ids, **{cache_argument(model): cache}, **options)


def test_generate_is_the_replay_of_what_it_wrote(model) -> None:
    """Greedy decoding through the cache: feeding its own text back in one pass gives the same choices and drops."""
    ids = tokens(2, 60)
    cache = EvictingCache(policies.make("tova", budget=20))
    text = generate(model, ids, cache)
    again = EvictingCache(policies.make("tova", budget=20))
    logits = forward(model, text[:, :-1], again)
    assert (logits[:, 59:].argmax(-1) == text[:, 60:]).all()
    assert (again.evicted_at == cache.evicted_at).all()
    assert cache.get_seq_length() == 83
    assert all(len(cache.kept(layer)) <= 20 for layer in range(len(cache.layers)))


def test_left_padding_in_generate(model) -> None:
    """A padded row writes what it writes alone."""
    ids = tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    made = policies.make("streaming_llm", budget=20)
    both = generate(model, ids, EvictingCache(made), attention_mask=mask)
    alone = generate(model, ids[:1, 13:], EvictingCache(made))
    assert (both[0, 60:] == alone[0, 47:]).all()


def test_chunked_prefill(model) -> None:
    ids = tokens(1, 90)
    whole = generate(model, ids, EvictingCache(policies.make("h2o", budget=24, recent_window=6)))
    pieces = generate(
        model, ids, EvictingCache(policies.make("h2o", budget=24, recent_window=6)), prefill_chunk_size=23
    )
    assert (whole == pieces).all()


def test_beams_carry_their_own_kept_sets(llama) -> None:
    """With as many beams as one there is nothing to reorder; with three the run must equal one with full rows."""
    ids = tokens(2, 50)
    made = policies.make("tova", budget=16)
    greedy = generate(llama, ids, EvictingCache(made))
    assert (generate(llama, ids, EvictingCache(made), num_beams=1) == greedy).all()
    unbounded = generate(llama, ids, EvictingCache(policies.make("tova", budget=1000)), num_beams=3)
    ordinary = generate(llama, ids, DynamicCache(config=llama.config), num_beams=3)
    assert (unbounded == ordinary).all()
    cache = EvictingCache(made)
    best = generate(llama, ids, cache, num_beams=3, num_return_sequences=1)
    assert best.shape == (2, 74)
    assert cache.evicted_at.shape[1] == 6


def test_reordering_moves_everything(llama) -> None:
    """After rows are swapped, each continues as the other would have."""
    ids = tokens(2, 60)
    made = policies.make("snapkv", budget=24, recent_window=6)
    swapped, straight = EvictingCache(made), EvictingCache(made)
    forward(llama, ids[:, :40], swapped)
    forward(llama, ids[:, :40], straight)
    swapped.reorder_cache(torch.tensor([1, 0]))
    a = forward(llama, ids[:, 40:], straight)
    b = forward(llama, ids[:, 40:].flip(0), swapped)
    assert (a - b.flip(0)).abs().max() < 1e-5
    assert (straight.evicted_at == swapped.evicted_at.flip(1)).all()
    swapped.batch_select_indices(torch.tensor([1]))
    assert swapped.evicted_at.shape[1] == 1
    swapped.batch_repeat_interleave(3)
    assert swapped.evicted_at.shape[1] == 3


def test_ordinary_caches_still_work(model) -> None:
    """An enabled model with DynamicCache, or with none, gives what it gave before."""
    ids = tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        tova.enable(model)
        found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        assert (found - expected)[mask.bool()].abs().max() < 1e-3

        def texts() -> list[torch.Tensor]:
            usual = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
            cached = {cache_argument(model): DynamicCache(config=model.config)}
            return [model.generate(ids, **usual), model.generate(ids, prefill_chunk_size=17, **cached, **usual)]

        ours = texts()
        model.set_attn_implementation("eager")
        theirs = texts()
        tova.enable(model)
    assert (ours[0] == theirs[0]).all()
    assert (ours[1] == theirs[1]).all()


def test_the_log_and_the_bytes(llama) -> None:
    ids = tokens(2, 100)
    cache = EvictingCache(policies.make("tova", budget=30))
    with pytest.raises(UsageError, match="nothing has been processed yet"):
        _ = cache.evicted_at
    forward(llama, ids, cache, padding=[0, 10])
    log = cache.evicted_at
    assert log.shape == (2, 2, 100)
    assert log.dtype == torch.int64
    assert (log[:, 1, :10] == -1).all()
    assert ((log == torch.iinfo(torch.int64).max).sum(-1) == 30).all()
    # Per layer and row: 30 positions of 2 heads x 16 numbers, keys and values, float32; a position, a flag, a weight;
    # and three counters.
    assert cache.nbytes == 2 * 2 * (30 * (2 * 2 * 16 * 4 + 8 + 1 + 4) + 3 * 8)
    assert cache.policy.tensor_bytes_per_slot() == 8 + 1 + 4
    silent = EvictingCache(policies.make("tova", budget=30), log=False)
    forward(llama, ids, silent, padding=[0, 10])
    assert silent.nbytes == cache.nbytes
    with pytest.raises(UsageError, match="log=False"):
        _ = silent.evicted_at


def test_memory_is_flat_past_the_budget(llama) -> None:
    ids = tokens(1, 100)
    cache = EvictingCache(policies.make("tova", budget=30))
    sizes = []
    for t in range(100):
        forward(llama, ids[:, t : t + 1], cache)
        sizes.append(cache.nbytes)
    assert len(set(sizes[31:])) == 1
    # budget + 1 slots: the newcomer needs a place before anything is dropped
    assert sizes[-1] == 2 * (31 * (2 * 2 * 16 * 4 + 8 + 1 + 4) + 3 * 8)


def test_reset_starts_afresh(llama) -> None:
    ids = tokens(2, 60)
    cache = EvictingCache(policies.make("h2o", budget=20, recent_window=4))
    first = forward(llama, ids, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert (forward(llama, ids, cache) - first).abs().max() == 0


def test_pyramid_shares_reach_the_layers(llama) -> None:
    cache = EvictingCache(policies.make("pyramidkv", budget=24, recent_window=4))
    forward(llama, tokens(1, 100), cache)
    assert [len(cache.kept(layer)) for layer in range(2)] == [38, 9]


def test_four_dimensional_masks(llama) -> None:
    """A mask somebody made by hand is followed: here left padding, once as True and False and once as 0 and -inf."""
    ids = tokens(2, 60)
    made = policies.make("tova", budget=20)
    usual = EvictingCache(made)
    expected = forward(llama, ids, usual, padding=[0, 7])
    real = not_padding([0, 7], 60)
    allowed = torch.ones(60, 60, dtype=torch.bool).tril() & real[:, None, None, :]
    positions = (real.cumsum(-1) - 1).clamp_min(0)
    for mask in (allowed, torch.where(allowed, 0.0, torch.finfo(torch.float32).min)):
        cache = EvictingCache(made)
        found = forward(llama, ids, cache, attention_mask=mask, position_ids=positions)
        assert (cache.evicted_at == usual.evicted_at).all()
        assert (found - expected)[real].abs().max() < 1e-5


def test_clear_refusals(llama) -> None:
    ids = tokens(1, 40)
    cache = EvictingCache(policies.make("tova", budget=20))
    forward(llama, ids, cache)
    with pytest.raises(UsageError, match="cannot be cropped"):
        cache.crop(-1)
    assert not cache.is_croppable
    right = torch.ones_like(ids)
    right[0, -3:] = 0
    with pytest.raises(UsageError, match="left padding"):
        forward(llama, ids, EvictingCache(policies.make("tova", budget=20)), attention_mask=right)
    ahead = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    with pytest.raises(UsageError, match="look ahead"):
        forward(llama, ids, EvictingCache(policies.make("tova", budget=20)), attention_mask=ahead)
    with pytest.raises(UsageError, match="evict_every must be an integer of at least 1, got 0"):
        EvictingCache(policies.make("tova"), evict_every=0)
    with pytest.raises(UsageError, match="scan must be one of auto, reference, cpu, gpu, fixed_point, got 'fast'"):
        EvictingCache(policies.make("tova"), scan="fast")
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(UsageError, match="T5ForConditionalGeneration is an encoder-decoder"):
        tova.enable(t5)


def test_a_model_that_is_not_enabled_is_noticed() -> None:
    """Another attention would see nothing but the new tokens, and be wrong without a word."""
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UsageError, match=r"call tova\.enable\(model\) first"):
        forward(model, tokens(1, 20), EvictingCache(policies.make("tova", budget=8)))


def test_training_is_refused(llama) -> None:
    model = tiny("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()
    with pytest.raises(UsageError, match=r"evaluation mode only, got attention dropout 0\.1"):
        forward(model, tokens(1, 20), EvictingCache(policies.make("tova", budget=8)))


def test_there_is_no_gradient(llama) -> None:
    """Forgetting torch.no_grad() costs nothing; asking for a gradient is refused instead of being wrong."""
    ids = tokens(1, 30)
    cache = EvictingCache(policies.make("tova", budget=8))
    logits = llama(input_ids=ids, use_cache=True, **{cache_argument(llama): cache}).logits
    assert (logits.detach() - forward(llama, ids, EvictingCache(policies.make("tova", budget=8)))).abs().max() < 1e-5
    with pytest.raises(UsageError, match="no gradient"):
        logits.sum().backward()


def test_a_policy_of_ones_own_is_compiled_as_a_built_in_one_is(llama) -> None:
    """Twenty lines outside the library; here tova once more, which must then decide as the built-in one."""
    from dataclasses import dataclass

    from tova.policies import Policy, Record

    @dataclass(frozen=True, kw_only=True)
    class Mine(Policy):
        name = "mine"

        def records(self):
            return {"last": Record()}

        def observe(self, slots, attn):
            return {"last": attn}

        def score(self, slots):
            return slots["last"]

    ids = tokens(2, 80)
    mine, builtin = EvictingCache(Mine(budget=20)), EvictingCache(policies.make("tova", budget=20))
    forward(llama, ids, mine)
    forward(llama, ids, builtin)
    assert (mine.evicted_at == builtin.evicted_at).all()
    compiled = EvictingCache(Mine(budget=20), scan="cpu")
    forward(llama, ids, compiled)
    assert (compiled.evicted_at == builtin.evicted_at).all()

    class Branches(Mine):
        def score(self, slots):
            return slots["last"] if bool((slots.newest > 0).all()) else slots["last"] + 1

    forward(llama, ids, other := EvictingCache(Branches(budget=20)))
    assert (other.evicted_at == builtin.evicted_at).all()
    with pytest.raises(UsageError, match=r"scan=cpu cannot take mine: score goes over all rows at once"):
        forward(llama, ids, EvictingCache(Branches(budget=20), scan="cpu"))


def test_caches_of_another_kind_are_refused(llama) -> None:
    made = policies.make("tova", budget=16)
    with pytest.raises(
        UsageError, match=r"cannot be offloaded: .* take a smaller budget, or transformers' DynamicCache"
    ):
        EvictingCache(made, offloading=True)
    with pytest.raises(UsageError, match=r"cannot be quantised: .* or transformers' QuantizedCache"):
        EvictingCache(made, nbits=4)
    with pytest.raises(UsageError, match="takes no option 'budget'"):
        EvictingCache(made, budget=3)
    # Drafts are taken back by cropping, which transformers asks for before it starts.
    for assisted in (dict(assistant_model=llama), dict(prompt_lookup_num_tokens=3)):
        with pytest.raises((UsageError, ValueError), match="cropped"):
            llama.generate(
                tokens(1, 30),
                max_new_tokens=5,
                do_sample=False,
                **{cache_argument(llama): EvictingCache(made)},
                **assisted,
            )


def test_streaming_output(llama) -> None:
    """Tokens come one by one as they are made, and are those of the whole text."""

    class Streamer:
        def __init__(self) -> None:
            self.got: list[list[int]] = []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value.flatten().tolist())

        def end(self) -> None:
            self.got.append([])

    streamer, ids = Streamer(), tokens(1, 30)
    cache = EvictingCache(policies.make("tova", budget=16))
    text = llama.generate(
        ids, max_new_tokens=8, do_sample=False, pad_token_id=0, streamer=streamer, **{cache_argument(llama): cache}
    )
    assert streamer.got == [ids[0].tolist(), *([token] for token in text[0, 30:].tolist()), []]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["tova", "h2o", "snapkv", "tova_head"])
def test_half_precision(dtype, policy: str) -> None:
    """Records and ranking are float32 whatever the model's dtype: with keys and queries that half precision holds
    exactly, what is kept is what a float32 run keeps, and outputs differ by rounding only."""
    from tova.replay import Attention, LayerState, replay
    from tova.scan import select

    made = small(policy, 24)
    q, k, v = (x.to(dtype) for x in qkv(tokens=90, size=16, seed=3))
    found = []
    for kind in (dtype, torch.float32):
        for scan, pieces in (("auto", [90]), ("reference", [40, *range(41, 91)])):
            state = LayerState.empty(made, k.to(kind), v.to(kind), 2 if made.per_head else 1, log=True)
            assert all(r.dtype in (torch.float32, torch.bool) for r in state.slots.records.values())
            out, begin = [], 0
            for end in pieces:
                part = (x[:, :, begin:end].to(kind) for x in (q, k, v))
                out.append(
                    replay(*part, state, made, Attention(0.25), scan=select(scan, made, q.device, kind), chunk=17)
                )
                begin = end
            found.append((torch.cat(out, 2), state.log.view))
    for out, log in found:
        assert (log == found[-1][1]).all()
        assert (out.float() - found[-1][0].float()).abs().max() < 0.03
    assert found[0][0].dtype == dtype


def test_a_static_cache_still_works(llama) -> None:
    """Its empty columns are masked, whatever it does with its counter: decoding is the plain forward."""
    from transformers import StaticCache

    ids = tokens(2, 40)
    with torch.inference_mode():
        expected = llama(ids, use_cache=False).logits
        cache = StaticCache(config=llama.config, max_cache_len=64)
        parts = [llama(input_ids=ids[:, :30], use_cache=True, **{cache_argument(llama): cache}).logits]
        for t in range(30, 40):
            parts.append(llama(input_ids=ids[:, t : t + 1], use_cache=True, **{cache_argument(llama): cache}).logits)
    assert (torch.cat(parts, 1) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_autocast(name: str) -> None:
    """As with SDPA, attention is in autocast's dtype; a prompt and then a token at a time give what one pass gives."""
    model, ids = tiny(name), tokens(1, 60)
    argument = cache_argument(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        own = model(ids, use_cache=False).logits.float()
        whole = EvictingCache(policies.make("tova", budget=100))
        assert (model(ids, use_cache=True, **{argument: whole}).logits.float() - own).abs().max() < 1.0
        assert whole.layers[0].state.keys.dtype == whole.layers[0].state.values.dtype == torch.bfloat16
        cache = EvictingCache(policies.make("tova", budget=100))
        model(ids[:, :50], use_cache=True, **{argument: cache})
        for t in range(50, 60):
            last = model(ids[:, t : t + 1], use_cache=True, **{argument: cache}).logits[:, -1].float()
        assert (last - own[:, -1]).abs().max() < 1.0
    with torch.no_grad(), pytest.raises(UsageError, match=r"autocast must be on, or off, all along a text"):
        model(ids[:, :1], use_cache=True, **{argument: cache})
