"""How a command's cells are run, and the cells themselves, from a composed configuration or a stored one."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments import options, planning
from experiments.cells import Cell
from tova.errors import UsageError

VOLATILE = ("results_dir", "tracking", "launcher", "retry", "sweep")
"""Options that say how and where cells are run, and nothing about what comes out."""


@dataclass(frozen=True)
class Settings:
    """How a command's cells are run; from the configuration, checked.

    Attributes:
        root: where results go.
        mode, project: of W&B.
        name: the sweep's.
        retry: run the sweep's failed cells and no others.
        launcher: ``local``, or what other processes are started by, with its options.
        changed: overrides on the command line that change an experiment's cells.
        command: what to type to go on.
    """

    root: Path
    mode: str
    project: str
    name: str
    retry: bool
    launcher: dict[str, Any]
    changed: tuple[str, ...] = ()
    command: str = ""


def settings(config: DictConfig, overrides: Sequence[str] = (), typed: Sequence[str] = ()) -> Settings:
    """Those of a composed configuration.

    Raises:
        UsageError: an option is not what it must be.
    """
    retry = config.get("retry")
    if retry is not None:
        options.one_of("retry", retry, ["failed"])
    launcher = OmegaConf.to_container(config.launcher, resolve=True)
    if not isinstance(launcher, dict):
        raise UsageError(f"launcher={options.shown(launcher)}: must be local, joblib or slurm")
    asked = any(word.lstrip("+~").startswith("experiment=") for word in overrides)
    changed = [
        word
        for word in overrides
        if not word.lstrip("+~").startswith(("experiment=", *VOLATILE)) and not word.startswith("task.together=")
    ]
    return Settings(
        root=options.results_dir(config.results_dir),
        mode=options.tracking_mode(config.tracking.mode),
        project=options.tracking_project(config.tracking.project),
        name=options.sweep_name(config.sweep.name),
        retry=retry == "failed",
        launcher={str(k): v for k, v in launcher.items()},
        changed=tuple(changed) if asked else (),
        command=f"{program('python')} -m experiments.run {shlex.join(typed[1:])}",
    )


def planned(config: DictConfig) -> Cell:
    """The cell of a composed configuration, without the options that say how it is run."""
    content = {str(k): v for k, v in config.items_ex(resolve=False) if k not in ("hydra", "launcher")}
    kept = OmegaConf.create(content)
    assert isinstance(kept, DictConfig)
    cell = planning.plan(kept)
    return dataclasses.replace(cell, config={k: v for k, v in cell.config.items() if k not in VOLATILE})


def stored(config: dict[str, Any]) -> Cell:
    """The cell of a configuration as :func:`planned` leaves it, from a file."""
    whole = OmegaConf.create({**planning._default(), **config})
    assert isinstance(whole, DictConfig)
    return planned(whole)


def program(name: str) -> str:
    """A program of this environment, as it is typed here."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        return name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
