"""Hydra's sweeper for cells: check all before any runs, run each once, report at the end."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from experiments import session
from experiments.cells import Cell
from experiments.planning import plan
from experiments.progress import Progress
from experiments.store import CellFolder, Sweep
from experiments.tracking import check_mode
from tova.errors import UsageError


class CellSweeper(Sweeper):
    """A product of choices, as Hydra's own, with these differences:

    - every cell is composed and checked before the first one runs, so one bad value costs nothing;
    - choices that come to the same cell (``full`` at any budget) run once;
    - nothing but results is written;
    - when all are through, the table, the figure and the folders are reported, whatever the launcher.
    """

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self._params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._config = config
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        loader = self._context.config_loader
        choices = [f"{key}={values}" for key, values in self._params.items()]
        parsed = OverridesParser.create(config_loader=loader).parse_overrides([*choices, *arguments])
        jobs = BasicSweeper.split_arguments(parsed, None)[0]
        cells: dict[str, Cell] = {}
        overrides: dict[str, list[str]] = {}
        for job in jobs:
            cell = plan(_without_hydra(loader.load_sweep_config(self._config, list(job))))
            cells.setdefault(cell.id, cell)
            overrides.setdefault(cell.id, list(job))
        first = next(iter(cells.values()))
        check_mode(first.config["tracking"]["mode"])
        root = Path(first.config["results_dir"])
        for cell_id in cells:
            CellFolder(root, cell_id).check()
        sweep = Sweep(root, f"{self._config.sweep.name}-{_hash(sorted(cells))}")
        sweep.begin(cells)
        with Progress(len(cells)) as progress, session.use(progress, cells.values()):
            jobs = [[*overrides[cell_id], f"sweep.id={sweep.id}"] for cell_id in cells]
            returns = self._launcher.launch(jobs, initial_job_idx=0)
        _raise_failures(returns, [cell.title for cell in cells.values()])
        session.report(sweep)
        return returns


def _without_hydra(config: DictConfig) -> DictConfig:
    with open_dict(config):
        config.pop("hydra", None)
    return config


def _hash(ids: list[str]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]


def _raise_failures(returns: Sequence[JobReturn], titles: list[str]) -> None:
    failures = []
    for title, done in zip(titles, returns, strict=True):
        if isinstance(done.return_value, session.Failed):
            if isinstance(done.return_value.error, UsageError):
                raise done.return_value.error
            failures.append((title, done.return_value.error))
    if failures:
        for title, error in failures:
            trace = "".join(traceback.format_exception(error))
            print(f"{title} failed:\n{trace}")
        raise session.CellsFailedError(
            f"{len(failures)} of {len(titles)} cells failed: {', '.join(t for t, _ in failures)}"
        )


def register() -> None:
    """Make ``hydra/sweeper=cells`` known."""
    plugins = Plugins.instance()
    plugins.register(CellSweeper)
    # Hydra instantiates plugins of a package called hydra_plugins only; one more top-level folder for one class would
    # be in every reader's way.
    alias = "hydra_plugins.cells.CellSweeper"
    plugins.class_name_to_class[alias] = CellSweeper
    ConfigStore.instance().store(
        group="hydra/sweeper",
        name="cells",
        node={"_target_": alias, "params": None},
        provider="tova",
    )
