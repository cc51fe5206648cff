"""The runner: in this process, or in processes of its own that are started, watched and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from experiments import run as entry

ROOT = Path(__file__).parents[2]

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
PAGE = TEXT * 12
SMALL = ("model=random_llama", "dataset=text", "dataset.path=texts", "tracking.mode=disabled")
TINY = [*SMALL, "dataset.tokens=120"]


def texts(place: Path, documents: int, characters: int) -> None:
    """So many texts, all different, in ``place/texts``."""
    (place / "texts").mkdir(exist_ok=True)
    for i in range(documents):
        whole = (TEXT * (characters // len(TEXT) + 2))[i * 7 :]
        (place / "texts" / f"{i:02d}.txt").write_text(whole[:characters])


def command(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``python -m experiments.run``."""
    monkeypatch.setattr(sys, "argv", ["experiments.run", *words])
    code = 0
    try:
        entry.main()
    except SystemExit as e:
        code = int(e.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def start(place: Path, *words: str, before=None, **environment: str) -> subprocess.Popen[str]:
    """``python -m experiments.run`` in ``place``; ``before`` is called in the new process first."""
    given = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        **environment,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.run", *words],
        cwd=place, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=before,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def until(condition, seconds: float = 60) -> None:
    """Wait until ``condition()`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)
