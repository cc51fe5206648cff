"""docs/words.md: its drawings are what the code does, and its words are the code's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tova

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/words.md").read_text()
COLUMNS, SLOTS, CANDIDATES = re.findall(r"```\n(.*?)```", PAGE, flags=re.DOTALL)
TERMS = re.findall(r"^- \*\*(.+?)\*\*: ", PAGE, flags=re.MULTILINE)
PADDING = 3


def part(drawing: str, row: int) -> str:
    """What is drawn of a row."""
    return re.split(r"^row \d", drawing, flags=re.MULTILINE)[row + 1]


def line(drawing: str, begin: str) -> list[str]:
    """The entries of a drawing's line, without what is said behind it."""
    (found,) = re.findall(rf"^ *{begin} +(.*?)(?:     .*)?$", drawing, flags=re.MULTILINE)
    return re.findall(r"[^ |]+", found)


@pytest.fixture(scope="module")
def cache():
    """The drawn batch under the drawn policy: nine columns, and then three."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
    tova.enable(model)
    cache = tova.EvictingCache(tova.policies.make("streaming_llm", budget=4, sinks=1))
    ids, mask = torch.randint(50, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :PADDING] = 0
    with torch.inference_mode():
        model(ids[:, :9], attention_mask=mask[:, :9], cache=cache)
        model(ids[:, 9:], attention_mask=mask, cache=cache)
    return cache


@pytest.mark.parametrize(("row", "padding"), [(0, PADDING), (1, 0)])
def test_the_drawing_of_columns_is_what_is_held(cache: tova.EvictingCache, row: int, padding: int) -> None:
    evicted_at = cache.evicted_at[0, row].tolist()
    held = [c for c in range(padding, 9) if evicted_at[c] >= 9]
    assert evicted_at[:padding] == [-1] * padding
    assert line(part(COLUMNS, row), "position") == ["-"] * padding + [str(p) for p in range(12 - padding)]
    (marks,) = [drawn for drawn in part(COLUMNS, row).splitlines() if drawn.strip().startswith("held")]
    assert [c for c in range(9) if marks[COLUMNS.index("0") + 4 * c] == "x"] == held
    slots = line(part(SLOTS, row), "position")
    assert sorted(slots) == sorted(["-", *(str(c - padding) for c in held)])


def test_the_drawing_of_candidates_is_what_each_query_sees(cache: tova.EvictingCache) -> None:
    evicted_at = cache.evicted_at[0, 0].tolist()
    columns = [int(c) for c in line(CANDIDATES, "column")]
    assert columns == [c for c in range(PADDING, 12) if evicted_at[c] >= 9]
    assert [int(p) + PADDING for p in line(CANDIDATES, "position")] == columns
    for step in range(3):
        query = 9 + step
        seen = ["N" if c == query else "x" if c < query <= evicted_at[c] else "." for c in columns]
        assert line(CANDIDATES, f"step {step}") == seen
        (position, at) = map(
            int, re.findall(rf"step {step}.*position (\d+) goes: its evicted_at is column (\d+)", CANDIDATES)[0]
        )
        assert evicted_at[position + PADDING] == at == query


def words_of(folder: str) -> str:
    """Identifiers and docstrings of a package, in lower case: what a reader of the code meets."""
    found: list[str] = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                found.append(node.id)
            elif isinstance(node, ast.arg):
                found.append(node.arg)
            elif isinstance(node, ast.Attribute):
                found.append(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.append(node.name)
    return re.sub(r"\s+", " ", " \n".join(found)).lower()


@pytest.fixture(scope="module")
def code() -> str:
    return words_of("tova") + words_of("experiments")


@pytest.mark.parametrize("term", TERMS)
def test_every_word_is_one_of_the_code(code: str, term: str) -> None:
    """As an identifier, or in a docstring; one of several words with spaces or underscores between them."""
    forms = {term, term.replace(" ", "_"), term.replace("-", "_").replace(" ", "_")}
    assert any(re.search(rf"(?<![a-z]){re.escape(form)}s?(?![a-z])", code) for form in forms)


def test_a_word_is_explained_once() -> None:
    assert len(TERMS) == len(set(TERMS)) > 40


@pytest.mark.parametrize("old", ["trigger", "remains", "effective_budget", "heard", "running"])
def test_old_words_are_not_used_here(old: str) -> None:
    assert not re.search(rf"\b{old}\b", PAGE)
