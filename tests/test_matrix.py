"""Model x way of running x policy: each passes exactly, or is refused by name. The README keeps the table.

``python tests/test_matrix.py`` prints it and puts it into the README.
"""

from __future__ import annotations

import copy
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import transformers
from support.models import REFUSED, REFUSED_WHEN_RUN, ZOO, build, forward, not_padding, tiny, tokens
from support.oracle import PhysicalCache, compare, decode
from support.policies import BUDGET, options_of, small

from tova import EvictingCache, UsageError, enable, policies
from tova.compat import cache_argument

README = Path(__file__).parent.parent / "README.md"
TOKENS = 44
# What no cache that forgets can do, or what evicts at the end of a prompt only: nothing to decode physically.
NOT_PHYSICAL = ("h2o_masked", "snapkv_prefill", "pyramidkv_prefill", "random")


def generate(model, ids, cache, **more):
    # A random model would write padding and end-of-text marks, which generate gives a meaning.
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, suppress_tokens=[0, 1, 2]) | more
    return model.generate(ids, **{cache_argument(model): cache}, **options)


def close(a: torch.Tensor, b: torch.Tensor, at_most: float = 2e-3) -> None:
    difference = (a - b).abs().max()
    assert difference < at_most, f"logits differ by {difference:.1e}"


# -- ways of running ------------------------------------------------------------------------------------------


def physically(model, policy: str) -> None:
    """The replay's kept sets and logits are those of a cache that really evicts, one token at a time."""
    ids, padding = tokens(2, TOKENS, seed=2), [0, 9]
    if policy in NOT_PHYSICAL:
        pytest.skip("nothing to decode physically")
    cache = EvictingCache(small(policy), chunk=16)
    logits = forward(model, ids, cache, padding)
    physical = PhysicalCache(policy, 0 if policy == "full" else BUDGET, padding, **options_of(policy))
    expected = decode(model, ids, physical)
    verdict = compare(cache.evicted_at, physical)
    assert not verdict.unexcused, verdict.unexcused
    if not verdict.different:
        real = not_padding(padding, TOKENS)
        close(logits[real], expected[real])


def own_attention(model, policy: str) -> None:
    """A budget that is never reached gives the model's own attention."""
    ids, padding = tokens(2, TOKENS, seed=3), [7, 0]
    real = not_padding(padding, TOKENS)
    mask = real.long()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    enable(model)
    unbounded = small("full") if policy == "full" else small(policy).with_budget(1000)
    close(forward(model, ids, EvictingCache(unbounded, chunk=16), padding)[real], expected[real])


def token_by_token(model, policy: str) -> None:
    """Decoding through fixed slots is the replay, after a prompt and with another one in between."""
    ids = tokens(2, TOKENS, seed=4)
    whole, stepwise = EvictingCache(small(policy)), EvictingCache(small(policy), chunk=7)
    expected = forward(model, ids, whole)
    parts = [forward(model, ids[:, :18], stepwise)]
    parts += [forward(model, ids[:, t : t + 1], stepwise) for t in range(18, 32)]
    parts += [forward(model, ids[:, 32:40], stepwise)]
    parts += [forward(model, ids[:, t : t + 1], stepwise) for t in range(40, TOKENS)]
    assert (whole.evicted_at == stepwise.evicted_at).all()
    close(torch.cat(parts, 1), expected)


def left_padded(model, policy: str) -> None:
    """A padded row of a batch is the row alone."""
    ids = tokens(2, TOKENS, seed=5)
    both, alone = EvictingCache(small(policy)), EvictingCache(small(policy))
    logits = forward(model, ids, both, [0, 11])
    close(logits[1:, 11:], forward(model, ids[1:, 11:], alone))
    log = both.evicted_at[:, 1:, ..., 11:]
    assert (torch.where(log <= TOKENS, log - 11, log) == alone.evicted_at).all()


def generating(model, policy: str) -> None:
    """Greedy text: fed back in one pass, the same choices and the same drops; a prompt in pieces changes nothing."""
    ids, more = tokens(2, 24, seed=6), _unlike(policy)
    cache = EvictingCache(small(policy))
    text = generate(model, ids, cache, **more)
    again = EvictingCache(small(policy))
    logits = forward(model, text[:, :-1], again)
    assert more or (logits[:, 23:, 3:].argmax(-1) + 3 == text[:, 24:]).all()
    assert (again.evicted_at == cache.evicted_at).all()
    assert (generate(model, ids, EvictingCache(small(policy)), prefill_chunk_size=9, **more) == text).all()


def sampling_and_beams(model, policy: str) -> None:
    """A sampled text replays to the drops it was sampled with; beams find what they find with an ordinary cache."""
    ids, more = tokens(2, 20, seed=7), _unlike(policy)
    cache = EvictingCache(small(policy))
    torch.manual_seed(0)
    text = generate(model, ids, cache, do_sample=True, temperature=1.5, **more)
    again = EvictingCache(small(policy))
    forward(model, text[:, :-1], again)
    assert (again.evicted_at == cache.evicted_at).all()
    unbounded = small("full") if policy == "full" else small(policy).with_budget(1000)
    beams = dict(num_beams=3, max_new_tokens=8, **more)
    with torch.inference_mode():
        expected = model.generate(ids, do_sample=False, pad_token_id=0, suppress_tokens=[0, 1, 2], **beams)
    assert (generate(model, ids, EvictingCache(unbounded), **beams) == expected).all()
    assert generate(model, ids, EvictingCache(small(policy)), **beams).shape == expected.shape


def _unlike(policy: str) -> dict:
    """Texts that never repeat a token for a policy to which equal tokens of the first layer are an exact tie."""
    return dict(no_repeat_ngram_size=1) if policy == "l2norm" else {}


def going_on(model, policy: str) -> None:
    """A conversation continues with the same cache; a cache copied or stored mid-way goes on as if nothing happened."""
    ids, more = tokens(1, 24, seed=8), _unlike(policy)
    at_once = EvictingCache(small(policy))
    text = generate(model, ids, at_once, max_new_tokens=12, **more)
    cache = EvictingCache(small(policy))
    first = generate(model, ids, cache, max_new_tokens=5, **more)
    stored = io.BytesIO()
    torch.save(cache.state_dict(), stored)
    copied = copy.deepcopy(cache)
    stored.seek(0)
    restored = EvictingCache(small(policy))
    restored.load_state_dict(torch.load(stored, weights_only=True))
    for kept in (cache, copied, restored):
        assert (generate(model, first, kept, max_new_tokens=7, **more) == text).all()
        assert (kept.evicted_at == at_once.evicted_at).all()
    cache.reset()
    assert (generate(model, ids, cache, max_new_tokens=12, **more) == text).all()


def one_shot(model, policy: str) -> None:
    """A prompt at once: every token of it sees all the model lets it see, then the policy evicts once."""
    ids, padding = tokens(2, TOKENS, seed=9), [0, 5]
    full = forward(model, ids, EvictingCache(small("full")), padding)
    for scan in ("reference", "auto"):
        cache = EvictingCache(small(policy), prefill="one_shot", scan=scan, chunk=16)
        close(forward(model, ids, cache, padding)[0], full[0])
        log = cache.evicted_at
        dropped = (log >= 0) & (log < TOKENS)
        window = (log == TOKENS - 1) & dropped
        if model.config.get_text_config().model_type in ("llama", "qwen3"):  # no windows: all go at the end
            assert (dropped == window).all()
            for layer in range(len(cache.layers)):
                made = cache.layers[layer].policy
                assert len(cache.kept(layer)) == (TOKENS if policy == "full" else made.keeps_of_prompt(TOKENS, TOKENS))
        if scan == "reference":
            first = log
        assert (log == first).all()
    forward(model, tokens(2, 1, seed=10), cache)
    assert cache.get_seq_length() == TOKENS + 1


def at_intervals(model, policy: str) -> None:
    """The cache grows four past its budget and is cut back at once, replayed or token by token."""
    ids = tokens(2, TOKENS, seed=11)
    whole, stepwise = (EvictingCache(small(policy), evict_every=4, chunk=c) for c in (16, 100))
    expected = forward(model, ids, whole)
    parts = [forward(model, ids[:, :20], stepwise)]
    parts += [forward(model, ids[:, t : t + 1], stepwise) for t in range(20, TOKENS)]
    assert (whole.evicted_at == stepwise.evicted_at).all()
    close(torch.cat(parts, 1), expected)


WAYS: dict[str, Callable] = {
    "physical decode": physically,
    "own attention": own_attention,
    "token by token": token_by_token,
    "left padding": left_padded,
    "generate, chunked prefill": generating,
    "sampling, beams": sampling_and_beams,
    "continue, store, reset": going_on,
    "one-shot prefill": one_shot,
    "evict every 4": at_intervals,
}


@pytest.fixture(scope="module")
def model(request):
    return tiny(request.param)


def run(model, way: str, policy: str) -> str:
    """``exact``, or ``refused: why``; anything else raises."""
    if policy == "l2norm" and model.config.get_text_config().model_type == "llama4_text":
        pytest.skip("all keys have the same norm: there is nothing to rank")
    try:
        WAYS[way](model, policy)
    except UsageError as e:
        return f"refused: {e}"
    return "exact"


# All policies on two models and a few policies on all; the rest of the product is slow.
# Positions are one rotation for all layers, and no layer has a window: what re-indexing needs.
REINDEXABLE = ("llama", "qwen2", "qwen3", "phi3", "gpt_neox", "mixtral")
THOROUGH, OFTEN = ("llama", "gemma3"), ("tova", "h2o_head", "snapkv", "streaming_llm")


OUTCOMES: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
"""What this run of the tests found, by model and way, then policy; see :func:`outcome`."""


def outcome(name: str, model, way: str, policy: str) -> str:
    """As :func:`run`, or ``skipped: why``; what this run of the tests has found already is not run again."""
    found = OUTCOMES[name, way]
    if policy not in found:
        try:
            found[policy] = run(model, way, policy)
        except pytest.skip.Exception as e:
            found[policy] = f"skipped: {e}"
    return found[policy]


def counted(found: Iterable[str]) -> str:
    """``19, 1 refused``: how many outcomes are exact, and how many are refused if any."""
    kinds = Counter(one.split(":")[0] for one in found)
    return f"{kinds['exact']}" + (f", {kinds['refused']} refused" if kinds["refused"] else "")


def row(name: str, model) -> str:
    """The model's row of the README's table."""
    cells = [counted(outcome(name, model, way, policy) for policy in policies.POLICIES) for way in WAYS]
    return f"| {name} | {ZOO[name][2]} | " + " | ".join(cells) + " |"


def summary() -> list[str]:
    """Lines of a table of :data:`OUTCOMES`: models down, ways across, policies exact and refused."""
    ways = [way for way in WAYS if any(way == w for _, w in OUTCOMES)]
    names = list(dict.fromkeys(name for name, _ in OUTCOMES))
    lines = [f"{'':<14}" + "".join(f"{way[:15]:>17}" for way in ways)]
    for name in names:
        cells = []
        for way in ways:
            cells.append(counted(OUTCOMES[name, way].values()))
        lines.append(f"{name:<14}" + "".join(f"{cell:>17}" for cell in cells))
    return lines


def _cells():
    for name in ZOO:
        for way in WAYS:
            for policy in policies.POLICIES:
                slow = () if name in THOROUGH or policy in OFTEN else pytest.mark.slow
                yield pytest.param(name, way, policy, marks=slow, id=f"{name}-{way}-{policy}")


@pytest.mark.parametrize(("model", "way", "policy"), _cells(), indirect=["model"], scope="module")
def test_cell(request, model, way: str, policy: str) -> None:
    found = outcome(request.node.callspec.params["model"], model, way, policy)
    if found.startswith("skipped"):
        pytest.skip(found)
    if policy == "streaming_llm_reindexed" and model.config.get_text_config().model_type not in REINDEXABLE:
        assert found.startswith("refused: streaming_llm_reindexed")
    else:
        assert found == "exact"


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_WHEN_RUN])
def test_refused_by_name(name: str) -> None:
    if int(transformers.__version__.split(".")[0]) < 5 and name in ("recurrent_gemma", "deepseek_v3"):
        pytest.skip("before transformers 5 these models are made otherwise")
    kind, options, says = (REFUSED | REFUSED_WHEN_RUN)[name]
    model = build(kind, options)
    with pytest.raises(UsageError) as error:
        forward(enable(model), tokens(1, 20), EvictingCache(policies.make("tova", budget=8)))
    assert says in str(error.value)
    if name in REFUSED:
        assert kind in str(error.value)


def table() -> str:
    """The matrix as Markdown: per model and way, how many of the policies are exact and which are refused."""
    ways = list(WAYS)
    lines = ["| model | what is particular | " + " | ".join(ways) + " |", "|---|---|" + "---|" * len(ways)]
    for name in ZOO:
        lines.append(row(name, tiny(name)))
    for name, (kind, _, says) in (REFUSED | REFUSED_WHEN_RUN).items():
        lines.append(f"| {name} | refused: {kind} {says} |" + " |" * len(ways))
    total = len(policies.POLICIES)
    note = f"Of {total} policies ({len(NOT_PHYSICAL)} of them have nothing to decode physically). Refused are:"
    return "\n".join([*lines, "", note, "", *(f"- {text.removeprefix('refused: ')}" for text in refusals())])


def refusals() -> list[str]:
    """All sentences with which something was refused in this run."""
    return sorted({one for found in OUTCOMES.values() for one in found.values() if one.startswith("refused: ")})


def kept_table() -> str:
    """What the README keeps."""
    (kept,) = re.findall(r"<!-- matrix -->\n(.*?)<!-- /matrix -->", README.read_text(), flags=re.DOTALL)
    return kept


@pytest.mark.parametrize(
    "name", [name if name in THOROUGH else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)
def test_the_readme_keeps_the_counts(name: str) -> None:
    """Per way what this run finds: cells that ran are counted, those that did not are run now."""
    assert row(name, tiny(name)) in kept_table().splitlines()
    assert {f"- {text.removeprefix('refused: ')}" for text in refusals()} <= set(kept_table().splitlines())


def test_the_readme_keeps_the_table() -> None:
    """Models, ways, what is refused by name and the number of policies are those tested here."""
    kept = kept_table()
    assert f"| model | what is particular | {' | '.join(WAYS)} |" in kept.splitlines()
    for name, (kind, _, says) in (REFUSED | REFUSED_WHEN_RUN).items():
        assert f"| {name} | refused: {kind} {says} |" in kept
    listed = [line.split("|")[1].strip() for line in kept.splitlines() if line.startswith("| ")]
    assert listed == ["model", *ZOO, *REFUSED, *REFUSED_WHEN_RUN]
    assert f"Of {len(policies.POLICIES)} policies" in kept


if __name__ == "__main__":
    made = table()
    print(made)
    text = README.read_text()
    begin, end = "<!-- matrix -->\n", "<!-- /matrix -->"
    README.write_text(text.split(begin)[0] + begin + "\n" + made + "\n\n" + end + text.split(end)[1])
