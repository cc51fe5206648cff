"""Every configuration composes, says what its options mean, and describes a cell that can be planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException

from experiments import sweeper
from experiments.lengths import budget_of
from experiments.planning import plan
from tova import UsageError

CONF = Path(__file__).parent.parent / "conf"
FILES = sorted(p.relative_to(CONF) for p in CONF.rglob("*.yaml"))
GIVEN = {
    "model/hub": [f"model.name={Path(__file__).parent / 'no_such_model'}"],
    "dataset/text": [f"dataset.path={__file__}"],
    "policy/snapkv_prefill": ["prefill=one_shot", "prompt=0.5"],
    "policy/pyramidkv_prefill": ["prefill=one_shot", "prompt=0.5"],
}


@pytest.fixture(scope="module", autouse=True)
def hydra():
    sweeper.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@pytest.mark.parametrize("file", FILES, ids=str)
def test_composes(file: Path) -> None:
    group, name = file.parent.as_posix(), file.stem
    words = [] if group == "." else [f"{group}={name}"]
    config = compose("config", [*words, *GIVEN.get(f"{group}/{name}", [])])
    if file == Path("model/hub.yaml"):
        with pytest.raises(UsageError, match="there is no such folder"):
            plan(config)
        return
    cell = plan(config)
    assert cell.id == plan(config).id
    if group == "policy":
        assert cell.policy_class.name == name
    if group == "model":
        assert cell.model is not None
        assert cell.model.label == name


@pytest.mark.parametrize("file", FILES, ids=str)
def test_is_documented(file: Path) -> None:
    """A comment at the top, and one for every option that is not plain from the top one."""
    lines = (CONF / file).read_text().splitlines()
    assert lines[0].startswith("#")
    content = [line for line in lines if not line.startswith("# @package")]
    assert content[0].startswith("# "), "says first what it is"
    options = yaml.safe_load("\n".join(lines)) or {}
    explained = sum(line.lstrip().startswith("#") for line in lines)
    if file.parent.name in ("policy", "dataset", "task"):
        own = [k for k in options if k not in ("_target_", "name", "path", "split", "revision", "seed")]
        assert explained >= len(own)


def test_files_say_only_what_is_their_own() -> None:
    """What files of a group share stands in one file, which is no choice of its own."""
    common = {path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("*_common.yaml")}
    assert set(common["policy_common"]) == {"sinks", "recent_window", "per_head", "layer_budgets"}
    for name, shared in common.items():
        files = {p: yaml.safe_load(p.read_text()) for p in (CONF / name.removesuffix("_common")).glob("*.yaml")}
        users = {p: file for p, file in files.items() if f"/{name}@_here_" in file.get("defaults", [])}
        assert len(users) > 1
        for path, file in users.items():
            repeated = [k for k, v in shared.items() if k in file and file[k] == v]
            assert not repeated, f"{path} repeats {repeated}"
    for path in (CONF / "policy").glob("*.yaml"):
        assert "/policy_common@_here_" in yaml.safe_load(path.read_text())["defaults"]
        composed = compose("config", [f"policy={path.stem}"]).policy
        assert set(common["policy_common"]) <= set(composed)
    with pytest.raises(MissingConfigException, match="policy/policy_common"):
        compose("config", ["policy=policy_common"])


def test_all_of_a_policys_options_are_in_its_file() -> None:
    """So that --cfg job shows them; and with the defaults that the class has, or null."""
    from tova.policies import POLICIES

    for name, policy in POLICIES.items():
        composed = compose("config", [f"policy={name}"]).policy
        for f in dataclasses.fields(policy):
            if f.init and f.name not in ("budget", "layer", "num_layers"):
                assert composed[f.name] in (None, f.default), f"{name}.{f.name}"


def test_what_determines_the_result_decides_the_address() -> None:
    def cell(*words: str) -> str:
        return plan(compose("config", ["model=random_llama", *words])).id

    base = cell()
    same = ["results_dir=elsewhere", "tracking.mode=disabled", "sweep.name=x", "task.batch_size=1", "task.scan=auto"]
    for word in same:
        assert cell(word) == base, word
    other = ["policy=h2o", "budget=128", "model.seed=1", "model.dtype=bfloat16", "dataset.tokens=100"]
    other += ["dataset.documents=1", "task.measures=false", "evict_every=4", "policy=window", "prompt=100"]
    other += ["task.batch_size=2", "task.chunk=64", "task.scan=reference"]  # they round otherwise
    other += ["policy.sinks=4", "policy.layer_budgets=linear:4", "policy=tova_head", "policy.per_head=true"]
    found = {word: cell(word) for word in other}
    assert len({base, *found.values()}) == len(other) + 1
    for idle in ("budget=64", "evict_every=4", "prompt=100", "policy.sinks=4"):
        assert cell("policy=full") == cell("policy=full", idle), idle
    # A default said out loud is the same cell; so results outlive a file that comes to name one more option.
    for said in ("policy.sinks=0", "policy.per_head=false", "policy.layer_budgets=uniform", "prefill=every_step"):
        assert cell(said) == base, said
    shot = cell("prefill=one_shot", "prompt=100")
    assert shot not in {base, *found.values()}
    assert cell("policy=h2o", "policy.recent_window=16") != found["policy=h2o"]


@pytest.mark.parametrize(
    ("value", "length", "tokens"),
    [(256, 2048, 256), (0.125, 2048, 256), (0.1, 2050, 205), (0.3, 10, 3), (0.999, 1000, 999), (1, 5, 1)],
)
def test_budgets_in_tokens(value: float, length: int, tokens: int) -> None:
    assert budget_of(value).tokens(length) == tokens
