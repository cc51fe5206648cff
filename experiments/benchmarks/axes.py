"""The axes that a benchmark's figures are drawn on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def drawn(title: str, y: str, x: str = "", ticks: Iterable[int] = ()) -> Iterator[tuple[Figure, Axes]]:
    """A figure and its axes, to draw on within; the legend comes last.

    Args:
        ticks: numbers along a logarithmic x axis, with y from 0 on; without any both axes are left as they are.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    figure = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = figure.add_subplot(1, 1, 1)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
    yield figure, axes
    if numbers := sorted(set(ticks)):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(numbers))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def looks() -> Callable[[str], dict[str, Any]]:
    """Gives a line its colour and marker: a policy's as in every figure, others' one after the other."""
    from experiments.report.figures import _LOOKS, _OTHERS

    others = iter(_OTHERS * 8)

    def of(name: str) -> dict[str, Any]:
        colour, marker = _LOOKS.get(name) or next(others)
        return {"color": colour, "marker": marker}

    return of
