"""The cards of FIDELITY.md: one for every policy, complete, and the tests they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tova import policies

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "tova" / "policies" / "FIDELITY.md").read_text(encoding="utf-8")
LABELS = ("Paper", "Public code", "Here", "Held together by")
CARDS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))
NAMED = r"\b(tests/\w+\.py)::(\w+)"


def test_every_policy_has_a_card_in_order_and_there_are_no_others() -> None:
    assert re.findall(r"^## (.+)$", TEXT, flags=re.MULTILINE) == list(policies.POLICIES)


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_a_card_says_all_four_things(policy: str) -> None:
    parts = re.split(r"^\*\*(.+?):\*\*", CARDS[policy], flags=re.MULTILINE)
    assert tuple(parts[1::2]) == LABELS
    assert all(said.strip() for said in parts[2::2])
    assert re.search(NAMED, parts[-1])


def test_the_tests_named_exist() -> None:
    """Nothing with ``::`` that is not such a name, and no name of a test that is gone."""
    named = re.findall(NAMED, TEXT)
    assert len(named) == TEXT.count("::")
    for file, test in sorted(set(named)):
        path = ROOT / file
        assert path.is_file(), file
        assert re.search(rf"^def {test}\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE), f"{file}::{test}"


def test_a_name_that_is_gone_would_be_noticed() -> None:
    assert re.findall(NAMED, "`tests/test_x.py::test_y`, and") == [("tests/test_x.py", "test_y")]
    assert not re.search(r"^def test_y\(", Path(__file__).read_text(encoding="utf-8"), flags=re.MULTILINE)
