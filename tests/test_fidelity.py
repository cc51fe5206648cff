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


def wrong(text: str) -> list[str]:
    """What a text names that is not there: tests that are gone, and whatever else stands before ``::``."""
    named = re.findall(NAMED, text)
    found = [] if len(named) == text.count("::") else [f"{text.count('::') - len(named)} times :: in no test's name"]
    for file, test in sorted(set(named)):
        path = ROOT / file
        if not path.is_file():
            found.append(file)
        elif not re.search(rf"^def {test}\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            found.append(f"{file}::{test}")
    return found


def test_the_tests_named_exist() -> None:
    assert wrong(TEXT) == []


def test_a_name_that_is_gone_is_noticed() -> None:
    """In the cards themselves: a test renamed, its file renamed, a name written otherwise."""
    name = "tests/test_replay.py::test_replay_is_physical_decode"
    assert name in TEXT
    for other, says in (
        ("tests/test_replay.py::test_no_more", "tests/test_replay.py::test_no_more"),
        ("tests/test_no_more.py::test_replay_is_physical_decode", "tests/test_no_more.py"),
        ("test_replay::test_replay_is_physical_decode", "1 times :: in no test's name"),
    ):
        assert wrong(TEXT.replace(name, other, 1)) == [says]
