"""Compiled code where nothing can be written: kept elsewhere, or compiled anew, or done by torch; never a traceback."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tova.kernels import compile as compiling

ROOT = Path(compiling.__file__).parents[2]
# A scan, a decoded token and a simulation; then where the scan's compiled form is kept.
WORK = """
import torch
from tova import policies
from tova.replay import Attention, LayerState, replay
from tova.scan import select
from tova.simulation import simulate
from tova.trace import canonical_trace
policy = policies.make("tova", budget=8)
scan = select({name!r}, policy, torch.device("cpu"), torch.float32)
x = torch.randn(1, 2, 24, 8, generator=torch.Generator().manual_seed(1))
state = LayerState.empty(policy, x, x, 1, log=True)
for begin, end in ((0, 20), (20, 24)):
    part = x[:, :, begin:end]
    replay(part, part, part, state, policy, Attention(0.5), scan=scan)
mass = simulate(policy, canonical_trace(tokens=64)).retained_mass
print(scan.name, int(state.log.view.clamp_max(99).sum()), round(mass, 9))
if scan.name == "cpu":
    from tova.scan import cpu
    print(cpu._scan_row.stats.cache_path, sum(cpu._scan_row.stats.cache_hits.values()))
"""

# One small function of theirs, where it is kept, and how often it was found there.
LITTLE = """
from tova.kernels import numba_math
rest = numba_math.remainder
print("cpu", rest(-5.5, 2.0), rest(7.25, -2.0), rest.stats.cache_path, sum(rest.stats.cache_hits.values()))
"""


def run(code: str = LITTLE, name: str = "auto", tree: Path = ROOT, before: str = "", **environment: str):
    """``code`` in a process of its own; words of its output."""
    usual = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "PYTHONPATH")}
    found = subprocess.run(
        [sys.executable, "-c", before + code.replace("{name!r}", repr(name))], capture_output=True, text=True,
        env={**usual, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **environment}, cwd="/",
    )  # fmt: skip
    assert "Traceback" not in found.stderr, found.stderr
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return run()[1:3]


@pytest.fixture(scope="module")
def worked() -> list[str]:
    return run(WORK)[1:3]


# What numba says where it finds no place: root may write anywhere, so that a mode alone shows nothing.
NO_PLACE = """
from numba.core import caching
for kind in list(vars(caching).values()):
    if isinstance(kind, type) and issubclass(kind, caching._CacheLocator) and "UserProvided" not in kind.__name__:
        kind.from_function = classmethod(lambda cls, *_: None)
"""


def test_a_folder_of_ones_own_is_used(tmp_path, expected) -> None:
    first = run(before=NO_PLACE, TMPDIR=str(tmp_path))
    assert first[0] == "cpu"
    assert first[1:3] == expected
    (folder,) = tmp_path.glob("tova-numba-*")
    assert Path(first[3]).parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert first[4] == "0"
    again = run(before=NO_PLACE, TMPDIR=str(tmp_path))
    assert again[1:3] == expected
    assert again[4] != "0", "compiled a second time"


@pytest.mark.skipif(os.name != "posix", reason="owners and modes")
@pytest.mark.parametrize("how", ["others may write", "a link", "a file", "somebody else's"])
def test_anybody_elses_folder_is_not(tmp_path, expected, how: str) -> None:
    folder = tmp_path / f"tova-numba-{os.getuid()}"
    if how == "others may write":
        folder.mkdir()
        folder.chmod(0o777)
    elif how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "a file":
        folder.touch()
    else:
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, 12345)
    found = run(before=NO_PLACE, TMPDIR=str(tmp_path))
    assert found[:3] == ["cpu", *expected]
    assert found[3] == "None"
    assert not list(tmp_path.rglob("*.nb[ic]"))


def test_a_folder_the_user_names_is_honoured(tmp_path, expected) -> None:
    found = run(NUMBA_CACHE_DIR=str(tmp_path))
    assert found[1:3] == expected
    assert Path(found[3]).parent == tmp_path
    assert list(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("how", ["missing", "broken"])
def test_without_numba_torch_does_it(tmp_path, worked, how: str) -> None:
    broken = "import sys; sys.modules['numba'] = None\n"
    if how == "broken":  # found, and raises something of its own when it is imported
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "__init__.py").write_text("raise SystemError('initialization failed')\n")
        broken = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    found = run(WORK, before=broken)
    assert found[0] == "reference"
    assert found[1:] == worked
    says = run(
        "from tova import UsageError\ntry:\n    " + "\n    ".join(WORK.strip().splitlines()[:8])
        + "\nexcept UsageError as e:\n    print(e)", name="cpu", before=broken,
    )  # fmt: skip
    assert " ".join(says).startswith("scan=cpu needs numba")


def test_a_cache_that_breaks_later_costs_a_compilation(tmp_path, expected) -> None:
    """Its files are cut short, made of something else, or are the folder's only ones that cannot be written."""
    assert run(NUMBA_CACHE_DIR=str(tmp_path))[1:3] == expected
    for content in (b"", b"nonsense", None):
        for path in tmp_path.rglob("*.nb[ic]"):
            path.write_bytes(path.read_bytes()[:50] if content is None else content)
        assert run(NUMBA_CACHE_DIR=str(tmp_path))[1:3] == expected
    removed = f"""
import shutil, tova.kernels.numba_math
shutil.rmtree({str(tmp_path)!r}); open({str(tmp_path)!r}, "w").close()
"""
    assert run(before=removed, NUMBA_CACHE_DIR=str(tmp_path))[1:3] == expected


OTHER = "from tova.kernels import numba_math; print(numba_math.maximum(1.0, 2.0))"


def test_an_entry_under_anothers_name_is_not_taken(tmp_path, expected) -> None:
    """As two processes, or a disk that fills up between index and code, may leave it."""
    run(NUMBA_CACHE_DIR=str(tmp_path))
    run(OTHER, NUMBA_CACHE_DIR=str(tmp_path))
    (rest,) = tmp_path.rglob("numba_math.remainder-*.nbc")
    (other,) = tmp_path.rglob("numba_math.maximum-*.nbc")
    shutil.copy(other, rest)
    assert run(NUMBA_CACHE_DIR=str(tmp_path))[1:3] == expected


def test_two_processes_at_once(tmp_path, expected) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LITTLE]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, _ = process.communicate()
        assert process.returncode == 0
        assert out.split()[1:3] == expected
    found = run(NUMBA_CACHE_DIR=str(tmp_path))
    assert found[1:3] == expected


def _mount(*arguments: str) -> bool:
    return os.name == "posix" and os.getuid() == 0 and subprocess.run(arguments, capture_output=True).returncode == 0


def test_a_read_only_installation_and_no_home(worked, expected) -> None:
    with tempfile.TemporaryDirectory() as place:
        if not _mount("mount", "-t", "tmpfs", "tmpfs", place):
            pytest.skip("cannot mount here")
        try:
            shutil.copytree(ROOT / "tova", f"{place}/tova", ignore=shutil.ignore_patterns("__pycache__"))
            assert _mount("mount", "-o", "remount,ro", place)
            found = run(WORK, tree=Path(place), HOME="/proc/nohome", XDG_CACHE_HOME="/proc/nohome")
            assert found[:3] == ["cpu", *worked]
            assert f"tova-numba-{os.getuid()}" in found[3]
            found = run(tree=Path(place), HOME="/proc/nohome", XDG_CACHE_HOME="/proc/nohome", TMPDIR="/proc/none",
                        before="import tempfile; tempfile.gettempdir = lambda: '/proc/none'\n")  # fmt: skip
            assert found[:4] == ["cpu", *expected, "None"]
        finally:
            subprocess.run(["umount", place])


def test_a_full_disk(expected) -> None:
    with tempfile.TemporaryDirectory() as place:
        if not _mount("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", place):
            pytest.skip("cannot mount here")
        try:
            for _ in range(2):
                assert run(NUMBA_CACHE_DIR=place)[1:3] == expected
        finally:
            subprocess.run(["umount", place])
