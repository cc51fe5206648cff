"""The Hugging Face hub: is it there, and which commit is meant? Asked with a timeout of seconds.

A branch such as ``main`` moves; results belong to a commit. So a revision is resolved to its commit before anything is
addressed or loaded: by the hub, or without a network by what was found last time, or by the hub's own cache.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from experiments import assets
from experiments.files import write_atomically
from tova.errors import UsageError

_TIMEOUT = 5
_ASK_AGAIN = 60
"""Seconds after which a hub that did not answer is asked again."""


@dataclass(frozen=True)
class Found:
    """What is known of a name on the hub.

    Attributes:
        commit: which its revision is; None if that cannot be known now.
        offline: whether only a copy on this machine can be had.
        error: why it cannot be had at all.
    """

    commit: str | None
    offline: bool
    error: UsageError | None = None

    def check(self) -> None:
        """Raise if it cannot be had."""
        if self.error is not None:
            raise self.error


def find_model(name: str, revision: str) -> Found:
    """A model's commit, and whether the hub answers.

    Raises:
        UsageError: the hub refuses.
    """
    return _find("model", name, revision)


def find_dataset(name: str, revision: str) -> Found:
    """As :func:`find_model`, for a dataset."""
    return _find("dataset", name, revision)


def check_id(option: str, name: str, revision: Any, instead: str) -> None:
    """Raise unless ``name`` may be a hub id and ``revision`` one of its revisions."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if "://" in name:
        raise UsageError(f"{option}={name}: give the id alone, as org/name, or a folder as {instead}/path/to/it")
    try:
        validate_repo_id(name)
    except HFValidationError as e:
        raise UsageError(f"{option}={name}: neither a folder here nor a hub id ({e})") from e
    if isinstance(revision, bool) or not isinstance(revision, str | int) or not str(revision):
        group = option.partition(".")[0]
        raise UsageError(f'{group}.revision={revision}: must be a branch, a tag or a commit; quote a number, "1e5"')


_FOUND: dict[tuple[str, str, str], tuple[Found, float]] = {}


def _find(kind: str, name: str, revision: str) -> Found:
    """Asked once a process, so that a branch does not move under a sweep."""
    key = (kind, name, revision)
    if key in _FOUND:
        found, when = _FOUND[key]
        if not found.offline or time.monotonic() - when < _ASK_AGAIN:
            return found
    found = _ask(kind, name, revision)
    _FOUND[key] = (found, time.monotonic())
    return found


def _ask(kind: str, name: str, revision: str) -> Found:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    option = f"{kind}.name={name}"
    api = huggingface_hub.HfApi()
    info: Callable[..., Any] = api.model_info if kind == "model" else api.dataset_info
    try:
        commit = info(name, revision=revision, timeout=_TIMEOUT).sha
        _remember(kind, name, revision, commit)
        return Found(commit, offline=False)
    except HfHubHTTPError as e:
        status = getattr(e.response, "status_code", 0)
        if status != 429 and status < 500:
            raise UsageError(
                f"{option}: the hub refuses it (HTTP {status}); check the name and revision={revision}, and whether "
                "it asks you to accept terms and log in"
            ) from e
        why = f"HTTP {status}"
    except Exception as e:  # whatever the HTTP library of the day raises when there is no network
        why = type(e).__name__
    candidates = list(dict.fromkeys(_candidates(kind, name, revision)))
    for commit in candidates:
        if _is_here(kind, name, commit):
            return Found(commit, offline=True)
    instead = "model.name" if kind == "model" else "dataset=text dataset.path"
    what = "the model's folder" if kind == "model" else "its text files"
    error = UsageError(
        f"{option} is not on this machine and the hub cannot be reached ({why}); copy {what} here and pass "
        f"{instead}=/path/to/it"
    )
    return Found(candidates[0] if candidates else None, offline=True, error=error)


def _candidates(kind: str, name: str, revision: str) -> Iterator[str]:
    """Commits that ``revision`` may be, the most trusted first, without asking the hub."""
    import huggingface_hub

    if re.fullmatch("[0-9a-f]{40}", revision):
        yield revision
        return
    with contextlib.suppress(OSError, UsageError):
        yield _record(kind, name, revision).read_text()
    for file in ("config.json", "README.md"):
        there = huggingface_hub.try_to_load_from_cache(name, file, revision=revision, repo_type=kind)
        if isinstance(there, str):
            yield Path(there).parent.name
    if kind == "dataset" and revision == "main":
        kept = {folder.name for folder in _prepared(name)}
        if len(kept) == 1:
            yield kept.pop()


def _is_here(kind: str, name: str, commit: str) -> bool:
    import huggingface_hub

    if kind == "dataset":
        return any(folder.name == commit for folder in _prepared(name))
    return isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=commit), str)


def _prepared(name: str) -> list[Path]:
    """Folders where the ``datasets`` library keeps a dataset, each called after its commit."""
    import datasets
    from datasets.naming import camelcase_to_snakecase

    owner, _, last = name.rpartition("/")
    folder = Path(datasets.config.HF_DATASETS_CACHE, "___".join([owner, camelcase_to_snakecase(last)]).lstrip("_"))
    return [path for path in folder.glob("*/*/*") if re.fullmatch("[0-9a-f]{40}", path.name) and path.is_dir()]


def _remember(kind: str, name: str, revision: str, commit: str) -> None:
    with contextlib.suppress(OSError, UsageError):
        path = _record(kind, name, revision)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, commit)


def _record(kind: str, name: str, revision: str) -> Path:
    return assets.cache_dir() / "commits" / quote(f"{kind} {name} {revision}", safe="")
