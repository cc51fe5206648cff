"""From a composed configuration to a cell: everything in it is checked, nothing is loaded."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from experiments.cells import UNBOUNDED, Cell
from experiments.lengths import MOST, Length, budget_of, prompt_of, prompt_tokens
from tova.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from tova.policies import Policy


def plan(config: DictConfig) -> Cell:
    """The cell a composed configuration describes.

    Raises:
        UsageError: something in it cannot be; the message names the option.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as e:
        key = getattr(e, "full_key", None) or "an option"
        raise UsageError(f"{key} has no default and must be given: {key}=...") from e
    except OmegaConfBaseException as e:
        raise UsageError(str(e).splitlines()[0]) from e
    assert isinstance(resolved, dict)
    resolved.pop("sweep", None)

    task = _make(config.task, "task")
    policy_class = _policy_class(config.policy._target_)
    parameters = _changed(policy_class, {str(k): v for k, v in resolved["policy"].items() if k != "_target_"})
    takes_budget = any(f.name == "budget" and f.init for f in dataclasses.fields(policy_class))
    budget = budget_of(resolved["budget"]) if takes_budget else None
    every = resolved["evict_every"]
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"evict_every={every}: must be an integer of at least 1")
    if every >= MOST:
        raise UsageError(f"evict_every={every}: must be below {MOST:,} tokens")
    prompt = prompt_of(resolved["prompt"])
    _check_prefill(resolved["prefill"], prompt, policy_class)
    if budget is None:
        resolved |= UNBOUNDED
        prompt = None
    cell = Cell(
        config=resolved,
        task=task,
        policy_class=policy_class,
        policy_parameters=parameters,
        budget=budget,
        prompt=prompt,
        model=_make(config.model, "model") if task.uses_model else None,
        dataset=_make(config.dataset, "dataset") if task.uses_model else None,
        device=_device(resolved["device"]) if task.uses_model else "",
    )
    length = cell.dataset.tokens if cell.dataset is not None else task.length
    if budget is None or isinstance(budget.value, int) or length is not None:
        _checked_policy(cell, length or 0)
    if prompt is not None and length is not None:
        prompt_tokens(prompt, length)
    cell.id  # noqa: B018  # reads the data's identity: a missing file is found now
    return cell


def _check_prefill(prefill: Any, prompt: Length | None, policy_class: type[Policy]) -> None:
    from tova.cache import PREFILLS

    if prefill not in PREFILLS:
        raise UsageError(f"prefill={prefill}: must be one of {', '.join(PREFILLS)}")
    if prefill == "one_shot" and prompt is None:
        raise UsageError(
            "prefill=one_shot: say how much of each document is its prompt, prompt=1024 tokens or prompt=0.5 of it"
        )
    if policy_class.prompt_only and prefill != "one_shot":
        raise UsageError(
            f"policy={policy_class.name}: selects once, at the end of a prompt; add prefill=one_shot and prompt=..."
        )


def _changed(policy_class: type[Policy], given: dict[str, Any]) -> dict[str, Any]:
    """The parameters that say something: null is the policy's own choice, and what it is anyway need not be said.

    So the address of a result does not change when a file comes to name one more default.
    """
    from tova.policies import Policy

    defaults = {f.name: f.default for f in dataclasses.fields(policy_class) if f.init}
    # ``full`` takes no budget and no protection either; a sweep may still set them for the others.
    idle = set() if "budget" in defaults else {f.name for f in dataclasses.fields(Policy)}
    return {k: v for k, v in given.items() if not (v is None or k in idle or (k in defaults and _same(defaults[k], v)))}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _checked_policy(cell: Cell, length: int) -> Policy:
    try:
        return cell.policy(length)
    except TypeError as e:
        known = [f.name for f in dataclasses.fields(cell.policy_class) if f.init and f.name != "budget"]
        raise UsageError(f"policy={cell.policy_class.name}: {e}; it takes {', '.join(known) or 'no options'}") from e


def _policy_class(target: str) -> type[Policy]:
    from hydra.utils import get_class

    from tova.policies import Policy

    try:
        found = get_class(target)
    except Exception as e:
        raise UsageError(f"policy._target_={target}: cannot be imported ({str(e).splitlines()[0]})") from e
    if not issubclass(found, Policy):
        raise UsageError(f"policy._target_={target}: is no subclass of tova.policies.Policy")
    return found


def _make(config: DictConfig, what: str) -> Any:
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(config, _convert_="all")
    except InstantiationException as e:
        if isinstance(e.__cause__, UsageError):
            raise e.__cause__ from e
        raise UsageError(f"{what}: {str(e).splitlines()[0]} ({e.__cause__})") from e


def _device(name: str) -> str:
    """The device in torch's words; raises where this machine has none such."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise UsageError(f"device={name}: must be auto, cpu, cuda or cuda:N") from e
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    elif device.type == "mps":
        there = int(torch.backends.mps.is_available())
    else:
        raise UsageError(f"device={name}: must be auto, cpu, cuda or cuda:N")
    if not there:
        raise UsageError(
            f"device={name}: this machine has no {device.type.upper()} device; use device=cpu or device=auto"
        )
    if (device.index or 0) >= there:
        last = f"the last is {device.type}:{there - 1}"
        raise UsageError(f"device={name}: this machine has {there} {device.type.upper()} devices, {last}")
    return str(device)
