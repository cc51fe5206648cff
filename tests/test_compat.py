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


def test_masks_asked_for_by_columns(monkeypatch) -> None:
    """What a mask function learns is the same whichever way it is asked."""
    columns, rule = torch.arange(7, 12), object()
    by_length = dict(batch_size=2, q_length=5, q_offset=7, kv_length=12, kv_offset=0, device=columns.device)
    by_columns = dict(batch_size=2, cache_position=columns, kv_length=12, kv_offset=0)
    monkeypatch.setattr(compat, "_MASKS_BY_COLUMNS", False)
    newer = compat.asked_by_length(by_length | dict(mask_function=rule, use_vmap=False))
    monkeypatch.setattr(compat, "_MASKS_BY_COLUMNS", True)
    assert compat.asked_by_length(by_columns | dict(mask_function=rule)) == newer
    assert (newer.q_length, newer.q_offset, newer.kv_length, newer.mask_function) == (5, 7, 12, rule)
    # Before 5.0 that the mask may not be skipped says that its rule may not work on indices.
    assert compat.asked_by_length(by_columns | dict(allow_is_causal_skip=False)).use_vmap is True
    assert compat.asked_by_length(by_columns | dict(allow_is_causal_skip=False, use_vmap=False)).use_vmap is False


def test_registered_mask_reaches_the_models() -> None:
    """transformers asks a registered mask function for a mask in the way its models ask."""
    from transformers import LlamaConfig, LlamaModel

    asked = []

    def mask(**kwargs):
        found = compat.asked_by_length(kwargs)
        asked.append((found.q_length, found.kv_length, found.q_offset))

    compat.register("tova_test", compat.sdpa_attention_forward, mask)
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaModel(config).eval()
    model.set_attn_implementation("tova_test")
    with torch.inference_mode():
        model(torch.ones(1, 5, dtype=torch.int64), use_cache=False)
    assert asked == [(5, 5, 0)]
