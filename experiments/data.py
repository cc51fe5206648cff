"""What is read: real books from a package, any text file, PG-19.

Each class is named by ``_target_`` in a file of ``conf/dataset``. Documents are cut to their first ``tokens`` tokens.
A tokenizer that puts a BOS first does so here too; it is context and is never predicted. What lies on this machine is
known by what is in it: a file that was edited, or another one of the same name, is another dataset.
"""

from __future__ import annotations

import codecs
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments import assets, options
from experiments.hub import check_id, find_dataset
from tova.errors import UsageError


@dataclass(frozen=True)
class Document:
    """A text with a name; ``sha256`` is of its UTF-8 bytes after clean-up, before it is cut."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Dataset(Protocol):
    """What a file of ``conf/dataset`` describes."""

    @property
    def label(self) -> str:
        """A short name for folders and tables."""
        ...

    @property
    def documents(self) -> int | None:
        """How many documents, the first ones; None for all."""
        ...

    @property
    def tokens(self) -> int | None:
        """Tokens per document, the first ones; None takes documents whole."""
        ...

    def identity(self) -> dict[str, Any]:
        """Everything about the data that determines a result."""
        ...

    def load(self) -> list[Document]: ...


def _check_counts(dataset: Dataset) -> None:
    for name, least in (("documents", 1), ("tokens", 2)):
        value = getattr(dataset, name)
        if value is not None:
            try:
                options.integer(f"dataset.{name}", value, least)
            except UsageError as e:
                raise UsageError(f"{e}, or null for all") from e


def _first(dataset: Dataset, there: Sequence[Any], names: str) -> list[Any]:
    """The documents asked for of those that are there; raises if there are fewer."""
    if dataset.documents is not None and dataset.documents > len(there):
        are = "is" if len(there) == 1 else "are"
        raise UsageError(
            f"dataset.documents={dataset.documents}: there {are} {len(there)} ({names}); take fewer, or null for all"
        )
    return list(there)[: dataset.documents]


_BOOKS = {
    "alice29": "ALICE'S ADVENTURES IN WONDERLAND",
    "asyoulik": "AS YOU LIKE IT",
    "lcet10": "WORKSHOP ON ELECTRONIC TEXTS",
    "plrabn12": "Paradise Lost",
}
"""Title -> the line the work itself begins with; what a catalogue put before it is left out."""


@dataclass(frozen=True)
class Books:
    """A novel, a play, a technical report and a poem: the texts of the Canterbury corpus.

    Line ends are normalised, an old end-of-file mark is dropped, and each text begins at its own title: the front
    matter that Project Gutenberg put before the last two is left out.
    """

    titles: Sequence[str] = tuple(_BOOKS)
    documents: int | None = None
    tokens: int | None = 2048
    label: str = "books"

    def __post_init__(self) -> None:
        _check_counts(self)
        if isinstance(self.titles, str) or not isinstance(self.titles, Sequence) or not self.titles:
            raise UsageError(
                f"dataset.titles={options.shown(self.titles)}: must be a list of some of {', '.join(_BOOKS)}, as "
                "[alice29,lcet10]"
            )
        for title in self.titles:
            if title not in _BOOKS:
                raise UsageError(f"dataset.titles: there is no {title!r}; there are {', '.join(_BOOKS)}")
            if list(self.titles).count(title) > 1:
                raise UsageError(f"dataset.titles={options.shown(self.titles)}: {title} is named twice")
        self._wanted()

    def _wanted(self) -> list[str]:
        return _first(self, self.titles, ", ".join(self.titles))

    def identity(self) -> dict[str, Any]:
        hashes = {Path(member).stem: sha256 for member, sha256 in assets.CANTERBURY.members.items()}
        return {"books": [[title, hashes[title]] for title in self._wanted()], "tokens": self.tokens}

    def load(self) -> list[Document]:
        paths = assets.fetch(assets.CANTERBURY)
        return [
            Document(title, _from_line(_clean(paths[f"{title}.txt"].read_bytes().decode()), _BOOKS[title]))
            for title in self._wanted()
        ]


@dataclass(frozen=True)
class TextFiles:
    """Plain text files, UTF-8: one file, or every ``*.txt`` of a folder in the order of their names.

    A document is called as its file is without the ending, or with it where two would bear one name.
    """

    path: str
    documents: int | None = None
    tokens: int | None = None
    label: str = ""

    def __post_init__(self) -> None:
        _check_counts(self)
        path = assets.path_of("dataset.path", self.path)
        if not self.label:
            object.__setattr__(self, "label", path.stem if path.is_file() else path.resolve().name)

    def identity(self) -> dict[str, Any]:
        files = self._files()
        hashes = _hashes((type(self).__name__, *map(str, files)), files, self.load)
        return {"text": hashes, "tokens": self.tokens}

    def load(self) -> list[Document]:
        files = self._files()
        stems = Counter(f.stem for f in files)
        return [Document(f.stem if stems[f.stem] == 1 else f.name, self._read(f)) for f in files]

    def _files(self) -> list[Path]:
        path = assets.path_of("dataset.path", self.path)
        if not path.is_dir():
            return _first(self, [path], path.name)
        try:
            inside = sorted(p for p in path.iterdir() if not p.name.startswith("."))
        except OSError as e:
            raise self._error(f"the folder cannot be read ({e.strerror})") from e
        files = [p for p in inside if p.suffix.lower() == ".txt" and not p.is_dir()]
        if not files:
            others = ", ".join(p.name for p in inside[:3]) + (", ..." if len(inside) > 3 else "")
            raise self._error(f"the folder holds no *.txt file, {f'only {others}' if others else 'it is empty'}")
        names = ", ".join(f.name for f in files[:3]) + (", ..." if len(files) > 3 else "")
        return _first(self, files, names)

    def _read(self, file: Path) -> str:
        if not file.is_file():
            raise self._error(f"{file.name} {'is a link that leads nowhere' if file.is_symlink() else 'is no file'}")
        try:
            data = file.read_bytes()
        except OSError as e:
            raise self._error(f"{file.name} cannot be read ({e.strerror})") from e
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise self._error(f"{file.name} is not UTF-8 but UTF-16 (its first bytes say so); save it as UTF-8")
        try:
            text = _clean(data.decode())
        except UnicodeDecodeError as e:
            raise self._error(
                f"{file.name} is not UTF-8 (the byte 0x{data[e.start]:02x} at {e.start:,}); if it is Latin-1, convert "
                f"it: iconv -f latin1 -t utf-8"
            ) from e
        if "\x00" in text:
            raise self._error(f"{file.name} is no text, or not UTF-8: it holds a zero byte at {data.index(0):,}")
        if not text.strip():
            raise self._error(f"{file.name} is {'blank' if text else 'empty'}")
        return text

    def _error(self, what: str) -> UsageError:
        return UsageError(f"dataset.path={self.path}: {what}")


@dataclass(frozen=True)
class HubDataset:
    """A text column of a dataset on the hub, or of a folder of parquet, JSON or CSV files, by the ``datasets`` library.

    A folder is known by the texts that are read of it; its name and its other columns make no difference. A dataset of
    the hub is known by its commit, which a branch such as ``main`` is resolved to.
    """

    name: str
    split: str = "test"
    column: str = "text"
    config: str | None = None
    revision: str = "main"
    documents: int | None = None
    tokens: int | None = None
    label: str = ""

    def __post_init__(self) -> None:
        _check_counts(self)
        for option in ("split", "column"):
            if not isinstance(getattr(self, option), str) or not getattr(self, option):
                raise UsageError(f"dataset.{option}={options.shown(getattr(self, option))}: must be a name")
        folder = self._folder
        if folder is None:
            check_id("dataset.name", self.name, self.revision, "dataset=text dataset.path=")
        if not self.label:
            object.__setattr__(self, "label", Path(self.name).name if folder is None else folder.resolve().name)

    @property
    def _folder(self) -> Path | None:
        return assets.folder_of("dataset.name", self.name)

    def identity(self) -> dict[str, Any]:
        folder = self._folder
        if folder is not None:
            files = sorted(p for p in folder.rglob("*") if p.is_file())
            key = (str(folder.resolve()), self.split, self.column, self.config, self.documents, *map(str, files))
            return {"text": _hashes(key, files, self.load), "tokens": self.tokens}
        found = find_dataset(self.name, str(self.revision))
        return {
            "hub": self.name,
            "commit": found.commit or f"{self.revision}, not resolved",
            "config": self.config,
            "split": self.split,
            "column": self.column,
            "documents": self.documents,
            "tokens": self.tokens,
        }

    def load(self) -> list[Document]:
        import datasets

        datasets.utils.logging.disable_progress_bar()
        datasets.utils.logging.set_verbosity(50)  # what it logs as an error it raises too
        folder = self._folder
        if folder is not None:
            # What the library keeps of local files it knows by their times alone: it is given no chance to be wrong.
            with tempfile.TemporaryDirectory(prefix="tova-") as scratch:
                rows = self._rows(str(folder), cache_dir=scratch, keep_in_memory=True)
                return self._texts(rows)
        found = find_dataset(self.name, str(self.revision))
        found.check()
        if found.offline:
            datasets.config.HF_HUB_OFFLINE = True
        rows = self._rows(self.name, revision=found.commit or self.revision)
        if found.offline and found.commit is not None:
            # Without the hub the library takes the newest copy there is, whatever revision is asked for.
            kept = [Path(file["filename"]) for file in rows.cache_files]
            if not all(found.commit in file.parts for file in kept):
                raise UsageError(
                    f"dataset.revision={self.revision}: is the commit {found.commit}, which is not on this machine, "
                    f"and the hub cannot be reached; of {self.name} there is {', '.join({f.parent.name for f in kept})}"
                )
        return self._texts(rows)

    def _rows(self, name: str, **more: Any) -> Any:
        import datasets

        try:
            return datasets.load_dataset(name, self.config, split=self.split, **more)
        except Exception as e:  # as many kinds as there are formats of files
            said = _said(e)
            option = f"dataset.name={self.name}: cannot be loaded"
            if "split" in said.lower():
                option = f"dataset.split={self.split}: {self.name} has no such split"
            elif "StopIteration" in said:
                said = "it holds no rows"
            elif "save_to_disk" in said:
                said = "it was saved by save_to_disk; save it by to_parquet"
            elif "BuilderConfig" in said or "onfig name is missing" in said:
                option = f"dataset.config={options.shown(self.config)}: {self.name} has no such configuration"
            raise UsageError(f"{option}: {said}") from e

    def _texts(self, rows: Any) -> list[Document]:
        if self.column not in rows.column_names:
            raise UsageError(
                f"dataset.column={self.column}: {self.name} has no such column, it has {', '.join(rows.column_names)}"
            )
        kinds = {name: _kind(feature) for name, feature in rows.features.items()}
        if kinds[self.column] != "text":
            others = ", ".join(name for name, kind in kinds.items() if kind == "text")
            raise UsageError(
                f"dataset.column={self.column}: holds {kinds[self.column]}, not text; "
                + (f"of text are {others}" if others else "no column holds text")
            )
        wanted = _first(self, range(len(rows)), f"the rows of {self.split}")
        if not wanted:
            raise UsageError(f"dataset.split={self.split}: {self.name} has no rows there")
        texts = rows.select_columns([self.column]).select(wanted)[self.column]
        return [Document(f"{self.split}-{i:04d}", self._text(i, text)) for i, text in enumerate(texts)]

    def _text(self, number: int, text: Any) -> str:
        if not isinstance(text, str) or not text.strip():
            what = "null" if text is None else "blank" if isinstance(text, str) else type(text).__name__
            raise UsageError(f"dataset.column={self.column}: row {number} of {self.name} is {what}, not a text")
        return text.removeprefix("\ufeff")


def _kind(feature: Any) -> str:
    """What a column of the ``datasets`` library holds, in a word or two."""
    if isinstance(feature, dict):
        return "records"
    if type(feature).__name__ == "Value":
        return {"string": "text", "large_string": "text", "string_view": "text", "null": "nothing but null"}.get(
            feature.dtype, f"{feature.dtype}"
        )
    name = type(feature).__name__
    return {"Json": "values of several kinds"}.get(name, "lists" if name in ("List", "LargeList", "Sequence") else name)


def _said(error: BaseException) -> str:
    """The first line of the error that lies at the bottom."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


_HASHES: dict[tuple[Any, ...], list[list[str]]] = {}


def _hashes(key: tuple[Any, ...], files: Iterable[Path], load: Callable[[], list[Document]]) -> list[list[str]]:
    """Name and sha256 of each document, in order; read again when one of the files may have changed."""
    stamp = assets.stamp(files)
    if stamp is not None and (known := _HASHES.get((*key, stamp))):
        return known
    found = [[document.name, document.sha256] for document in load()]
    if stamp is not None:
        _HASHES[(*key, stamp)] = found
    return found


def _clean(text: str) -> str:
    """``text`` without a byte-order mark, with plain line ends, without an old end-of-file mark."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").replace("\x1a", "")


def _from_line(text: str, line: str) -> str:
    """``text`` from the first line that reads ``line``, leading space apart."""
    offset = 0
    for candidate in text.splitlines(keepends=True):
        if candidate.strip() == line:
            return text[offset:].lstrip()
        offset += len(candidate)
    raise UsageError(f"a book does not contain the line {line!r} it should begin with")
