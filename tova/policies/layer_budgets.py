"""How a budget is shared out over a model's layers: an option of every policy, so that ablations need no classes.

``uniform``     every layer holds the budget.
``linear:R``    falls linearly from the first layer to the last, the first about R times the last; the mean is the
                budget, a little less since shares are floored. R is an integer of at least 1, 4 if left out.
``slope:B``     PyramidKV's own (https://arxiv.org/abs/2406.02069): of the budget beyond the recent window, b, the
                first layer holds 2 b - b // B and each next one a floored step fewer, towards b // B. Since the step
                is floored, as in its code, the mean is 1 to 3% above the budget. B is 20 if left out.
a list          tokens per layer, one for each layer of the model.

No share is below what is protected plus one, so that there is always a position to choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from tova.errors import UsageError

LayerBudgets = str | Sequence[int]
UNIFORM = "uniform"
_DEFAULTS = {"linear": 4, "slope": 20}


def check(name: str, budgets: LayerBudgets) -> LayerBudgets:
    """The option in its normal form: a string, or a tuple of integers.

    Raises:
        UsageError: it is none of the forms above.
    """
    if not isinstance(budgets, str):
        listed = tuple(budgets) if isinstance(budgets, Iterable) else ()
        # Checked here and not by Policy.require, which is of one number.
        plain = tuple(int(b) for b in listed if isinstance(b, Integral) and not isinstance(b, bool) and 1 <= b <= 2**62)
        if not listed or len(plain) < len(listed):
            raise UsageError(
                f"{name}: layer_budgets must list an integer of at least 1 and at most {2**62} for each layer, got "
                f"{budgets!r}"
            )
        return plain
    if budgets == UNIFORM:
        return budgets
    kind, _, number = budgets.partition(":")
    known = number == "" or (number.isdecimal() and len(number) < 19 and int(number) > 0)
    if kind not in _DEFAULTS or not known:
        raise UsageError(
            f"{name}: layer_budgets must be uniform, linear:R, slope:B (R and B integers of at least 1) or a list of "
            f"tokens per layer, got {budgets!r}"
        )
    return f"{kind}:{number or _DEFAULTS[kind]}"


def share(name: str, budgets: LayerBudgets, budget: int, layer: int, layers: int, recent_window: int) -> int:
    """Positions layer ``layer`` of ``layers`` may hold, before any lower limit.

    Raises:
        UsageError: a list that is not one number per layer.
    """
    if not isinstance(budgets, str):
        if len(budgets) != layers:
            raise UsageError(f"{name}: layer_budgets lists {len(budgets)} layers, the model has {layers}")
        return budgets[layer]
    if budgets == UNIFORM or layers == 1:
        return budget
    kind, _, number = budgets.partition(":")
    if kind == "linear":
        ratio, last = int(number), layers - 1
        return 2 * budget * (ratio * last - layer * (ratio - 1)) // ((ratio + 1) * last)
    beyond = budget - recent_window
    least = beyond // int(number)
    most = 2 * beyond - least
    return recent_window + most - layer * ((most - least) // (layers - 1))
