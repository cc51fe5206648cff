"""What others wrote is never trusted: no pickles, no code unless asked for, no paths of archives; and no key told."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from experiments import assets, models
from experiments.models import Hub
from experiments.store import CellFolder
from tova import UsageError

ROOT = Path(assets.__file__).parents[1]


# --- what the code calls


def _calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _keywords(call: ast.Call) -> dict[str, str]:
    return {keyword.arg or "**": ast.unparse(keyword.value) for keyword in call.keywords}


def unsafe(source: str) -> list[str]:
    """Calls in ``source`` that run, or may run, what somebody else wrote."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [
            name for name in names if name.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "shelve")
        ]
    for name, call in _calls(tree):
        last, given = name.rsplit(".", 1)[-1], _keywords(call)
        if (
            name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.load_all")
            or last in ("unsafe_load", "full_load", "extractall", "read_pickle", "load_pickle")
            or (last == "extract" and name.split(".")[0] in ("tar", "wheel", "archive"))
            or (name in ("torch.load", "joblib.load") and given.get("weights_only") != "True")
            or (name in ("np.load", "numpy.load") and given.get("allow_pickle") != "False")
            or given.get("shell", "False") != "False"
            or given.get("allow_pickle", "False") != "False"
            or given.get("trust_remote_code") == "True"
            or given.get("use_safetensors", "True") != "True"
            # Left out, transformers asks on the terminal whether to run the code.
            or (last in ("from_pretrained", "from_config") and not {"trust_remote_code", "**"} & set(given))
        ):
            found.append(name)
    return found


KNOWN = {"tova/kernels/generated.py": ["exec", "compile"]}
"""Runs what it has just written itself, never what it has read."""


@pytest.mark.parametrize("folder", ["tova", "experiments", "analysis"])
def test_nothing_unsafe_is_called(folder: str) -> None:
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts]
    assert paths
    called = {path.relative_to(ROOT).as_posix(): unsafe(path.read_text()) for path in paths}
    # All that is known is there, too: an allowance that nothing needs would let the next one through.
    assert {name: calls for name, calls in called.items() if calls} == {
        name: calls for name, calls in KNOWN.items() if name.startswith(f"{folder}/")
    }


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "np.savez(f, allow_pickle=True)",
        "yaml.load(f, Loader=yaml.SafeLoader)",
        "eval(x)",
        "exec(x)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
        "tar.extractall(x)",
        "pd.read_pickle(x)",
        "AutoModel.from_pretrained(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=False, use_safetensors=None)",
    ],
)
def test_unsafe_calls_are_found(source: str) -> None:
    assert unsafe(source)


def test_weights_are_asked_for_as_safetensors() -> None:
    tree = ast.parse(Path(models.__file__).read_text())
    loads = [call for name, call in _calls(tree) if name == "AutoModelForCausalLM.from_pretrained"]
    assert len(loads) == 2
    for call in loads:
        given = _keywords(call)
        assert given.get("use_safetensors") == "True" or "gguf_file" in given


# --- pickles


class Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_stored_array_that_is_a_pickle_is_refused(tmp_path) -> None:
    mark = tmp_path / "ran"
    folder = CellFolder(tmp_path, "cell")
    (folder.path / "arrays").mkdir(parents=True)
    np.savez(folder.path / "arrays" / "0000.npz", nll=np.array([Trap(mark)], dtype=object))
    with pytest.raises(UsageError, match=r"0000\.npz: not readable"):
        folder.arrays(0)
    (folder.path / "arrays" / "0000.npz").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(UsageError, match=r"0000\.npz: not readable"):
        folder.arrays(0)
    assert not mark.exists()


def tiny(path: Path) -> Path:
    """A model's folder."""
    import transformers

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=384, **sizes)).save_pretrained(path)
    transformers.ByT5Tokenizer().save_pretrained(path)
    return path


def configured(path: Path, **more) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | more))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_that_are_a_pickle_are_refused(tmp_path, name: str) -> None:
    """Whatever they are called."""
    path, mark = tiny(tmp_path / "model"), tmp_path / "ran"
    (path / "model.safetensors").unlink()
    (path / name).write_bytes(pickle.dumps(Trap(mark)))
    says = "pickles only" if name.endswith(".bin") else r"model\.safetensors is broken"
    with pytest.raises(UsageError, match=says):
        Hub(str(path)).load("cpu")
    assert not mark.exists()


def test_beside_safetensors_a_pickle_is_not_looked_at(tmp_path) -> None:
    path, mark = tiny(tmp_path / "model"), tmp_path / "ran"
    before = Hub(str(path)).identity()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    assert Hub(str(path)).identity() == before
    Hub(str(path)).load("cpu")
    assert not mark.exists()


# --- a model's own code


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).write_text("ran")
class OwnConfig(LlamaConfig):
    model_type = "own"
class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A model that comes with its code, and the mark the code leaves."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", tmp_path / "modules")
    # Code that is loaded registers its kind with transformers, for the whole process.
    for known in (CONFIG_MAPPING, AutoModelForCausalLM._model_mapping):
        monkeypatch.setattr(known, "_extra_content", dict(known._extra_content))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question nobody can answer in a sweep"))
    path, mark = tiny(tmp_path / "own"), tmp_path / "ran"
    (path / "own.py").write_text(CODE.format(mark=str(mark)))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    configured(path, model_type="own", architectures=["Own"], auto_map=classes)
    return path, mark


def test_a_models_own_code_runs_only_where_asked_for(own) -> None:
    path, mark = own
    with pytest.raises(UsageError, match=r"has no code for its kind \(own\), .* add model\.trust_remote_code=true"):
        Hub(str(path)).load("cpu")
    assert not mark.exists()
    trusting = Hub(str(path), trust_remote_code=True)
    trusting.identity()
    assert not mark.exists()
    assert type(trusting.load("cpu").model).__name__ == "Own"
    assert mark.exists()


def test_a_models_own_code_is_part_of_it(own) -> None:
    path, _ = own
    before = Hub(str(path), trust_remote_code=True).identity()
    assert before != Hub(str(path)).identity()
    (path / "own.py").write_text((path / "own.py").read_text() + "# edited\n")
    assert Hub(str(path), trust_remote_code=True).identity() != before


def test_code_of_another_repository_is_refused(own) -> None:
    path, _ = own
    configured(path, auto_map={"AutoModelForCausalLM": "org/other--own.Own"})
    with pytest.raises(
        UsageError, match=r"its code lies in another repository, which may change \(org/other--own\.Own"
    ):
        Hub(str(path), trust_remote_code=True).load("cpu")


def test_where_transformers_has_the_code_it_is_used(own) -> None:
    path, mark = own
    configured(path, model_type="llama")
    assert type(Hub(str(path)).load("cpu").model).__name__ == "LlamaForCausalLM"
    assert not mark.exists()


def test_a_tokenizers_own_code_runs_only_where_asked_for(own) -> None:
    path, mark = own
    configured(path, model_type="llama")
    (path / "tokens.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for file in path.glob("tokenizer*"):
        file.unlink()
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokens.Own", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=r"its own code is run only where you say so: .*model\.trust_remote_code=true"):
        Hub(str(path)).load("cpu")
    assert not mark.exists()


# --- archives


WANTED = b"text"
EVIL = [
    "/tmp/tova-evil.txt",
    "../evil.txt",
    "../../evil.txt",
    "thing-1.0/../../evil.txt",
    "C:\\evil.txt",
    "thing-1.0/evil",
]


def archive(kind: str, *, link: str = "") -> tuple[assets.Artifact, bytes]:
    """One with a wanted file, files that would lie elsewhere, and, in its place, perhaps a link."""
    buffer = io.BytesIO()
    if kind == "whl":
        with zipfile.ZipFile(buffer, "w") as zipped:
            for name in EVIL:
                zipped.writestr(name, b"evil")
            zipped.writestr("thing-1.0/text.txt", WANTED)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for number, name in enumerate(EVIL):
                entry = tarfile.TarInfo(name)
                entry.type = (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)[number % 3]
                entry.linkname = "/etc/passwd"
                entry.size = 4 if entry.isreg() else 0
                tar.addfile(entry, io.BytesIO(b"evil") if entry.isreg() else None)
            entry = tarfile.TarInfo("thing-1.0/text.txt")
            entry.size = 0 if link else len(WANTED)
            entry.type, entry.linkname = (tarfile.SYMTYPE if link else tarfile.REGTYPE), link
            tar.addfile(entry, None if link else io.BytesIO(WANTED))
    data = buffer.getvalue()
    file = f"thing-1.0.{'whl' if kind == 'whl' else 'tar.gz'}"
    members = {"thing-1.0/text.txt": hashlib.sha256(WANTED).hexdigest()}
    return assets.Artifact("thing==1.0", file, hashlib.sha256(data).hexdigest(), members), data


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOVA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_an_archive_writes_nowhere_else(tmp_path, cache, monkeypatch, kind: str) -> None:
    """Only the file that is wanted is written, under a name that is ours."""
    monkeypatch.chdir(tmp_path)
    artifact, data = archive(kind)
    (cache / artifact.file).write_bytes(data)
    (path,) = assets.fetch(artifact).values()
    assert path.read_bytes() == WANTED
    assert path.parent == cache / "assets" / "thing-1.0"
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file() or p.is_symlink()}
    assert {f for f in files if not f.endswith(".lock")} == {
        f"cache/{artifact.file}", "cache/assets/thing-1.0/text.txt",
    }  # fmt: skip
    assert not Path("/tmp/tova-evil.txt").exists()


@pytest.mark.parametrize("link", ["/etc/passwd", "../secret", "text.txt", "evil"])
def test_a_link_in_an_archive_is_not_followed(cache, link: str) -> None:
    (cache.parent / "secret").write_text("secret")
    artifact, data = archive("tar.gz", link=link)
    (cache / artifact.file).write_bytes(data)
    with pytest.raises(UsageError, match=r"thing-1\.0\.tar\.gz: thing-1\.0/text\.txt is not a file"):
        assets.fetch(artifact)
    assert not any(path.name == "text.txt" for path in cache.rglob("*"))


def test_an_archive_without_the_file(cache) -> None:
    for kind in ("whl", "tar.gz"):
        artifact, data = archive(kind)
        artifact = assets.Artifact(artifact.requirement, artifact.file, artifact.sha256, {"thing-1.0/other.txt": "0"})
        (cache / artifact.file).write_bytes(data)
        with pytest.raises(UsageError, match=r"has no thing-1\.0/other\.txt"):
            assets.fetch(artifact)


# --- converted models


@pytest.fixture
def conversions(cache, monkeypatch):
    """What is converted, by a stand-in that writes two small files."""
    import transformers

    made = []

    class Part:
        @classmethod
        def from_pretrained(cls, *_, **given):
            assert given["trust_remote_code"] is False
            return cls()

        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            made.append(self)
            (folder / f"{type(self).__name__}.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(transformers, "AutoModelForCausalLM", Part)
    monkeypatch.setattr(transformers, "AutoTokenizer", type("Tokens", (Part,), {}))
    (cache / "model.gguf").write_bytes(b"GGUF")
    return made


def test_a_converted_model_is_looked_at_again(cache, conversions, capsys) -> None:
    def folder() -> Path:
        return models._converted("small", "0" * 64, lambda: cache / "model.gguf")

    path = folder()
    assert len(conversions) == 2
    assert folder() == path
    assert len(conversions) == 2
    capsys.readouterr()
    harms = [
        lambda: (path / "Part.safetensors").write_bytes(b"w"),
        lambda: (path / "Part.safetensors").write_bytes(b"WEIGHTS"),
        lambda: (path / "Tokens.safetensors").unlink(),
        lambda: (path / "sha256.json").unlink(),
        lambda: (path / "sha256.json").write_text("{}"),
        lambda: (path / "sha256.json").write_text("["),
    ]
    for number, harm in enumerate(harms, start=2):
        harm()
        assert folder() == path
        assert len(conversions) == 2 * number
        assert "converting model.gguf, whose converted form is not as it was made, to saf" in capsys.readouterr().err
        assert (path / "Part.safetensors").read_bytes() == b"weights"
    assert not list(cache.glob(".convert-*"))


# --- keys


KEYS = {
    "WANDB_API_KEY": "5ec2e70000aaaabbbbccccddddeeeeffff012345",
    "HF_TOKEN": "hf_5ec2e71111AAAABBBBCCCCDDDDEEEEFFFF",
    "HUGGING_FACE_HUB_TOKEN": "hf_5ec2e72222AAAABBBBCCCCDDDDEEEEFFFF",
    "OPENAI_API_KEY": "sk-5ec2e73333AAAABBBBCCCCDDDDEEEEFFFF",
    "ANTHROPIC_API_KEY": "sk-ant-5ec2e74444AAAABBBBCCCCDDDDEEEEFFFF",
}
BROKEN = """
from experiments.data import TextFiles
class Broken(TextFiles):
    def identity(self):
        return {"broken": 1}
    def load(self):
        raise RuntimeError("on the way")
"""


def test_no_key_is_told(tmp_path) -> None:
    """Neither in results, configurations and the runs for W&B nor on the terminal, nor where a cell fails."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("It was the best of times, it was the worst of times. " * 5)
    (tmp_path / "mine.py").write_text(BROKEN)
    environment = {**os.environ, **KEYS, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    words = ["model=random_llama", "dataset=text", "dataset.path=texts", "dataset.tokens=60", "tracking.mode=offline"]
    words += ["policy=full", "dataset._target_=experiments.data.TextFiles,mine.Broken"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.run", "-m", *words],
        capture_output=True, cwd=tmp_path, env=environment, timeout=120,
    )  # fmt: skip
    (tmp_path / "out").write_bytes(done.stdout + done.stderr)
    assert done.returncode != 0
    assert b"on the way" in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert any(path.name == "summary.json" for path in files)
    for path in files:
        data = path.read_bytes()
        for name, key in KEYS.items():
            assert key.encode() not in data, (name, path)
            assert key[-20:].encode() not in data, (name, path)
