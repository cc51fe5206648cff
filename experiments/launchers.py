"""Workers elsewhere: processes of this machine (joblib) or jobs of a cluster (SLURM), watched from here.

A sweep's folder says all there is to know, so a worker is told no more than where it is and which share is its own.
Workers share cells out among themselves by claims; who starts them only watches, and says what became of those that
ended otherwise than by finishing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments import claims, options, schedule
from experiments.cells import Cell
from experiments.files import write_atomically
from experiments.progress import Progress
from experiments.runner import Outcome, Runner, headline
from experiments.settings import Settings, stored
from experiments.store import DONE, FAILED, PENDING, CellFolder, Sweep
from experiments.tracking import Tracking
from tova.errors import UsageError

POLL = 1.0


@dataclass(frozen=True)
class Worker:
    """One worker, as it is sent to another process or machine.

    Args:
        root, sweep: where results are, absolute, and which sweep.
        number: of its share.
    """

    root: str
    sweep: str
    number: int

    def __call__(self) -> int:
        return work(Path(self.root), self.sweep, self.number)

    def checkpoint(self) -> Any:
        """A cluster's job that is queued again begins like a new one: what is stored is skipped."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def work(root: Path, sweep_id: str, number: int) -> int:
    """A worker's part: its share of a sweep's cells first, then whatever nobody has begun.

    Returns:
        How many cells this process, or others meanwhile, brought to an end.
    """
    sweep = Sweep(root, sweep_id)
    orders = json.loads((sweep.path / "workers.json").read_text())
    os.environ[claims.CREW] = orders["crew"]
    if (cards := orders["gpus_here"]) > 1 or orders["threads"] is not None:
        import torch

        if cards > 1:
            torch.cuda.set_device(number % cards)
        if orders["threads"] is not None:
            torch.set_num_threads(orders["threads"])
    entries = {entry["id"]: entry for entry in sweep.content()["cells"]}
    share = orders["shares"][number]
    cells = [_same_as(i, entries[i]) for i in [*share, *(i for i in entries if i not in set(share))]]
    log = sweep.path / "logs" / f"worker-{number}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as lines, Progress(len(cells), lines) as progress:
        tracking = Tracking(orders["mode"], orders["project"], root, sweep.id, sweep.path / "tracked", progress.say)
        names = {i: entry["name"] for i, entry in entries.items()}
        return len(Runner(root, cells, names, progress, tracking).run())


def _same_as(cell_id: str, entry: dict[str, Any]) -> Cell:
    """The cell of a sweep's list, if it is here what it was where the sweep was begun."""
    cell = stored(entry["config"])
    if cell.id != cell_id:
        raise UsageError(
            f"{entry['name']}: its code, model or data are not the same here as where the sweep was begun; start it "
            "again"
        )
    return cell


class Crew(Protocol):
    """Workers that were started."""

    def over(self) -> bool:
        """Whether all have ended."""
        ...

    def state(self) -> str:
        """What they are at, in a line; empty if there is nothing to say."""
        ...

    def end_of(self, owner: claims.Owner) -> str:
        """How the worker that held a claim came to its end."""
        ...

    def ends(self) -> str:
        """How they ended, in a line, when cells are left that nobody has begun."""
        ...

    def stop(self) -> str:
        """The user wants no more: what that means here."""
        ...


def run(
    cells: Sequence[Cell], names: dict[str, str], how: Settings, sweep: Sweep, hydra: Any = None
) -> dict[str, Outcome]:
    """Have the cells measured by workers; returns when all is over.

    Args:
        hydra: a launcher of Hydra's that is to start them, instead of what ``how`` says.

    Raises:
        UsageError: workers cannot be started.
    """
    todo = [cell for cell in cells if not CellFolder(how.root, cell.id).done]
    if not todo:
        return watch(cells, names, how.root, None)
    if hydra is not None:
        return watch(cells, names, how.root, _hydra(todo, how, sweep, hydra))
    starters = {"joblib": _joblib, "slurm": _slurm}
    start = starters[options.one_of("launcher", how.launcher.get("name"), starters)]
    return watch(cells, names, how.root, start(todo, how, sweep))


def watch(
    cells: Sequence[Cell], names: dict[str, str], root: Path, crew: Crew | None, every: float = POLL
) -> dict[str, Outcome]:
    """Say what becomes of cells until the crew is gone; the outcome of those that came to an end."""
    outcomes: dict[str, Outcome] = {}
    said = ""
    with Progress(len(cells)) as progress:
        try:
            while True:
                last = crew is None or crew.over()
                for cell in cells:
                    if cell.id not in outcomes and (found := _outcome(root, cell.id)) is not None:
                        outcomes[cell.id], line = found
                        progress.finish(names[cell.id], line, worked=False)
                if last:
                    break
                if crew is not None and (state := crew.state()) != said:
                    said = state
                    progress.say(state)
                time.sleep(every)
        except KeyboardInterrupt:
            if crew is not None:
                progress.say(crew.stop())
            raise
        for cell in cells:
            if cell.id not in outcomes and crew is not None:
                _lost(cell, names, root, crew, progress)
        if crew is not None and any(CellFolder(root, cell.id).status == PENDING for cell in cells):
            progress.say(crew.ends())
    return outcomes


def _outcome(root: Path, cell_id: str) -> tuple[Outcome, str] | None:
    folder = CellFolder(root, cell_id)
    if folder.done:
        return Outcome(DONE), headline(folder.summary())
    if folder.failed and "lost" not in (failure := folder.failure()):
        return Outcome(FAILED), f"failed: {failure['reason']}"
    return None


def _lost(cell: Cell, names: dict[str, str], root: Path, crew: Crew, progress: Progress) -> None:
    """Write down what became of a cell whose worker did not finish it; the same command tries it again."""
    folder = CellFolder(root, cell.id)
    owner = claims.holder(folder.path)
    if owner is None and not (folder.path / "config.yaml").exists():
        return  # nobody had begun it
    lost = owner or claims.Owner("", 0, None, None, False)
    reason = f"broken off: {crew.end_of(owner) if owner is not None else crew.ends()}"
    folder.fail(reason, "", {}, lost=lost)
    progress.finish(names[cell.id], f"failed: {reason}", worked=False)


def _orders(
    cells: Sequence[Cell], how: Settings, sweep: Sweep, workers: int, threads: int | None, gpus: int
) -> list[Worker]:
    shares = schedule.shares(cells, workers, how.root)
    orders = {
        "crew": uuid.uuid4().hex,
        "shares": [[cell.id for cell in share] for share in shares],
        "mode": how.mode,
        "project": how.project,
        "threads": threads,
        "gpus_here": gpus,
    }
    write_atomically(sweep.path / "workers.json", json.dumps(orders, indent=1) + "\n")
    return [Worker(str(how.root.resolve()), sweep.id, number) for number in range(len(shares))]


# -- this machine --------------------------------------------------------------------------------------------


class _Processes:
    """Workers in processes of this machine."""

    def __init__(self, workers: list[Worker], logs: Path) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        self._logs = logs
        # A pool each: one that is killed takes no other with it.
        self._pools = [ProcessPoolExecutor(max_workers=1) for _ in workers]
        self._work = [pool.submit(worker) for pool, worker in zip(self._pools, workers, strict=True)]

    def over(self) -> bool:
        if not all(work.done() for work in self._work):
            return False
        for pool in self._pools:
            pool.shutdown(wait=False)
        for error in self._errors():
            if isinstance(error, UsageError):
                raise error
        return True

    def _errors(self) -> list[BaseException]:
        return [error for work in self._work if work.done() and (error := work.exception()) is not None]

    def state(self) -> str:
        at_it = sum(not work.done() for work in self._work)
        return f"{at_it} workers at it; their logs: {self._logs}" if at_it else "the workers have ended"

    def end_of(self, owner: claims.Owner) -> str:
        return f"{owner} was killed, for want of memory perhaps; its log is in {self._logs}"

    def ends(self) -> str:
        said = [f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}" for e in self._errors()]
        why = f" ({said[0]})" if said else ""
        return f"the workers ended before all was done{why}; their logs: {self._logs}"

    def stop(self) -> str:
        for pool in self._pools:
            with contextlib.suppress(Exception):
                pool.shutdown(wait=False, kill_workers=True)
        return "workers are stopped"


def _joblib(cells: Sequence[Cell], how: Settings, sweep: Sweep) -> Crew:
    _require("joblib", "launcher=joblib", "parallel")
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = torch.cuda.device_count() if any(cell.device.startswith("cuda") for cell in cells) else 0
    wanted = how.launcher.get("workers")
    workers = gpus or max(1, cores // 2) if wanted is None else options.integer("launcher.workers", wanted, 1)
    threads = how.launcher.get("threads")
    threads = max(1, cores // workers) if threads is None else options.integer("launcher.threads", threads, 1)
    return _Processes(_orders(cells, how, sweep, workers, threads, gpus), sweep.path / "logs")


# -- any launcher of Hydra's -----------------------------------------------------------------------------------


class _Launched:
    """Workers that a launcher of Hydra's has started; it returns when they have ended."""

    def __init__(self, launch: Any, logs: Path) -> None:
        self._logs = logs
        self._error: BaseException | None = None

        def work() -> None:
            try:
                launch()
            except BaseException as e:
                self._error = e

        self._thread = threading.Thread(target=work, name="launcher", daemon=True)
        self._thread.start()

    def over(self) -> bool:
        return not self._thread.is_alive()

    def state(self) -> str:
        return f"workers' logs: {self._logs}"

    def ends(self) -> str:
        said = "" if self._error is None else f" ({type(self._error).__name__}: {self._error})"
        return f"the workers ended before all was done{said}; their logs: {self._logs}"

    def end_of(self, owner: claims.Owner) -> str:
        said = "" if self._error is None else f" ({type(self._error).__name__}: {self._error})"
        return f"{owner} did not finish{said}; its log is in {self._logs}"

    def stop(self) -> str:
        return "workers that were started elsewhere may go on"


def _hydra(cells: Sequence[Cell], how: Settings, sweep: Sweep, launcher: Any) -> Crew:
    workers = _orders(cells, how, sweep, how.launcher.get("workers") or min(8, len(cells)), None, 0)
    given = [[f"results_dir='{w.root}'", f"sweep.id='{w.sweep}'", f"sweep.worker={w.number}"] for w in workers]
    return _Launched(lambda: launcher.launch(given, initial_job_idx=0), sweep.path / "logs")


# -- SLURM ---------------------------------------------------------------------------------------------------


class _Jobs:
    """Jobs of a SLURM array."""

    def __init__(self, array: str, ids: list[str], folder: Path) -> None:
        self._array, self._ids, self._folder = array, ids, folder
        self._asked = 0.0
        self._states: dict[str, str] = dict.fromkeys(ids, "PENDING")
        self._fails = 0

    def _look(self) -> None:
        if time.monotonic() - self._asked < 2:
            return
        self._asked = time.monotonic()
        listed = _ask("squeue", "-h", "-r", "-j", self._array, "-o", "%i|%T|%R")
        if listed is None:  # none of them is known any more, or the controller does not answer
            self._fails += 1
            if self._fails < 3 and _ask("sinfo", "-h") is None:
                return
            listed = ""
        self._fails = 0
        self._states = {}
        for line in listed.splitlines():
            job, state, why = line.split("|", 2)
            self._states[job] = f"{state} {why}" if state == "PENDING" and why != "(None)" else state

    def over(self) -> bool:
        self._look()
        return not any(job in self._states for job in self._ids)

    def state(self) -> str:
        self._look()
        counts: dict[str, int] = {}
        for job in self._ids:
            state = self._states.get(job, "ended").lower()
            counts[state] = counts.get(state, 0) + 1
        return f"job {self._array}: " + ", ".join(f"{n} {state}" for state, n in counts.items())

    def end_of(self, owner: claims.Owner) -> str:
        log = self._folder / f"{owner.job}_0_log.err"
        what = f"job {owner.job} on {owner.host} ended"
        found = _ask("sacct", "-n", "-P", "-X", "-j", owner.job or "", "-o", "State,ExitCode")
        if found and found.strip():
            state, _, code = found.strip().splitlines()[-1].partition("|")
            what = f"job {owner.job} on {owner.host} ended as {state} ({code})"
        return f"{what}{_why(log)}; its log is {log}"

    def ends(self) -> str:
        found = _ask("sacct", "-n", "-P", "-X", "-j", self._array, "-o", "JobID,State,ExitCode") or ""
        states = [line.split("|") for line in found.splitlines() if "COMPLETED" not in line]
        said = [f"{job} {state} ({code}){_why(self._folder / f'{job}_0_log.err')}" for job, state, code in states]
        return f"jobs ended before all was done: {', '.join(said) or self._array}; their logs: {self._folder}"

    def stop(self) -> str:
        return (
            f"job {self._array} goes on without this terminal; to stop it: scancel {self._array}; the same command "
            "looks on, and takes part"
        )


def _why(log: Path) -> str:
    """What a job's log says of its end, where SLURM's accounting often says no more than that it failed."""
    text = _last_of(log)
    if re.search(r"memory limit|oom.kill|out of memory", text, re.IGNORECASE):
        return ", over its memory (launcher.memory_gb)"
    if re.search(r"timed-out|TIME LIMIT", text):
        return ", out of time (launcher.minutes, launcher.requeues)"
    return ""


def _last_of(log: Path) -> str:
    """The end of a log; empty if there is none."""
    try:
        return log.read_bytes()[-4000:].decode(errors="replace")
    except OSError:
        return ""


def _ask(*command: str) -> str | None:
    """What a program of SLURM says; None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _slurm(cells: Sequence[Cell], how: Settings, sweep: Sweep) -> Crew:
    _require("submitit", "launcher=slurm", "cluster")
    import shutil

    import submitit

    if shutil.which("sbatch") is None:
        raise UsageError(
            "launcher=slurm: there is no sbatch here; run it where jobs are submitted, or use launcher=local"
        )
    given = how.launcher
    jobs = given.get("jobs")
    jobs = min(16, (len(cells) + 1) // 2) if jobs is None else options.integer("launcher.jobs", jobs, 1, 10_000)
    workers = _orders(cells, how, sweep, jobs, None, 0)
    folder = (sweep.path / "jobs").resolve()
    executor = submitit.AutoExecutor(
        folder=folder,
        cluster="slurm",
        slurm_max_num_timeout=options.integer("launcher.requeues", given.get("requeues"), 0, 1000),
    )
    parameters = {
        "name": f"tova-{sweep.id}"[:60],
        "timeout_min": options.integer("launcher.minutes", given.get("minutes"), 1),
        "cpus_per_task": options.integer("launcher.cpus", given.get("cpus"), 1, 4096),
        "mem_gb": given.get("memory_gb"),
        "gpus_per_node": given.get("gpus"),
        "slurm_partition": given.get("partition"),
        "slurm_account": given.get("account"),
        "slurm_qos": given.get("qos"),
        "slurm_array_parallelism": options.integer("launcher.at_once", given.get("at_once"), 1, 10_000),
        "slurm_setup": list(given.get("setup") or []) or None,
        "slurm_additional_parameters": dict(given.get("more") or {}) or None,
    }
    executor.update_parameters(**{k: v for k, v in parameters.items() if v is not None})
    try:
        with executor.batch():
            started = [executor.submit(worker) for worker in workers]
        ids = [job.job_id for job in started]
    except Exception as e:
        lines = [line for line in str(getattr(e, "stderr", "") or e).splitlines() if line.strip()]
        raise UsageError(f"launcher=slurm: sbatch refused ({lines[-1].strip() if lines else type(e).__name__})") from e
    return _Jobs(ids[0].split("_")[0], ids, sweep.path / "jobs")


def _require(package: str, what: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{what}: needs {package}, which is not installed; pip install -e '.[{extra}]'")
