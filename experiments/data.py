"""What is read: real books from a package, any text file, PG-19.

Each class is named by ``_target_`` in a file of ``conf/dataset``. Documents are cut to their first ``tokens`` tokens.
A tokenizer that puts a BOS first does so here too; it is context and is never predicted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments import assets
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
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UsageError(f"dataset.{name} must be an integer of at least {least}, or null for all, got {value!r}")


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
        for title in self.titles:
            if title not in _BOOKS:
                raise UsageError(f"dataset.titles: there is no {title!r}; there are {', '.join(_BOOKS)}")

    def identity(self) -> dict[str, Any]:
        hashes = {Path(member).stem: sha256 for member, sha256 in assets.CANTERBURY.members.items()}
        titles = list(self.titles)[: self.documents]
        return {"books": {title: hashes[title] for title in titles}, "tokens": self.tokens}

    def load(self) -> list[Document]:
        paths = assets.fetch(assets.CANTERBURY)
        return [
            Document(title, _from_line(_clean(paths[f"{title}.txt"].read_bytes()), _BOOKS[title]))
            for title in list(self.titles)[: self.documents]
        ]


@dataclass(frozen=True)
class TextFiles:
    """Plain text files, UTF-8: one file, or every ``*.txt`` of a folder in the order of their names."""

    path: str
    documents: int | None = None
    tokens: int | None = None
    label: str = ""

    def __post_init__(self) -> None:
        _check_counts(self)
        if not self.label:
            object.__setattr__(self, "label", Path(self.path).stem)

    def identity(self) -> dict[str, Any]:
        return {"text": {d.name: d.sha256 for d in self.load()}, "tokens": self.tokens}

    def load(self) -> list[Document]:
        path = Path(self.path).expanduser()
        if not path.exists():
            raise UsageError(f"dataset.path={self.path}: there is no such file or folder")
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"dataset.path={self.path}: the folder holds no *.txt file")
        try:
            return [Document(f.stem, _clean(f.read_bytes())) for f in files[: self.documents]]
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"dataset.path={self.path}: not readable as UTF-8 text ({e})") from e


@dataclass(frozen=True)
class HubDataset:
    """A text column of a dataset on the hub (or of a folder of parquet files), by the ``datasets`` library."""

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
        if not self.label:
            object.__setattr__(self, "label", Path(self.name).name)

    def identity(self) -> dict[str, Any]:
        return {
            "hub": self.name,
            "config": self.config,
            "revision": self.revision,
            "split": self.split,
            "column": self.column,
            "documents": self.documents,
            "tokens": self.tokens,
        }

    def load(self) -> list[Document]:
        from experiments.hub import require_dataset

        local = Path(self.name).expanduser().is_dir()
        offline = not local and require_dataset(self.name, self.revision)
        import datasets

        datasets.utils.logging.disable_progress_bar()
        if offline:
            datasets.config.HF_HUB_OFFLINE = True
        try:
            revision = None if local else self.revision
            rows = datasets.load_dataset(self.name, self.config, split=self.split, revision=revision)
        except Exception as e:
            raise UsageError(f"dataset.name={self.name}: cannot be loaded: {str(e).splitlines()[0]}") from e
        if self.column not in rows.column_names:
            raise UsageError(
                f"dataset.column={self.column}: {self.name} has no such column, it has {', '.join(rows.column_names)}"
            )
        if self.documents is not None:
            rows = rows.select(range(min(self.documents, len(rows))))
        return [Document(f"{self.split}-{i:04d}", row[self.column]) for i, row in enumerate(rows)]


def _clean(data: bytes) -> str:
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n").replace("\x1a", "")


def _from_line(text: str, line: str) -> str:
    """``text`` from the first line that reads ``line``, leading space apart."""
    offset = 0
    for candidate in text.splitlines(keepends=True):
        if candidate.strip() == line:
            return text[offset:].lstrip()
        offset += len(candidate)
    raise UsageError(f"a book does not contain the line {line!r} it should begin with")
