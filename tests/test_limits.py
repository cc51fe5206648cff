"""What a model can be given, and what ``token_nll`` refuses in one sentence."""

from __future__ import annotations

import pytest
import torch
import transformers as t
from support.models import build, forward, tiny, tokens

import tova
from tova import EvictingCache, UsageError, policies
from tova.limits import positions, vocabulary
from tova.measures import token_nll
from tova.side_by_side import SideBySide

_BERT = dict(
    vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, is_decoder=True
)
_GPT = dict(vocab_size=99, n_embd=32, n_head=2, n_layer=2, n_positions=40)
_OPT = dict(**_BERT | dict(ffn_dim=32, word_embed_proj_dim=32))
_BART = dict(vocab_size=99, d_model=32, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32)

# class name -> its options, and how many tokens it has positions for; None if it computes them
TABLES = {
    "GPT2LMHeadModel": (_GPT, 40),
    "GPTBigCodeForCausalLM": (_GPT, 40),
    "GPTNeoForCausalLM": (
        dict(vocab_size=99, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global"], 2]],
             max_position_embeddings=40),
        40,
    ),
    "OpenAIGPTLMHeadModel": (_GPT, 40),
    "CTRLLMHeadModel": (_GPT | dict(dff=32), 40),
    "GPTJForCausalLM": (_GPT | dict(rotary_dim=8), 40),
    "CodeGenForCausalLM": (_GPT | dict(n_head=4, rotary_dim=8), 40),
    "OPTForCausalLM": (_OPT | dict(max_position_embeddings=40), 40),
    "BioGptForCausalLM": (_BERT | dict(max_position_embeddings=40), 40),
    "BartForCausalLM": (_BART | dict(max_position_embeddings=40), 40),
    "BertLMHeadModel": (_BERT | dict(max_position_embeddings=40), 40),
    "RobertaForCausalLM": (_BERT | dict(max_position_embeddings=42, pad_token_id=1), 40),
    "XGLMForCausalLM": (
        dict(vocab_size=99, d_model=32, num_layers=1, attention_heads=2, ffn_dim=32, max_position_embeddings=40), None,
    ),
    "LlamaForCausalLM": (_BERT | dict(max_position_embeddings=40), None),
    "GPTNeoXForCausalLM": (_BERT | dict(max_position_embeddings=40), None),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_positions_are_found_where_there_are_some(name: str) -> None:
    """The models themselves are asked: as many tokens as are found work, one more does not."""
    options, expected = TABLES[name]
    model_class = getattr(t, name)
    model = model_class(model_class.config_class(**options)).eval()
    assert positions(model) == expected
    assert vocabulary(model) == 99
    ids = torch.arange(2, 80)[None]
    if expected is None:
        assert token_nll(model, ids).isfinite().all()
        return
    assert token_nll(model, ids[:, :expected]).isfinite().all()
    with pytest.raises((IndexError, RuntimeError)), torch.inference_mode():
        model(input_ids=ids[:, : expected + 1], use_cache=False)
    with pytest.raises(UsageError, match=f"41 tokens are more than the {expected} positions this model has"):
        token_nll(model, ids[:, : expected + 1])


def test_a_table_of_an_unknown_name() -> None:
    model = t.GPT2LMHeadModel(t.GPT2Config(**_GPT)).eval()
    model.transformer.add_module("places", model.transformer.wpe)
    model.transformer.wpe = Elsewhere(model.transformer.places)
    assert positions(model) is None
    with pytest.raises(UsageError, match="78 tokens are more than the 40 positions this model has"):
        token_nll(model, torch.arange(2, 80)[None])


class Elsewhere(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self._table = [table]

    def forward(self, ids):
        return self._table[0](ids)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), "perplexity needs at least 2 tokens, got 0"),
        (torch.zeros(1, 1, dtype=torch.int64), "perplexity needs at least 2 tokens, got 1"),
        (torch.zeros(0, 9, dtype=torch.int64), "ids has no rows"),
        (torch.arange(9), r"ids must be a tensor of integers \[batch, tokens\], got int64 \[9\]"),
        (torch.zeros(1, 1, 9).long(), r"got int64 \[1, 1, 9\]"),
        (torch.zeros(1, 9), r"got float32 \[1, 9\]"),
        (torch.ones(1, 9).bool(), r"got bool \[1, 9\]"),
        ([[1, 2, 3]], "got list"),
        (
            torch.tensor([[3, 300, 4]]),
            "token 300 is no word of the model, the model's vocabulary has 300: was the text",
        ),
        (torch.tensor([[3, 4, 2**40]]), "token 1099511627776 is no word of the model"),
        (torch.tensor([[3, -100, 4]]), "token -100 is no word of the model"),
    ],
)
def test_texts_that_cannot_be_measured(ids, sentence: str) -> None:
    for cache in (None, EvictingCache(policies.make("tova", budget=8))):
        with pytest.raises(UsageError, match=sentence):
            token_nll(tiny("llama"), ids, cache)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(segment=-1), "segment must be an integer of at least 0, got -1"),
        (dict(segment=2.5), r"segment must be an integer of at least 0, got 2\.5"),
        (dict(segment=True), "segment must be an integer of at least 0, got True"),
        (dict(prompt=-3), "prompt must be an integer of at least 0, got -3"),
        (dict(prompt="9"), "prompt must be an integer of at least 0, got '9'"),
        (dict(prompt=30), "prompt must be below the text's 30 tokens, got 30"),
    ],
)
def test_options_that_cannot_be(options: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        token_nll(tiny("llama"), tokens(1, 30), EvictingCache(policies.make("tova", budget=8)), **options)


def test_integers_of_any_kind() -> None:
    model, ids = tiny("llama"), tokens(2, 30) % 200
    expected = token_nll(model, ids)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(token_nll(model, ids.to(dtype), t.DynamicCache()), token_nll(model, ids, t.DynamicCache()))
        assert torch.equal(token_nll(model, ids.to(dtype)), expected)
    assert torch.equal(token_nll(model, ids, EvictingCache(policies.make("full")), segment=2**70), expected)


def used_caches(model):
    made = policies.make("tova", budget=8)
    ordinary, static = t.DynamicCache(), t.StaticCache(config=model.config, max_cache_len=64)
    evicting, fed = EvictingCache(made), EvictingCache(made)
    for cache in (ordinary, static, evicting, fed):
        forward(model, tokens(1, 10), cache)
    return [ordinary, static, evicting, SideBySide([fed])]


def test_a_used_cache() -> None:
    """It would go on from what is in it, and measure something else than a text from its beginning."""
    model = tiny("llama")
    for cache in used_caches(model):
        with pytest.raises(
            UsageError, match="the cache has been used, for 10 tokens: losses are measured from a text's"
        ):
            token_nll(model, tokens(1, 30), cache)
    cache = used_caches(model)[2]
    cache.reset()
    fresh = EvictingCache(policies.make("tova", budget=8))
    assert torch.equal(token_nll(model, tokens(1, 30), cache), token_nll(model, tokens(1, 30), fresh))
    with pytest.raises(UsageError, match="the cache has been used, for 29 tokens"):
        token_nll(model, tokens(1, 30), cache)
    with pytest.raises(
        UsageError, match=r"cache must be a tova\.EvictingCache or one of transformers' caches, got tuple"
    ):
        token_nll(model, tokens(1, 30), ((), ()))


def test_ordinary_caches() -> None:
    model, ids = tiny("llama"), tokens(2, 40)
    expected = token_nll(model, ids)
    for segment in (0, 7):
        for cache in (t.DynamicCache(), t.StaticCache(config=model.config, max_cache_len=64)):
            assert (token_nll(model, ids, cache, segment=segment) - expected).abs().max() < 1e-4


def test_a_model_that_ignores_its_cache() -> None:
    model = build("GPT2LMHeadModel", _GPT)
    original = model.forward

    def forgetful(input_ids, past_key_values=None, use_cache=None):
        return original(input_ids=input_ids, use_cache=False)

    model.forward = forgetful
    with pytest.raises(
        UsageError, match="GPT2LMHeadModel does not use the cache it is given: of 29 tokens it has seen 0"
    ):
        token_nll(model, torch.arange(30)[None], t.DynamicCache(), segment=10)


class Wrapped(torch.nn.Module):
    """A head without ``weight``, as quantised and sharded ones are."""

    def __init__(self, head):
        super().__init__()
        self._head = [head]

    def forward(self, x):
        return self._head[0](x)


@pytest.mark.parametrize("how", ["wrapped", "none"])
def test_a_head_without_a_weight(how: str) -> None:
    model, ids = build("LlamaForCausalLM", {}), tokens(1, 40)
    tova.enable(model)
    expected = token_nll(model, ids, EvictingCache(policies.make("tova", budget=8)))
    if how == "wrapped":
        model.lm_head = Wrapped(model.lm_head)
    else:
        model.get_output_embeddings = lambda: None
    assert vocabulary(model) == 300
    assert torch.equal(token_nll(model, ids, EvictingCache(policies.make("tova", budget=8))), expected)
