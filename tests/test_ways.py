"""Ways of running a model that give wrong numbers without a word if nobody watches: the model's own, or one sentence.

Each test is of a kind of fault; where several models or moments could be struck, several are.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import transformers
from support.models import build, forward, not_padding, tiny, tokens
from support.policies import small
from transformers import AttentionInterface, DynamicCache
from transformers.generation import configuration_utils
from transformers.masking_utils import causal_mask_function, or_masks, sliding_window_overlay

import tova
from tova import EvictingCache, UsageError, compat, policies
from tova.compat import cache_argument
from tova.masks import LazyMask, MaskRule, is_known, mask_maker
from tova.measures import AttentionMeasures, token_nll
from tova.side_by_side import SideBySide

SMALL = dict(
    vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    initializer_range=0.5,
)  # fmt: skip


def make(policy: str = "tova", **options) -> EvictingCache:
    return EvictingCache(small(policy, **options))


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture(scope="module")
def mistral():
    return tiny("mistral")


# -- without an evicting cache ----------------------------------------------------------------------------------

IMPLEMENTATIONS = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
FRESH = {
    "Llama": dict(num_key_value_heads=1),
    "Mistral": dict(num_key_value_heads=1, sliding_window=16),
    "Gemma2": dict(num_key_value_heads=1, head_dim=16, sliding_window=16),  # softcap: eager
    "GptOss": dict(num_key_value_heads=1, head_dim=16, sliding_window=16, num_local_experts=4),  # sinks: eager
    "Doge": {},  # builds on its mask
    "DiffLlama": dict(num_key_value_heads=2),  # calls its attention twice
}


def fresh(name: str):
    model_class = getattr(transformers, f"{name}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        options = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
        return model_class(model_class.config_class(**SMALL | options | FRESH[name])).eval()


def outcome(call) -> object:
    """What came out, or the kind of what was raised: a way that transformers does not offer must stay as it is."""
    try:
        return call()
    except Exception as e:
        return type(e).__name__


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b


@pytest.mark.parametrize("name", FRESH)
def test_enabling_changes_no_other_way_of_running(name: str) -> None:
    """generate with every kind of cache, plain forwards and their attention maps: bit for bit as before."""
    model, ids = fresh(name), tokens(2, 40) % 96 + 3
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)

    def generate(**more):
        return lambda: model.generate(ids, attention_mask=mask, **options, **more)

    def logits(**more):
        return lambda: model(input_ids=ids, attention_mask=mask, **more).logits

    ways = {f"generate {kind}": generate(cache_implementation=kind) for kind in IMPLEMENTATIONS}
    ways |= {
        "generate": generate(),
        "generate without cache": generate(use_cache=False),
        "unpadded": lambda: model.generate(ids, cache_implementation="static", **options),
        "beams": generate(num_beams=2),
        "prompt in pieces": generate(prefill_chunk_size=17),
        "forward": logits(use_cache=False),
        "with a cache": logits(use_cache=True),
        "no mask": lambda: model(input_ids=ids, use_cache=False).logits,
        "training": lambda: model.train()(input_ids=ids, labels=ids).loss.detach(),
        "attention maps": lambda: model.eval()(input_ids=ids, output_attentions=True).attentions[0],
    }
    with torch.no_grad():
        before = {way: outcome(call) for way, call in ways.items()}
        with contextlib.suppress(UsageError):  # older versions let the attention of fewer models be chosen
            assert tova.enable(model) is model
        for way, call in ways.items():
            assert same(outcome(call), before[way]), way
    assert sum(isinstance(found, torch.Tensor) for found in before.values()) >= 9


def test_continuous_batching_names_its_attention() -> None:
    """It knows attention by name: refused in a sentence that says which, and as before once that is set."""
    model, ids = fresh("Llama"), tokens(2, 40) % 96 + 3

    def text() -> torch.Tensor:
        return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, cache_implementation="paged")

    before = outcome(text)
    if not isinstance(before, torch.Tensor):
        pytest.skip(f"this version does not do it here: {before}")
    tova.enable(model)
    with pytest.raises(ValueError, match=r"Use 'paged\|eager', 'sdpa'"):
        text()
    model.set_attn_implementation("sdpa")
    assert torch.equal(text(), before)
    cache, other = make(), make()
    assert torch.equal(forward(tova.enable(model), ids, cache), forward(tova.enable(fresh("Llama")), ids, other))


def test_the_towers_of_a_composite_model_are_left_alone() -> None:
    config = transformers.Gemma3Config(
        text_config=SMALL | dict(num_key_value_heads=1, head_dim=16, vocab_size=300),
        vision_config=dict(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
        image_token_index=290,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    before = config.vision_config._attn_implementation
    tova.enable(model)
    assert model.config.get_text_config()._attn_implementation in tova.attention.NAMES.values()
    assert model.config.vision_config._attn_implementation == before
    ids = tokens(1, 30)
    argument = cache_argument(model)
    with torch.inference_mode():
        own = model(input_ids=ids, use_cache=False).logits
        found = model(input_ids=ids, use_cache=True, **{argument: make("full")}).logits
    assert (found - own).abs().max() < 1e-4
    # Tokens of an image look at each other in both directions.
    kinds = torch.zeros_like(ids)
    kinds[:, 10:14] = 1
    with torch.inference_mode(), pytest.raises(UsageError, match="look ahead"):
        model(input_ids=ids, token_type_ids=kinds, use_cache=True, **{argument: make("full")})


# -- masks ------------------------------------------------------------------------------------------------------


def lazy(rule=None, padding=None, seen: int = 3, new: int = 5, batch: int = 2, ordinary: str = "sdpa") -> LazyMask:
    """A mask as transformers asks for one on behalf of an evicting cache."""
    cache = make("full")
    model = tiny("llama")
    if seen:
        forward(model, tokens(batch, seen), cache)
    columns, _ = cache.get_mask_sizes(new, 0)
    new_columns = dict(cache_position=torch.arange(seen, seen + new))
    asked = new_columns if compat._MASKS_BY_COLUMNS else dict(q_length=new, q_offset=seen, device="cpu")
    mask = mask_maker(ordinary)(
        batch_size=batch, kv_length=columns, kv_offset=0, mask_function=rule or causal_mask_function,
        attention_mask=padding, dtype=torch.float32, **asked,
    )  # fmt: skip
    assert isinstance(mask, LazyMask)
    return mask


def naive(seen: int = 3, new: int = 5, batch: int = 2, window: int | None = None, padding=None) -> torch.Tensor:
    allowed = torch.zeros(batch, 1, new, seen + new, dtype=torch.bool)
    for b in range(batch):
        for i in range(new):
            for j in range(seen + i + 1):
                real = padding is None or bool(padding[b, j])
                allowed[b, 0, i, j] = real and (window is None or j > seen + i - window)
    return allowed


def test_a_lazy_mask_takes_no_memory_and_survives_copies() -> None:
    mask = lazy(new=40_000, seen=0, batch=1)
    assert mask.shape == (1, 1, 40_000, 40_000)
    assert mask.untyped_storage().nbytes() <= 8
    for copied in (
        mask.contiguous(), mask.clone(), mask.detach(), mask.to("cpu"), mask.to(torch.bool), mask.to(device="cpu"),
        mask.cpu(), mask[:], mask[...], mask[:, :, :, :40_000], mask[:, :, -40_000:], copy.deepcopy(mask),
        mask.to("meta"),
    ):  # fmt: skip
        assert isinstance(copied, LazyMask)
        assert copied.rule is mask.rule
        assert copied.shape == mask.shape
        assert copied.untyped_storage().nbytes() <= 8
    assert mask.to("meta").device.type == "meta"


@pytest.mark.parametrize("window", [None, 4])
def test_a_lazy_mask_is_the_mask_to_everything_else(window: int | None) -> None:
    """Any other operation has the mask that would have been made: no code can see nothing where there is something."""
    rule = None if window is None else transformers.masking_utils.sliding_window_causal_mask_function(window)
    padding = torch.tensor([[True] * 8, [False] * 2 + [True] * 6])
    expected = naive(window=window, padding=padding)

    def mask() -> LazyMask:
        return lazy(rule, padding)

    found = [
        mask() & True, mask()[:, :, :, :4], mask()[1:], mask().expand(2, 3, 5, 8), mask().float(), mask()[..., None],
        torch.where(mask(), 0.0, -1.0), mask().logical_not(), torch.cat([mask(), mask()], 1), mask().repeat(1, 2, 1, 1),
    ]  # fmt: skip
    wanted = [
        expected, expected[:, :, :, :4], expected[1:], expected.expand(2, 3, 5, 8), expected.float(),
        expected[..., None], torch.where(expected, 0.0, -1.0), ~expected, torch.cat([expected] * 2, 1),
        expected.repeat(1, 2, 1, 1),
    ]  # fmt: skip
    for a, b in zip(found, wanted, strict=True):
        assert type(a) is torch.Tensor
        assert torch.equal(a, b)
    q, k = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 8, 4)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attention(q, k, k, attn_mask=mask()), attention(q, k, k, attn_mask=expected))
    additive = lazy(rule, padding, ordinary="eager") + torch.zeros(2, 2, 5, 8)
    assert torch.equal(additive == 0, expected.expand(2, 2, 5, 8))
    with pytest.raises(UsageError, match="cannot be changed in place"):
        mask()[0] = False
    with pytest.raises(UsageError, match="cannot be changed in place"):
        mask().masked_fill_(mask(), False)


COPIES = {
    "contiguous": lambda mask: mask.contiguous(),
    "clone": lambda mask: mask.clone(),
    "moved": lambda mask: mask.to("cpu"),
    "slice of all": lambda mask: mask[:, :, :, : mask.shape[-1]],
    "computed": lambda mask: mask & True,
    "expanded to heads": lambda mask: mask.expand(-1, 4, -1, -1),
}


@pytest.mark.parametrize("how", COPIES)
def test_masks_that_a_model_copies(mistral, how: str) -> None:
    """As accelerate moves them from card to card, and generate makes them contiguous."""
    ids, padding = tokens(2, 60), [0, 9]
    whole, copied = make(), make()
    expected = forward(mistral, ids, whole, padding)

    def copying(module, args, kwargs):
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = COPIES[how](kwargs["attention_mask"])
        return args, kwargs

    hooks = [layer.self_attn.register_forward_pre_hook(copying, with_kwargs=True) for layer in mistral.model.layers]
    try:
        found = forward(mistral, ids, copied, padding)
        left = not_padding(padding, 60)
        assert (found - expected)[left].abs().max() < 1e-5
        assert torch.equal(whole.evicted_at, copied.evicted_at)
        mask = left.long()
        argument = cache_argument(mistral)
        text = mistral.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **{argument: make()}
        )
    finally:
        for hook in hooks:
            hook.remove()
    again = mistral.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **{argument: make()}
    )
    assert torch.equal(text, again)


def test_bidirectional_models_are_refused() -> None:
    """A rule that looks ahead, as BERT's masks and those of image tokens do; token by token nothing is ahead."""
    config = transformers.BertConfig(**SMALL)
    try:
        model = tova.enable(transformers.BertLMHeadModel(config).eval())
    except UsageError as e:
        pytest.skip(str(e))
    ids = torch.arange(40)[None]
    with pytest.raises(UsageError, match="look ahead"):
        forward(model, ids, make("full"))
    padded = torch.ones_like(ids)
    padded[:, :5] = 0
    with pytest.raises(UsageError, match="look ahead"):
        forward(model, ids, make("full"), attention_mask=padded)


def test_rules_are_tried_out_unless_they_are_known() -> None:
    """Every function of transformers is either known to be followed or looked through, whatever it is made of."""
    utils = transformers.masking_utils
    both = utils.and_masks(sliding_window_overlay(4), causal_mask_function)
    assert is_known(None)
    assert is_known(both)
    assert is_known(utils.and_masks(both, utils.packed_sequence_mask_function(torch.zeros(1, 9))))
    assert not is_known(sliding_window_overlay(4))
    assert not is_known(getattr(utils, "bidirectional_mask_function", lambda *index: index[2] >= 0))
    assert not is_known(lambda *index: index[3] <= index[2])
    blocks = torch.tensor([[-1, -1, -1, 0, 0, 0, -1, -1, -1, 1, 1, -1]])

    def blockwise(blocks: torch.Tensor):  # as for the tokens of an image
        return lambda b, h, q, k: (blocks[b, q] == blocks[b, k]) & (blocks[b, q] >= 0)

    overlay = or_masks(causal_mask_function, blockwise(blocks))
    none = or_masks(causal_mask_function, blockwise(torch.full_like(blocks, -1)))

    def try_out(rule, steps: int = 12, offset: int = 0) -> None:
        made = MaskRule(
            rule, None, offset, offset + steps, lambda: None, known=is_known(rule), device=torch.device("cpu")
        )
        made.check(steps, torch.zeros(1, dtype=torch.int64))

    try_out(none)
    try_out(lambda b, h, q, k: (k <= q) & (k > q - 3))
    with pytest.raises(UsageError, match="look ahead"):
        try_out(overlay)
    with pytest.raises(UsageError, match="look ahead"):
        try_out(lambda b, h, q, k: (k <= q) | ((q == 700) & (k == 1400)), steps=1500)
    with pytest.raises(UsageError, match="hides a token from one query and shows it to a later one"):
        try_out(lambda b, h, q, k: (k <= q) & ~((q == 5) & (k == 2)))
    with pytest.raises(UsageError, match="hides a token from one query and shows it to a later one"):
        try_out(lambda b, h, q, k: (k <= q) & ~((q == 255) & (k == 2)), steps=300)  # at the edge of a block


def test_masks_passed_whole_are_read_anew(llama) -> None:
    """Edited in place, through torch or through the array they share memory with; reused; too short."""
    ids = tokens(1, 30)
    allowed = np.tril(np.ones((1, 1, 30, 30), dtype=bool))
    mask = torch.from_numpy(allowed)
    first = forward(llama, ids, make("full"), attention_mask=mask)
    for edit in ("array", "tensor"):
        if edit == "array":
            allowed[..., 8:, :8] = False
        else:
            mask[..., 8:, 8] = False
            mask[..., 8, 8] = True
        found = forward(llama, ids, make("full"), attention_mask=mask)
        with torch.inference_mode():
            own = llama(input_ids=ids, attention_mask=mask, use_cache=False).logits
        assert (found - own).abs().max() < 1e-4
        assert (found - first).abs().max() > 1e-2
        first = found
    cache = make("full")
    forward(llama, ids, cache, attention_mask=torch.ones(1, 1, 30, 30, dtype=torch.bool).tril())
    with pytest.raises(UsageError, match=r"of shape \[1, 1, new tokens, 60 columns\], got \[1, 1, 30, 30\]"):
        forward(llama, ids, cache, attention_mask=mask)


def test_masks_that_cannot_be_followed(llama) -> None:
    ids = tokens(2, 20)
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    additive = torch.where(causal, 0.0, torch.finfo(torch.float32).min)

    def refused(mask: torch.Tensor, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            forward(llama, ids, make("full"), attention_mask=mask)

    slopes = -0.5 * (torch.arange(20).view(-1, 1) - torch.arange(20)).clamp_min(0)
    refused((additive + slopes)[None, None], "adds a bias")
    heads = causal.repeat(1, 4, 1, 1)
    heads[:, 2, 10:, 3] = False
    refused(heads, "differs between heads")
    again = causal.clone()
    again[7, 2] = False
    refused(again[None, None], "hides a token from one query and shows it to a later one")
    refused(causal.repeat(3, 1, 1, 1), r"of shape \[2, 1, new tokens, 20 columns\], got \[3, 1, 20, 20\]")
    refused(torch.full((1, 1, 20, 20), float("nan")), "adds a bias")
    same_heads = additive.expand(2, 4, 20, 20)
    with torch.inference_mode():
        own = llama(input_ids=ids, use_cache=False).logits
    assert (forward(llama, ids, make("full"), attention_mask=same_heads) - own).abs().max() < 1e-4


def test_what_a_mask_has_hidden_stays_hidden(llama) -> None:
    """From call to call: a window in a mask passed whole moves on, but nothing comes back."""
    ids = tokens(1, 12)
    cache = make("full")
    window = torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)
    forward(llama, ids, cache, attention_mask=window[None, None])
    row = torch.zeros(1, 1, 1, 13, dtype=torch.bool)
    row[..., 9:] = True
    forward(llama, ids[:, :1], cache, attention_mask=row)
    with pytest.raises(UsageError, match="shows a token that an earlier mask has hidden"):
        forward(llama, ids[:, :1], cache, attention_mask=torch.ones(1, 1, 1, 14, dtype=torch.bool))


def test_padding_stays_what_it_was(llama) -> None:
    """A 2D mask that hides earlier tokens later on, or has not a column for each."""
    ids = tokens(2, 20)
    for later in ("hides", "shows", "short"):
        cache = make("full")
        forward(llama, ids, cache, padding=[0, 4])
        mask = torch.ones(2, 25, dtype=torch.int64)
        mask[1, :4] = 0
        if later == "hides":
            mask[0, 7] = 0
        elif later == "shows":
            mask[1, 2] = 1
        else:
            mask = mask[:, :22]
        with pytest.raises(
            UsageError, match=r"attention_mask (says otherwise of earlier|must have a column for every)"
        ):
            forward(llama, ids[:, :5], cache, attention_mask=mask)
    silent, told = make("full"), make("full")
    for cache in (silent, told):
        forward(llama, ids, cache, padding=[0, 4])
    mask = torch.ones(2, 25, dtype=torch.int64)
    mask[1, :4] = 0
    # No mask says nothing of earlier tokens: padding stays padding.
    assert torch.equal(forward(llama, ids[:, :5], silent), forward(llama, ids[:, :5], told, attention_mask=mask))


# -- keys and values on their way -------------------------------------------------------------------------------


def test_a_layer_that_calls_its_attention_twice() -> None:
    """Its second call would take every token once more."""
    model = tiny("llama")
    original = tova.attention.evicting_attention

    def twice(*args, **kwargs):
        original(*args, **kwargs)
        return original(*args, **kwargs)

    AttentionInterface.register(tova.attention.NAME, twice)
    try:
        cache = make("full")
        with pytest.raises(UsageError, match="more than once for the same keys"):
            forward(model, tokens(1, 20), cache)
        with pytest.raises(UsageError, match="broken off"):
            _ = cache.evicted_at
    finally:
        AttentionInterface.register(tova.attention.NAME, original)
    says = "changes its keys after caching them, or its values|does not let its attention function be chosen"
    with pytest.raises(UsageError, match=says):
        forward(tova.enable(fresh("DiffLlama")), tokens(1, 30) % 96, make("full"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", [1, 2])
def test_another_attention_is_noticed_at_once(attention: str, layers: int) -> None:
    """Also in the only layer, after which nothing else would notice."""
    model = build("LlamaForCausalLM", dict(num_hidden_layers=layers))
    model.set_attn_implementation(attention)
    for ids in (tokens(1, 20), tokens(1, 1)):
        with pytest.raises(UsageError, match=r"call tova\.enable\(model\) first"):
            forward(model, ids, make())


@pytest.mark.parametrize("what", ["key", "value"])
def test_changed_keys_and_values_are_noticed_at_once(what: str) -> None:
    model = build("LlamaForCausalLM", dict(num_hidden_layers=1))
    tova.enable(model)

    def changing(module, query, key, value, *args, **kwargs):
        key, value = (key * 1.0, value) if what == "key" else (key, value * 1.0)
        return tova.attention.evicting_attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(tova.attention.NAME, changing)
    try:
        with pytest.raises(UsageError, match="changes its keys after caching them, or its values"):
            forward(model, tokens(1, 20), make())
    finally:
        tova.enable(model)


@pytest.mark.parametrize("how", ["contiguous", "clone", "detach"])
def test_copied_keys_and_values_are_followed(llama, how: str) -> None:
    def copying(module, query, key, value, *args, **kwargs):
        return tova.attention.evicting_attention(
            module, query, getattr(key, how)(), getattr(value, how)(), *args, **kwargs
        )

    ids = tokens(2, 40)
    expected = forward(llama, ids, make())
    AttentionInterface.register(tova.attention.NAME, copying)
    try:
        assert torch.equal(forward(llama, ids, make()), expected)
    finally:
        tova.enable(llama)


def test_an_observer_of_the_attention_function_may_look(llama) -> None:
    """A function registered around ours can ask for keys and values as ordinary tensors."""
    seen = []

    def spy(module, query, key, value, *args, **kwargs):
        seen.append((query @ key.as_subclass(torch.Tensor).repeat_interleave(2, 1).transpose(-1, -2)).shape)
        return tova.attention.evicting_attention(module, query, key, value, *args, **kwargs)

    ids = tokens(1, 30)
    expected = forward(llama, ids, make())
    AttentionInterface.register(tova.attention.NAME, spy)
    try:
        assert torch.equal(forward(llama, ids, make()), expected)
    finally:
        tova.enable(llama)
    assert seen == [(1, 4, 30, 30)] * 2


def test_training_with_gradient_checkpointing_is_refused() -> None:
    """It leaves the cache out: every call would be full attention, and the cache stay empty."""
    model = tiny("llama")
    model.gradient_checkpointing_enable()
    model.train()
    cache = make()
    with pytest.raises(UsageError, match=r"gradient checkpointing leaves it out: call model\.eval\(\)"):
        model(input_ids=tokens(1, 30), use_cache=True, **{cache_argument(model): cache})
    model.eval()
    forward(model, tokens(1, 30), cache)


def test_attention_maps_are_refused(llama) -> None:
    with pytest.raises(UsageError, match=r"output_attentions=True: .* leave it out"):
        forward(llama, tokens(1, 20), make(), output_attentions=True)


# -- forwards broken off ----------------------------------------------------------------------------------------


def interrupt(model, where: str):
    """Makes the second layer raise; returns what undoes it."""

    def stop(*_):
        raise KeyboardInterrupt

    layer = model.model.layers[1]
    if where == "before the layer":
        return layer.register_forward_pre_hook(stop).remove
    if where == "after its attention":
        return layer.self_attn.register_forward_hook(stop).remove
    if where == "after the layers":
        return model.lm_head.register_forward_pre_hook(stop).remove
    calls = []

    def between(module, *args, **kwargs):
        if module is layer.self_attn:
            stop()
        return tova.attention.evicting_attention(module, *args, **kwargs)

    def within(module, query, *args, **kwargs):
        from tova.layer import LayerState

        if module is not layer.self_attn:
            return tova.attention.evicting_attention(module, query, *args, **kwargs)
        original = LayerState.carry

        def second(*arguments):
            calls.append(1)
            if len(calls) == 2:
                stop()
            original(*arguments)

        LayerState.carry = second
        try:
            return tova.attention.evicting_attention(module, query, *args, **kwargs)
        finally:
            LayerState.carry = original

    AttentionInterface.register(tova.attention.NAME, between if where == "before its attention" else within)
    return lambda: AttentionInterface.register(tova.attention.NAME, tova.attention.evicting_attention)


HALF = ["before the layer", "before its attention", "within its attention"]
WHOLE = ["after its attention", "after the layers"]


@pytest.mark.parametrize("where", HALF + WHOLE)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_forward_broken_off(where: str, begun: bool, rows: int) -> None:
    """Half done: nothing goes on with it until reset. All layers done: nothing is wrong, as with an ordinary cache."""
    model, ids = tiny("llama"), tokens(1, 70)

    def new():
        caches = [EvictingCache(policies.make("tova", budget=12), chunk=16) for _ in range(rows)]
        return SideBySide(caches) if rows > 1 else caches[0]

    cache, other = new(), new()
    both = ids.expand(rows, -1)
    if begun:
        forward(model, both[:, :30], cache)
        forward(model, both[:, :30], other)
    rest = both[:, 30:] if begun else both
    undo = interrupt(model, where)
    with pytest.raises(KeyboardInterrupt):
        forward(model, rest, cache)
    undo()
    first = cache.caches[1] if rows > 1 else cache
    if where in WHOLE:
        forward(model, rest, other)
        assert torch.equal(first.evicted_at, (other.caches[1] if rows > 1 else other).evicted_at)
        forward(model, both[:, :1], cache)
        return
    for use in (
        lambda: forward(model, rest, cache),
        lambda: forward(model, both[:, :1], cache),
        lambda: first.evicted_at,
        lambda: first.state_dict(),
        lambda: first.kept(0),
        lambda: first.reorder_cache(torch.tensor([0])),
    ):
        if where == "before the layer" and not begun and use.__code__.co_names[0] != "forward":
            continue  # there is one layer so far, and it is whole
        with pytest.raises(UsageError, match=r"broken off .*call reset\(\) and start over"):
            use()
    cache.reset()
    assert torch.equal(forward(model, both, cache), forward(model, both, new()))


def test_what_is_refused_leaves_the_cache_as_it_was(llama) -> None:
    """A call that is refused before anything was taken can be made again, mended."""
    ids = tokens(1, 40)
    cache, straight = make(), make()
    for one in (cache, straight):
        forward(llama, ids[:, :20], one)
    for says, wrong in (
        ("lets tokens look ahead", dict(attention_mask=torch.ones(1, 1, 20, 40, dtype=torch.bool))),
        (
            "must have a column for every token",
            dict(attention_mask=torch.ones(1, 30).cumsum(-1) > 3),
        ),
        ("output_attentions", dict(output_attentions=True)),
    ):
        with pytest.raises(UsageError, match=says):
            forward(llama, ids[:, 20:], cache, **wrong)
        assert cache.get_seq_length() == 20
    assert torch.equal(forward(llama, ids[:, 20:], cache), forward(llama, ids[:, 20:], straight))
    assert torch.equal(cache.evicted_at, straight.evicted_at)


def test_layers_that_a_text_does_not_use() -> None:
    """Cross-attention to images that are not there: the layer between stays empty."""
    model = tova.enable(build("LlamaForCausalLM", dict(num_hidden_layers=3)))
    skipped = model.model.layers[1]
    skipped.forward = lambda hidden, *args, **kwargs: hidden
    ids, cache = tokens(1, 40), make("full")
    with torch.inference_mode():
        own = model(input_ids=ids, use_cache=False).logits
    parts = [forward(model, ids[:, :30], cache)] + [forward(model, ids[:, t : t + 1], cache) for t in range(30, 40)]
    assert (torch.cat(parts, 1) - own).abs().max() < 1e-4
    assert (cache.evicted_at[1] == -1).all()
    assert (cache.evicted_at[0] > 40).all()


def test_a_refused_model_stays_as_it_was() -> None:
    """Also its parts: those that could be switched are switched back."""
    for kind, options in (
        ("BloomForCausalLM", dict(n_layer=1, n_head=4)),
        ("MambaForCausalLM", {}),
        ("GotOcr2ForConditionalGeneration", None),
    ):
        model_class = getattr(transformers, kind, None)
        if model_class is None:
            continue
        if options is None:
            text = dict(SMALL, num_key_value_heads=1, model_type="qwen2", vocab_size=300)
            vision = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_dim=16, output_channels=8)
            model = model_class(model_class.config_class(text_config=text, vision_config=vision, image_token_index=290))
        else:
            model = build(kind, options)
        configs = tova.attention._configs(model)
        before = [config._attn_implementation for config in configs]
        with pytest.raises(UsageError, match=kind):
            tova.enable(model)
        assert [config._attn_implementation for config in configs] == before


def test_layers_of_an_unknown_kind_are_not_called_recurrent() -> None:
    model = build("LlamaForCausalLM", {})
    for kind, says in (
        ("indexed_attention", "layers of a kind that an evicting cache does not know (indexed_attention)"),
        ("linear_attention", "recurrent or state-space layers (linear_attention)"),
    ):
        model.config.layer_types = ["full_attention", kind]
        with pytest.raises(UsageError) as error:
            tova.enable(model)
        assert says in str(error.value)


def test_a_used_cache_in_generate_after_an_interruption(llama) -> None:
    cache, ids = make(), tokens(1, 40)
    argument = cache_argument(llama)
    undo = interrupt(llama, "before the layer")
    with pytest.raises(KeyboardInterrupt):
        llama.generate(ids, max_new_tokens=3, pad_token_id=0, **{argument: cache})
    undo()
    with pytest.raises(UsageError, match="broken off"):
        llama.generate(torch.cat([ids, ids], 1), max_new_tokens=3, pad_token_id=0, **{argument: cache})


# -- inference mode ---------------------------------------------------------------------------------------------

MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "gradients": torch.enable_grad}


@pytest.mark.parametrize("policy", ["tova", "snapkv", "full", "window", "tova_value", "tova_head", "h2o_masked"])
@pytest.mark.parametrize("then", MODES)
@pytest.mark.parametrize("prompt", [1, 30, 63])  # with and without room in the log
@pytest.mark.parametrize("more", [1, 5])
def test_a_prompt_in_one_mode_and_the_rest_in_another(llama, policy: str, then: str, prompt: int, more: int) -> None:
    ids = tokens(1, 80)
    argument = cache_argument(llama)

    def run(first: str, second: str) -> EvictingCache:
        cache = make(policy)
        with MODES[first]():
            llama(input_ids=ids[:, :prompt], use_cache=True, **{argument: cache})
        with MODES[second]():
            llama(input_ids=ids[:, prompt : prompt + more], use_cache=True, **{argument: cache})
            llama(input_ids=ids[:, prompt + more : 70], use_cache=True, **{argument: cache})
        with MODES[first]():
            for t in range(70, 80):
                llama(input_ids=ids[:, t : t + 1], use_cache=True, **{argument: cache})
        return cache

    assert torch.equal(run("inference", then).evicted_at, run("no_grad", "no_grad").evicted_at)


def test_caches_copied_loaded_and_reordered_in_inference_mode(llama) -> None:
    """What is made there is used outside of it."""
    ids = tokens(2, 60)
    cache, straight = make(), make()
    forward(llama, ids[:, :40], cache)
    forward(llama, ids[:, :40], straight)
    with torch.inference_mode():
        copied = copy.deepcopy(cache)
        loaded = make()
        loaded.load_state_dict(cache.state_dict())
        cache.reorder_cache(torch.tensor([0, 1]))
    argument = cache_argument(llama)
    with torch.no_grad():
        for one in (straight, cache, copied, loaded):
            for t in range(40, 60):
                llama(input_ids=ids[:, t : t + 1], use_cache=True, **{argument: one})
            assert torch.equal(one.evicted_at, straight.evicted_at)


# -- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["tova", "full", "window", "tova_head"])
@pytest.mark.parametrize("how", ["forward", "padded", "generate", "observed", "side by side", "refused"])
def test_a_cache_is_freed_when_it_goes_out_of_scope(policy: str, how: str) -> None:
    """Not when the garbage collector next comes by: on a card that is out of memory in every loop over prompts."""
    model, ids = tiny("mistral" if how == "padded" else "llama"), tokens(2, 40)
    gc.collect()
    gc.disable()
    try:
        made = policies.make(policy) if policy == "full" else policies.make(policy, budget=12)
        observers = [AttentionMeasures()] if how == "observed" else []
        cache = EvictingCache(made, observers=observers)
        watched = [weakref.ref(cache)]
        if how == "side by side":
            cache = SideBySide([cache, EvictingCache(made)])
        if how == "generate":
            model.generate(ids, max_new_tokens=3, pad_token_id=0, do_sample=False, **{cache_argument(model): cache})
        elif how == "refused":
            with pytest.raises(UsageError) as error:
                forward(model, ids, cache, attention_mask=torch.ones(1, 1, 40, 40, dtype=torch.bool))
            error.value.__traceback__ = None
            del error
            cache.reset()
            forward(model, ids, cache)
        else:
            forward(model, ids, cache, padding=[0, 7] if how == "padded" else None)
        layers = [layer for one in getattr(cache, "caches", [cache]) for layer in one.layers]
        watched += [weakref.ref(layer) for layer in layers] + [weakref.ref(layer.state.keys) for layer in layers]
        del layers, cache, observers
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


# -- what is asked of a cache -----------------------------------------------------------------------------------


def test_keys_and_values_of_a_layer(llama) -> None:
    """What is held, by position: those of a full cache at the kept positions, whatever the slots' order."""
    ids = tokens(2, 50)
    full, cache = make("full"), make()
    assert cache.layer(0).keys is None
    for begin, end in ((0, 40), *((t, t + 1) for t in range(40, 50))):
        forward(llama, ids[:, begin:end], cache)
    forward(llama, ids, full)
    layer = cache.layers[0]  # whose keys and values do not depend on what was dropped
    assert layer.keys.shape == layer.values.shape == (2, 2, 12, 16)
    for row in range(2):
        kept = cache.kept(0, row)
        assert (layer.keys[row] - full.layers[0].keys[row][:, kept]).abs().max() < 1e-5
        assert (layer.values[row] - full.layers[0].values[row][:, kept]).abs().max() < 1e-5
    padded = make("full")
    forward(llama, ids, padded, padding=[0, 9])
    assert padded.layers[0].keys.shape == (2, 2, 50, 16)
    assert (padded.layers[0].keys[1, :, 41:] == 0).all()
    assert (padded.layers[0].keys[1, :, :41].abs().sum(-1) > 0).all()
    with pytest.raises(UsageError, match="cannot be set"):
        layer.keys = torch.zeros(1)
    heads = make("tova_head")
    forward(llama, ids, heads)
    assert heads.layers[0].keys.shape == (2, 2, 12, 16)


def test_what_a_cache_is_made_of_is_checked() -> None:
    made = policies.make("tova", budget=8)
    for wrong in ("tova", policies.Tova, None, {"name": "tova"}):
        with pytest.raises(UsageError, match=r"policy must be an instance of a policy, as tova\.policies\.make"):
            EvictingCache(wrong)
    for options, says in (
        (dict(prefill="all"), "prefill must be one of every_step, one_shot, got 'all'"),
        (dict(chunk=0), "chunk must be an integer of at least 1, got 0"),
        (dict(chunk=1.5), r"chunk must be an integer of at least 1, got 1\.5"),
        (dict(chunk=True), "chunk must be an integer of at least 1, got True"),
        (dict(evict_every=2**63), "evict_every must be an integer of at least 1 and below 2147483648"),
        (dict(log="no"), "log must be true or false, got 'no'"),
        (dict(observers=[print]), "observers must have a method see"),
    ):
        with pytest.raises(UsageError, match=says):
            EvictingCache(made, **options)
    cache = EvictingCache(made)
    with pytest.raises(UsageError, match="prefill must be one of"):
        cache.prefill = "every step"
    assert cache.prefill == "every_step"


def test_what_does_not_go_together(llama) -> None:
    """Another batch, another model, another dtype with a cache that is in use."""
    ids = tokens(3, 20)
    cache = make()
    forward(llama, ids[:2], cache)
    with pytest.raises(UsageError, match="holds keys of 2 rows, 2 heads and size 16, the new ones have 3 rows"):
        forward(llama, ids, cache)
    cache = make()
    forward(llama, ids, cache)
    other = tova.enable(build("LlamaForCausalLM", dict(num_key_value_heads=4)))
    with pytest.raises(UsageError, match="another batch, or another model"):
        forward(other, ids, cache)
    deeper = tova.enable(build("LlamaForCausalLM", dict(num_hidden_layers=3)))
    cache = make()
    forward(llama, ids, cache)
    with pytest.raises(UsageError, match="broken off half-way"):
        forward(deeper, ids, cache)


def test_side_by_side_checks_its_caches(llama) -> None:
    made = policies.make("tova", budget=8)
    one = EvictingCache(made)
    with pytest.raises(UsageError, match="one of them twice"):
        SideBySide([one, one])
    forward(llama, tokens(1, 20), one)
    with pytest.raises(UsageError, match="the same number of tokens, got 0 to 20"):
        SideBySide([one, EvictingCache(made)])


def test_a_stored_cache_is_checked(llama) -> None:
    ids = tokens(1, 40)
    made = policies.make("tova", budget=12)
    logged, silent = EvictingCache(made), EvictingCache(made, log=False)
    forward(llama, ids, logged)
    forward(llama, ids, silent)
    target = EvictingCache(made)
    forward(llama, ids[:, :9], target)
    with pytest.raises(UsageError, match="made with log=False, so what it dropped is not known"):
        target.load_state_dict(silent.state_dict())
    for broken in ({}, {"policy": repr(made)}, {**logged.state_dict(), "layers": [{"keys": 1}]}, None, []):
        with pytest.raises(UsageError, match="not what state_dict of an evicting cache gives"):
            target.load_state_dict(broken)
    assert target.get_seq_length() == 9  # as it was
    quiet = EvictingCache(made, log=False)
    quiet.load_state_dict(logged.state_dict())
    with pytest.raises(UsageError, match="log=False"):
        _ = quiet.evicted_at
    assert torch.equal(forward(llama, ids[:, :1], quiet), forward(llama, ids[:, :1], logged))


def test_a_copied_model_rotates_as_the_first() -> None:
    """How it does was noted when it was switched over."""
    model = tiny("llama")
    ids = tokens(1, 60)
    copied = copy.deepcopy(model)
    made = policies.make("streaming_llm_reindexed", budget=16)
    assert torch.equal(forward(copied, ids, EvictingCache(made)), forward(model, ids, EvictingCache(made)))
    assert copied.model.layers[0].self_attn._tova_rotation._rotary is copied.model.rotary_emb


def test_losses_with_an_ordinary_cache(llama) -> None:
    ids = tokens(1, 50)
    ordinary = token_nll(llama, ids, DynamicCache(config=llama.config))
    assert (ordinary - token_nll(llama, ids)).abs().max() < 1e-5


def test_a_model_whose_parts_are_moved_about(mistral) -> None:
    """accelerate sends what a layer gets to its device first, masks too."""
    accelerate = pytest.importorskip("accelerate")
    ids, padding = tokens(2, 60), [0, 9]
    straight, moved = make(), make()
    expected = forward(mistral, ids, straight, padding)
    model = accelerate.cpu_offload(tiny("mistral"), execution_device=torch.device("cpu"))
    assert torch.equal(forward(model, ids, moved, padding), expected)
    assert torch.equal(moved.evicted_at, straight.evicted_at)
