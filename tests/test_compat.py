"""The one module that knows how versions of transformers differ, without a model."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from tova import compat


def test_installed_version_is_supported() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    (bounds,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "transformers"]
    assert bounds.specifier.contains(version("transformers")), f"{version('transformers')} is outside {bounds}"


def test_both_names_of_the_cache() -> None:
    class Newer(torch.nn.Module):
        def forward(self, input_ids, cache=None): ...

    class Older(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None): ...

    assert compat.cache_argument(Newer()) == "cache"
    assert compat.cache_argument(Older()) == "past_key_values"


def test_columns_or_their_number() -> None:
    assert compat.number_of(5) == compat.number_of(torch.arange(7, 12)) == 5


def test_masks_asked_for_by_columns() -> None:
    """What a mask function learns is the same whichever way it is asked."""

    def mask(**kwargs):
        return kwargs

    ask = compat._by_columns(mask)
    columns = torch.arange(7, 12)
    found = ask(batch_size=2, cache_position=columns, kv_length=12, kv_offset=0, allow_is_causal_skip=False)
    expected = dict(batch_size=2, q_length=5, q_offset=7, kv_length=12, kv_offset=0, device=columns.device)
    assert found == expected | dict(allow_is_causal_skip=False, use_vmap=True)
    assert ask(cache_position=columns)["use_vmap"] is False
    assert ask(cache_position=columns, allow_is_causal_skip=False, use_vmap=False)["use_vmap"] is False


def test_dense_mask() -> None:
    """Later columns and padding, in the words of every version."""
    padding = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    found = compat.sdpa_mask(batch_size=2, q_length=2, q_offset=4, kv_length=6, attention_mask=padding)
    assert found is not None
    assert torch.equal(found[:, 0], torch.ones(2, 6, dtype=torch.bool).tril(4) & padding[:, None])


def test_registered_mask_reaches_the_models() -> None:
    """transformers asks a registered mask function for a mask in the way its models ask."""
    from transformers import LlamaConfig, LlamaModel

    asked = []

    def mask(*, q_length, kv_length, q_offset, device, use_vmap, **kwargs):
        asked.append((q_length, kv_length, q_offset))

    compat.register("tova_test", compat.sdpa_attention_forward, mask)
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaModel(config).eval()
    model.set_attn_implementation("tova_test")
    with torch.inference_mode():
        model(torch.ones(1, 5, dtype=torch.int64), use_cache=False)
    assert asked == [(5, 5, 0)]
