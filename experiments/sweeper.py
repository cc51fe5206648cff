"""Hydra's sweeper for cells: check all before any runs, run each once, report at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from experiments import options, session, settings
from experiments.cells import Cell
from tova.errors import UsageError


class CellSweeper(Sweeper):
    """A product of choices, as Hydra's own, with these differences:

    - every cell is composed and checked before the first one runs, so one bad value costs nothing;
    - choices that come to the same cell (``full`` at any budget) run once;
    - nothing but results is written;
    - cells run here, or are shared out among the workers that ``launcher`` starts;
    - when all are through, the table, the figure and the folders are reported, whatever the launcher.
    """

    plan: ClassVar[bool] = False
    typed: ClassVar[Sequence[str]] = ()

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self._params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        loader = self._context.config_loader
        choices = options.relaxed([f"{key}={values}" for key, values in self._params.items()])
        parsed = OverridesParser.create(config_loader=loader).parse_overrides([*choices, *arguments])
        jobs = BasicSweeper.split_arguments(parsed, None)[0]
        _check_same_for_all(jobs)
        if len(jobs) > 200:
            print(f"checking {len(jobs)} cells", file=sys.stderr, flush=True)
        cells: dict[str, Cell] = {}
        first: DictConfig | None = None
        for job in jobs:
            config = loader.load_sweep_config(self._config, list(job))
            first = config if first is None else first
            cell = settings.planned(config)
            cells.setdefault(cell.id, cell)
        assert first is not None
        how = settings.settings(first, arguments, self.typed)
        return session.run(list(cells.values()), how, plan=self.plan, hydra=self._hydra_launcher())

    def _hydra_launcher(self) -> Any:
        """A launcher of Hydra's that was asked for; None for its own, which would run one cell after the other."""
        if self._config.hydra.launcher._target_.endswith("BasicLauncher"):
            return None
        return Plugins.instance().instantiate_launcher(
            hydra_context=self._context, task_function=self._task, config=self._config
        )


def _check_same_for_all(jobs: Sequence[Sequence[str]]) -> None:
    """How a sweep is run cannot be swept over."""
    found: dict[str, set[str]] = {}
    for job in jobs:
        for word in job:
            key, _, value = word.lstrip("+").partition("=")
            if key.split(".")[0] in settings.VOLATILE:
                found.setdefault(key, set()).add(value)
    for key, values in found.items():
        if len(values) > 1:
            raise UsageError(f"{key}={','.join(sorted(values))}: has one value for a whole sweep")


def register(*, plan: bool = False, typed: Sequence[str] = ()) -> None:
    """Make ``hydra/sweeper=cells`` known.

    Args:
        plan: say what would be run and run nothing.
        typed: the command line.
    """
    CellSweeper.plan, CellSweeper.typed = plan, tuple(typed)
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
