"""Eviction policies: one short file each, all found by name through :func:`make`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from tova.errors import UsageError
from tova.policies.base import Cost, Policy, Record, Ring
from tova.policies.full import UNBOUNDED, Full
from tova.policies.h2o import H2O, H2OHalf, H2OHead, H2OMasked
from tova.policies.l2norm import L2Norm
from tova.policies.pyramidkv import PyramidKV
from tova.policies.random import Random
from tova.policies.scissorhands import Scissorhands, ScissorhandsPaper
from tova.policies.slots import HeadWeights, Slots, Tokens
from tova.policies.snapkv import SnapKV
from tova.policies.snapkv_prefill import PyramidKVPrefill, SnapKVPrefill
from tova.policies.stepwise import StepwisePolicy
from tova.policies.streaming_llm import StreamingLLM, StreamingLLMReindexed
from tova.policies.tova import Tova, TovaHead, TovaOfficial, TovaValue
from tova.policies.window import Window

__all__ = [
    "H2O",
    "POLICIES",
    "UNBOUNDED",
    "Cost",
    "Full",
    "H2OHalf",
    "H2OHead",
    "H2OMasked",
    "HeadWeights",
    "L2Norm",
    "Policy",
    "PyramidKV",
    "PyramidKVPrefill",
    "Random",
    "Record",
    "Ring",
    "Scissorhands",
    "ScissorhandsPaper",
    "Slots",
    "SnapKV",
    "SnapKVPrefill",
    "StepwisePolicy",
    "StreamingLLM",
    "StreamingLLMReindexed",
    "Tokens",
    "Tova",
    "TovaHead",
    "TovaOfficial",
    "TovaValue",
    "Window",
    "make",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Full, Window, StreamingLLM, StreamingLLMReindexed, H2O, H2OHalf, H2OHead, H2OMasked, Scissorhands,
        ScissorhandsPaper, SnapKV, SnapKVPrefill, PyramidKV, PyramidKVPrefill, Tova, TovaOfficial, TovaHead, TovaValue,
        L2Norm, Random,
    )
}  # fmt: skip
"""Every built-in policy by name."""

MERGING = ("cam", "d2o", "dmc", "kvmerger", "look_m", "minicache", "weightedkv")
"""Methods that blend what they drop into what they keep. Not here: a kept key or value never changes."""


def make(name: str, **parameters: Any) -> Policy:
    """A policy by name: ``make("h2o", budget=256, recent_window=64)``.

    Raises:
        UsageError: no such policy, no such parameter, or a value out of range.
    """
    if name in MERGING:
        raise UsageError(merges(name))
    if name not in POLICIES:
        raise UsageError(f"no policy is named {name!r}{_closest(name, POLICIES)}; there are: {', '.join(POLICIES)}")
    policy = POLICIES[name]
    known = [f.name for f in dataclasses.fields(policy) if f.init]
    shown = [parameter for parameter in known if parameter not in ("layer", "num_layers")]
    for parameter in parameters:
        if parameter not in known:
            raise UsageError(
                f"{name} has no parameter {parameter!r}{_closest(parameter, shown)}; it takes: {', '.join(shown)}"
                if shown
                else f"{name} takes no parameters, got {parameter!r}"
            )
    return policy(**parameters)


def merges(name: str) -> str:
    """Why a merging method is refused."""
    return (
        f"{name} merges dropped tokens into kept ones; policies here only choose what is dropped, and kept keys and "
        f"values never change; there are: {', '.join(POLICIES)}"
    )


def _closest(word: str, known: Any) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
