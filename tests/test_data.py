"""What is read: known by its content, never by its name or its age; and what is said of data that cannot be read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import httpx
import huggingface_hub
import pandas as pd
import pytest
from huggingface_hub.errors import HfHubHTTPError

from experiments import assets, hub
from experiments.data import Books, HubDataset, TextFiles
from tova import UsageError

A, B = "a" * 40, "b" * 40


def rewrite(path: Path, text: str) -> None:
    """Other content of the same length, at the same time as before."""
    stat = path.stat()
    assert stat.st_size == len(text.encode())
    path.write_text(text)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture(params=[2 * 10**9, -(10**12)], ids=["just written", "settled"])
def settled(request, monkeypatch):
    """Files as they are, whose content is read each time, and as if they were old: what was found is remembered."""
    monkeypatch.setattr(assets, "_SETTLED", request.param)
    return request.param < 0


# --- books


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(titles=["moby"]), r"dataset\.titles: there is no 'moby'; there are alice29, asyoulik, lcet10, plrabn12"),
        (dict(titles="alice29"), r"dataset\.titles=alice29: must be a list of some of alice29, asyoulik"),
        (dict(titles=[]), r"dataset\.titles=\[\]: must be a list"),
        (dict(titles=None), r"dataset\.titles=null: must be a list"),
        (dict(titles=["alice29", "alice29"]), r"dataset\.titles=\[alice29,alice29\]: alice29 is named twice"),
        (dict(documents=5), r"dataset\.documents=5: there are 4 \(alice29, .*\); take fewer, or null for all"),
        (dict(documents=0), r"dataset\.documents=0: must be an integer of at least 1, or null for all"),
        (dict(tokens=1), r"dataset\.tokens=1: must be an integer of at least 2, or null for all"),
        (dict(tokens=True), r"dataset\.tokens=true: must be an integer of at least 2"),
        (dict(tokens="64"), r"dataset\.tokens='64': must be an integer of at least 2"),
        (dict(tokens=64.0), r"dataset\.tokens=64\.0: must be an integer of at least 2"),
    ],
)
def test_books_that_cannot_be(options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Books(**options)


def test_the_order_of_books_is_part_of_them() -> None:
    """Rows and arrays are kept by their place: the other order must not continue them."""
    assert Books(["alice29", "lcet10"]).identity() != Books(["lcet10", "alice29"]).identity()
    assert Books(["alice29", "lcet10"], documents=1).identity() == Books(["alice29"]).identity()


# --- text files


def test_text_files(tmp_path) -> None:
    (tmp_path / "b.txt").write_bytes(b"two\r\nlines\x1a")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "C.TXT").write_text("three")
    (tmp_path / ".d.txt").write_text("hidden")
    (tmp_path / "._a.txt").write_bytes(b"\x00\x05\x16\x07")  # what some systems leave beside a file
    (tmp_path / "notes.md").write_text("other")
    (tmp_path / "e.txt").mkdir()
    data = TextFiles(path=str(tmp_path))
    assert [(d.name, d.text) for d in data.load()] == [("C", "three"), ("a", "one"), ("b", "two\nlines")]
    assert data.label == tmp_path.name
    one = TextFiles(path=str(tmp_path / "b.txt"))
    assert [d.name for d in one.load()] == ["b"]
    assert one.label == "b"
    assert [d.name for d in TextFiles(path=str(tmp_path), documents=2).load()] == ["C", "a"]
    tmp_path.joinpath("e.txt", "inner.txt").write_text("a folder may be called so")
    inner = TextFiles(path=f"{tmp_path / 'e.txt'}/")
    assert [d.name for d in inner.load()] == ["inner"]
    assert inner.label == "e.txt"


def test_two_files_of_one_stem_are_two_documents(tmp_path) -> None:
    for name in ("a.txt", "a.TXT", "b.txt"):
        (tmp_path / name).write_text(name)
    assert sorted((d.name, d.text) for d in TextFiles(path=str(tmp_path)).load()) == [
        ("a.TXT", "a.TXT"), ("a.txt", "a.txt"), ("b", "b.txt"),
    ]  # fmt: skip


def _file(data: bytes, name: str = "a.txt"):
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def _link(folder: Path) -> Path:
    (folder / "a.txt").symlink_to("a.txt")
    return folder / "a.txt"


def _folder_with_link(folder: Path) -> Path:
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").symlink_to("nowhere.txt")
    return folder


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.txt")
    return folder / "a.txt"


def _folder_with_pipe(folder: Path) -> Path:
    _pipe(folder)
    return folder


def _inside(folder: Path) -> Path:
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_bytes(b"caf\xe9")
    return folder


BAD_TEXTS = {
    "nowhere": (lambda f: f / "nowhere.txt", {}, "there is no such file or folder"),
    "latin-1": (_file("un caf\xe9".encode("latin-1")), {}, r"a\.txt is not UTF-8 \(the byte 0xe9 at 6\); if it is"),
    "latin-1 inside": (_inside, {}, r"b\.txt is not UTF-8 \(the byte 0xe9 at 3\)"),
    "utf-16": (_file("one".encode("utf-16")), {}, r"a\.txt is not UTF-8 but UTF-16 \(its first bytes say so\)"),
    "utf-16 unmarked": (_file("one".encode("utf-16-le")), {}, r"a\.txt is no text, or not UTF-8: it holds a zero byte"),
    "utf-32": (_file("one".encode("utf-32")), {}, r"a\.txt is not UTF-8 but UTF-16"),
    "binary": (_file(bytes(range(256))), {}, r"a\.txt is not UTF-8 \(the byte 0x80 at 128\)"),
    "zero bytes": (_file(b"one\x00two"), {}, r"a\.txt is no text, or not UTF-8: it holds a zero byte at 3"),
    "gzip": (_file(b"\x1f\x8b\x08\x00rest"), {}, r"a\.txt is not UTF-8 \(the byte 0x8b at 1\)"),
    "empty": (_file(b""), {}, r"a\.txt is empty"),
    "only a mark": (_file(b"\xef\xbb\xbf"), {}, r"a\.txt is empty"),
    "blank": (_file(b" \r\n\t\n"), {}, r"a\.txt is blank"),
    "empty folder": (lambda f: f, {}, r"the folder holds no \*\.txt file, it is empty"),
    "other files": (lambda f: _file(b"x", "a.md")(f).parent, {}, r"the folder holds no \*\.txt file, only a\.md"),
    "link to itself": (_link, {}, "is a link that leads nowhere"),
    "dead link inside": (_folder_with_link, {}, r"b\.txt is a link that leads nowhere"),
    "pipe": (_pipe, {}, "is neither a file nor a folder"),
    "pipe inside": (_folder_with_pipe, {}, r"a\.txt is no file"),
    "unreadable": (lambda f: "/proc/self/mem", {}, r"mem cannot be read \(Input/output error\)"),
    "too many": (lambda f: _file(b"one")(f).parent, dict(documents=2), r"there is 1 \(a\.txt\); take fewer, or null"),
    "number": (lambda f: 123, {}, r"must be a path or a name; write \./123 for a file called 123"),
    "null": (lambda f: None, {}, "must be a path or a name"),
    "nothing": (lambda f: "", {}, "must be a path or a name"),
    "list": (lambda f: ["a.txt"], {}, "must be a path or a name"),
    "zero byte in name": (lambda f: "a\x00b", {}, "must be a path or a name, and holds a zero byte"),
    "long name": (lambda f: "x" * 5000, {}, r"x\.\.\. \(5,000 characters\): cannot be looked at \(File name too long"),
    "user": (lambda f: "~nobody-of-that-name/a.txt", {}, "there is no such user"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_TEXTS)
def test_text_files_that_cannot_be_read(tmp_path, what: str) -> None:
    make, options, says = BAD_TEXTS[what]
    path = make(tmp_path)
    with pytest.raises(UsageError, match=rf"^dataset\.\w+=.*{says}") as refused:
        TextFiles(path=str(path) if isinstance(path, Path) else path, **options).identity()
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(os.name != "posix", reason="permissions of files are asked")
def test_a_folder_of_somebody_else(tmp_path) -> None:
    """Asked by a process that is not root, which may read everything."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.txt").chmod(0)
    pid = os.fork() if os.geteuid() == 0 else 0
    if pid == 0 and os.geteuid() == 0:  # the child
        try:
            for parent in (tmp_path, *tmp_path.parents):
                if parent.owner() == "root" and parent != Path("/"):
                    parent.chmod(parent.stat().st_mode | 0o011)
            tmp_path.chmod(0o755)
            os.setuid(65534)
            TextFiles(path=str(tmp_path)).load()
        except UsageError as e:
            os._exit(0 if "a.txt cannot be read (Permission denied)" in str(e) else 2)
        finally:
            os._exit(1)
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    else:
        with pytest.raises(UsageError, match=r"a\.txt cannot be read \(Permission denied\)"):
            TextFiles(path=str(tmp_path)).load()


def test_text_files_are_known_by_their_content(tmp_path, settled, monkeypatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_text("two")
    first = TextFiles(path=str(folder)).identity()
    reads = []
    monkeypatch.setattr(Path, "read_bytes", lambda self, read=Path.read_bytes: (reads.append(self), read(self))[1])
    assert TextFiles(path=str(folder)).identity() == first
    assert len(reads) == (0 if settled else 2)
    rewrite(folder / "a.txt", "eno")
    changed = TextFiles(path=str(folder)).identity()
    assert changed != first
    rewrite(folder / "a.txt", "one")
    assert TextFiles(path=str(folder)).identity() == first
    folder.rename(tmp_path / "others")  # what it is called, and what else lies there, is not what it is
    (tmp_path / "others" / "notes.md").write_text("x")
    assert TextFiles(path=str(tmp_path / "others")).identity() == first
    (tmp_path / "others" / "c.txt").write_text("three")
    assert TextFiles(path=str(tmp_path / "others")).identity() != first
    assert TextFiles(path=str(tmp_path / "others"), documents=2).identity() == first
    assert TextFiles(path=str(tmp_path / "others"), documents=2, tokens=9).identity() != first


# --- folders for the datasets library


def rows(folder: Path, *found: dict, name: str = "test.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(json.dumps(row) for row in found))
    return folder


def test_a_dataset_by_the_datasets_library(tmp_path) -> None:
    """As PG-19 would be read, here from a folder of parquet."""
    pd.DataFrame({"text": ["one", "two", "three"], "title": list("abc")}).to_parquet(tmp_path / "test-0.parquet")
    found = HubDataset(name=str(tmp_path), documents=2).load()
    assert [(d.name, d.text) for d in found] == [("test-0000", "one"), ("test-0001", "two")]
    with pytest.raises(UsageError, match=r"dataset\.column=body: .* has no such column, it has text, title"):
        HubDataset(name=str(tmp_path), column="body").load()
    assert HubDataset(name=f"{tmp_path}/").label == tmp_path.name


def test_a_byte_order_mark_is_no_text(tmp_path) -> None:
    rows(tmp_path, {"text": "\ufeffone"})
    assert [d.text for d in HubDataset(name=str(tmp_path)).load()] == ["one"]
    (tmp_path / "test.jsonl").write_text('\ufeff{"text": "two"}')
    assert [d.text for d in HubDataset(name=str(tmp_path)).load()] == ["two"]
    (tmp_path / "test.jsonl").unlink()
    (tmp_path / "test.csv").write_text("\ufefftext,more\nthree,x\n")
    assert [d.text for d in HubDataset(name=str(tmp_path)).load()] == ["three"]


def test_a_folder_is_known_by_the_texts_that_are_read(tmp_path, settled, monkeypatch) -> None:
    """Edited files are read again, whatever the library has kept of them; names and other columns do not count."""
    folder = rows(tmp_path / "data", {"text": "one", "n": 1}, {"text": "two", "n": 2})
    first = HubDataset(name=str(folder)).identity()
    loads = []
    monkeypatch.setattr(HubDataset, "load", lambda self, load=HubDataset.load: (loads.append(1), load(self))[1])
    assert HubDataset(name=str(folder)).identity() == first
    assert len(loads) == (0 if settled else 1)
    rewrite(folder / "test.jsonl", (folder / "test.jsonl").read_text().replace("one", "eno"))
    assert HubDataset(name=str(folder)).identity() != first
    assert [d.text for d in HubDataset(name=str(folder)).load()] == ["eno", "two"]
    rewrite(folder / "test.jsonl", (folder / "test.jsonl").read_text().replace("eno", "one").replace(": 2", ": 3"))
    assert HubDataset(name=str(folder)).identity() == first
    rows(folder, {"text": "two"}, {"text": "one"})
    assert HubDataset(name=str(folder)).identity() != first
    shutil.rmtree(folder)
    pd.DataFrame({"text": ["one", "two", "three"]}).to_parquet(rows(tmp_path / "new") / "test.parquet")
    (tmp_path / "new" / "test.jsonl").unlink()
    (tmp_path / "new").rename(folder)  # another folder of that name, in another format
    assert HubDataset(name=str(folder)).identity() != first
    assert HubDataset(name=str(folder), documents=2).identity() == first


BAD_FOLDERS = {
    "null": ([{"text": "one"}, {"text": None}], {}, r"dataset\.column=text: row 1 of \S+ is null, not a text"),
    "lacking": ([{"text": "one"}, {"other": "x"}], {}, r"dataset\.column=text: row 1 of \S+ is null, not a text"),
    "all null": ([{"text": None}], {}, r"dataset\.column=text: holds nothing but null, not text; no column holds text"),
    "numbers": ([{"text": 1, "body": "x"}], {}, r"dataset\.column=text: holds int64, not text; of text are body"),
    "fractions": ([{"text": 1.5}], {}, r"dataset\.column=text: holds float64, not text"),
    "true": ([{"text": True}], {}, r"dataset\.column=text: holds bool, not text"),
    "lists": ([{"text": ["one", "two"]}], {}, r"dataset\.column=text: holds lists, not text"),
    "records": ([{"text": {"a": "b"}}], {}, r"dataset\.column=text: holds records, not text"),
    "mixed": ([{"text": "one"}, {"text": 2}], {}, r"dataset\.column=text: (holds|row 1)"),
    "blank": ([{"text": "one"}, {"text": " "}], {}, r"dataset\.column=text: row 1 of \S+ is blank, not a text"),
    "split": ([{"text": "one"}], dict(split="train"), r"dataset\.split=train: \S+ has no such split: .*\['test'\]"),
    "no split": ([{"text": "one"}], dict(split=None), r"dataset\.split=null: must be a name"),
    "column": ([{"text": "one"}], dict(column=3), r"dataset\.column=3: must be a name"),
    "config": ([{"text": "one"}], dict(config="foo"), r"dataset\.config=foo: \S+ has no such configuration"),
    "documents": ([{"text": "one"}], dict(documents=3), r"dataset\.documents=3: there is 1 \(the rows of test\)"),
    "no rows": ([], {}, r"dataset\.name=\S+: cannot be loaded: it holds no rows"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_FOLDERS)
def test_folders_of_data_that_cannot_be_read(tmp_path, capfd, what: str) -> None:
    found, options, says = BAD_FOLDERS[what]
    with pytest.raises(UsageError, match=says) as refused:
        HubDataset(name=str(rows(tmp_path, *found)), **options).identity()
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("file", "data", "says"),
    [
        ("test.jsonl", b"{", "cannot be loaded: JSON parse error"),
        ("test.parquet", b"PAR1xxxxxxxx", "cannot be loaded: Parquet magic bytes not found"),
        ("test.csv", b"text,b\ncaf\xe9,2\n", "cannot be loaded: 'utf-8' codec can't decode byte 0xe9"),
        ("test.pkl", b"\x80\x04.", r"cannot be loaded: No \(supported\) data files found"),
        ("data.py", b"open('ran', 'w')", "cannot be loaded: Dataset scripts are no longer supported"),
        ("notes.docx", b"x", r"cannot be loaded: No \(supported\) data files found"),
    ],
)
def test_files_of_data_that_cannot_be_read(tmp_path, monkeypatch, file: str, data: bytes, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / file).write_bytes(data)
    with pytest.raises(UsageError, match=rf"dataset\.name=data: {says}"):
        HubDataset(name="data").identity()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "must be a path or a name"),
        (5, "must be a path or a name"),
        ("./nowhere", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        ("a b/c", "neither a folder here nor a hub id"),
        ("https://huggingface.co/datasets/a/b", "give the id alone, as org/name, or a folder"),
        (__file__, "is a file; give the folder it lies in"),
        ("~nobody-of-that-name/x", "there is no such user"),
    ],
)
def test_names_that_are_none(name, says: str) -> None:
    with pytest.raises(UsageError, match=rf"^dataset\.name=.*{says}"):
        HubDataset(name=name)


# --- the hub


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """A hub that says what it is told to, and a cache of one's own."""
    monkeypatch.setenv("TOVA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_FOUND", {})
    given: dict = {}

    def info(self, name, *, revision, timeout):
        assert timeout <= 5
        answer = given.get("answer", ConnectionError("nobody there"))
        given["asked"] = given.get("asked", 0) + 1
        if isinstance(answer, Exception):
            raise answer
        return huggingface_hub.ModelInfo(id=name, sha=answer)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    return given


def refusal(status: int) -> HfHubHTTPError:
    request = httpx.Request("GET", "https://hub/api")
    return HfHubHTTPError("no", response=httpx.Response(status, request=request))


def anew() -> dict:
    """The identity as a new process would find it."""
    hub._FOUND.clear()
    return HubDataset(name="org/data").identity()


def test_a_branch_that_moves_is_another_dataset(answers) -> None:
    answers["answer"] = A
    first = anew()
    assert first["commit"] == A
    answers["answer"] = B
    assert HubDataset(name="org/data").identity() == first  # not under a sweep that runs
    assert answers["asked"] == 1
    assert anew()["commit"] == B
    answers["answer"] = ConnectionError("gone")
    assert anew()["commit"] == B  # what it was last time
    answers["answer"] = refusal(503)
    assert anew()["commit"] == B
    assert HubDataset(name="org/data", revision=A).identity() == {**first}


def test_a_hub_that_was_never_reached(answers) -> None:
    found = HubDataset(name="org/data", revision="v1")
    assert found.identity()["commit"] == "v1, not resolved"
    with pytest.raises(
        UsageError, match=r"dataset\.name=org/data is not on this machine and the hub cannot be reached"
    ):
        found.load()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_hub_that_refuses(answers, status: int) -> None:
    """Before anything runs, and though it was there before."""
    answers["answer"] = A
    anew()
    answers["answer"] = refusal(status)
    with pytest.raises(UsageError, match=rf"dataset\.name=org/data: the hub refuses it \(HTTP {status}\)"):
        anew()


def test_revisions(answers) -> None:
    answers["answer"] = A
    assert HubDataset(name="org/data", revision=20).identity()["commit"] == A
    with pytest.raises(
        UsageError, match=r"dataset\.revision=1e\+16: must be a branch, a tag or a commit; quote a number"
    ):
        HubDataset(name="org/data", revision=1e16)


def test_without_the_hub_only_the_commit_asked_for_is_read(answers, tmp_path, monkeypatch) -> None:
    """The library would take the newest copy it has, whatever is asked for."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    kept = tmp_path / "prepared/org___data/default/0.0.0"
    for commit, text in ((A, "old"), (B, "new")):
        made = tmp_path / text
        datasets.load_dataset(str(rows(tmp_path / f"{text}-rows", {"text": text})), cache_dir=str(made))
        (folder,) = {path.parent for path in made.rglob("*.arrow")}
        shutil.copytree(folder, kept / commit)
        next((kept / commit).glob("*.arrow")).rename(kept / commit / "data-test.arrow")
        info = json.loads((kept / commit / "dataset_info.json").read_text())
        info |= {"dataset_name": "data"}
        info["splits"]["test"]["dataset_name"] = "data"
        (kept / commit / "dataset_info.json").write_text(json.dumps(info))
    os.utime(kept / A, (1, 1))
    assert [d.text for d in HubDataset(name="org/data", revision=B).load()] == ["new"]
    with pytest.raises(UsageError, match=rf"dataset\.revision={A}: is the commit {A}, which is not on this machine"):
        HubDataset(name="org/data", revision=A).load()
    assert HubDataset(name="org/data").identity()["commit"] == "main, not resolved"  # it may be either
    shutil.rmtree(kept / A)
    hub._FOUND.clear()
    assert HubDataset(name="org/data").identity()["commit"] == B
    assert [d.text for d in HubDataset(name="org/data").load()] == ["new"]
