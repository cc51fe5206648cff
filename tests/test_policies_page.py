"""docs/policies.md: its policies run as they stand there, and the names it uses are those of the code."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tova
from tova.check import check
from tova.policies import POLICIES, Policy
from tova.policies.slots import HeadWeights, Slots, Tokens
from tova.rules import why_not

PAGE = (Path(__file__).parent.parent / "docs/policies.md").read_text()
CODE = "".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
NAMES = re.findall(r"^class (\w+)\(", CODE, flags=re.MULTILINE)
COMPILED = {"RecentWorth", "Filtered", "FromFile"}
TOKENS = 512


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page defines, in a module of a user's own."""
    path = tmp_path_factory.mktemp("page") / "policies_of_the_page.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: getattr(module, name) for name in NAMES}


def parameters(name: str, place: Path) -> dict[str, Any]:
    """What a policy of the page needs to be put to work."""
    g = torch.Generator().manual_seed(3)
    if name == "Filtered":
        return {"filters": (((-1.0,),),) * 4}  # sizes of 1 fit all models that the checks make
    if name == "FromFile":
        np.save(place / "scores.npy", torch.rand(4, TOKENS, generator=g).numpy())
        return {"path": str(place / "scores.npy")}
    return {}


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_of_the_page_keeps_the_contract(classes: dict[str, Any], name: str, tmp_path: Path) -> None:
    policy = classes[name](budget=24, **parameters(name, tmp_path))
    assert check(policy)


def test_filters_are_taken_by_layer_and_head(classes: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(3)
    filters, key = torch.randn(3, 2, 4, generator=g), torch.randn(1, 2, 5, 4, generator=g)
    policy = classes["Filtered"](filters=tuple(filters.tolist())).for_layer(2, 3)
    found = policy.features(Tokens(key, key, torch.arange(5).unsqueeze(0)))["projection"]
    assert found[0, 1, 4] == pytest.approx(float(key[0, 1, 4] @ filters[2, 1]))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_an_expression_where_the_page_says_so(classes: dict[str, Any], name: str, tmp_path: Path) -> None:
    policy = classes[name](budget=24, **parameters(name, tmp_path))
    assert (why_not(policy) is None) == (name in COMPILED)


def members(of: type) -> set[str]:
    fields = {f.name for f in dataclasses.fields(of)} if dataclasses.is_dataclass(of) else set()
    return fields | set(dir(of))


@pytest.mark.parametrize(
    ("word", "of"), [("slots", Slots), ("heads", HeadWeights), ("tokens", Tokens), ("self", Policy)]
)
def test_what_a_policy_may_see_is_there(word: str, of: type) -> None:
    text = PAGE if word != "self" else re.sub(r"```python.*?```", "", PAGE, flags=re.DOTALL)
    asked = set(re.findall(rf"\b{word}\.(\w+)", text))
    planned = set(re.findall(rf"^\| `{word}\.(\w+)` \| \*planned\*", PAGE, flags=re.MULTILINE))
    assert asked - planned
    assert asked - planned <= members(of)
    assert not planned & members(of)  # what has come is no longer planned


def test_what_it_may_define_is_all_there_is() -> None:
    table = PAGE[PAGE.index("| what | is given |") : PAGE.index("Class attributes say how")]
    named = set(re.findall(r"^\| `(\w+)\(", table, flags=re.MULTILINE))
    assert named <= members(Policy)
    missing = {"observe", "admitted", "features", "score", "protected", "combine", "excess", "records"} - named
    assert not missing


def test_policies_that_are_here_are() -> None:
    rows = PAGE[PAGE.index("| method | what it needs |") :].splitlines()
    here = {name for row in rows if row.endswith("` |") for name in re.findall(r"`(\w+)`", row.split("|")[-2])}
    assert here > {"tova", "h2o_head", "pyramidkv_prefill"}
    assert here <= set(POLICIES)


def test_class_attributes_are_all_there_are() -> None:
    named = dict(re.findall(r"^\| `(\w+) = (\w+)` \|", PAGE, flags=re.MULTILINE))
    flags = {name: value for name, value in vars(Policy).items() if isinstance(value, bool) and name != "per_head"}
    assert named == {name: str(not value) for name, value in flags.items()}


@pytest.mark.parametrize("name", ["cam", "d2o", "dmc"])
def test_what_is_refused_is(name: str) -> None:
    with pytest.raises(tova.errors.UsageError, match="merges"):
        tova.policies.make(name)
