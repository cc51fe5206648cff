"""From a composed configuration to a cell: everything in it is checked, nothing is loaded."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from experiments import classes, options
from experiments.cells import UNBOUNDED, Cell
from experiments.devices import device_of
from experiments.lengths import MOST, Length, budget_of, prompt_of, prompt_tokens
from experiments.options import shown
from tova.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from tova.policies import Policy


def plan(config: DictConfig) -> Cell:
    """The cell a composed configuration describes.

    Raises:
        UsageError: something in it cannot be; the message names the option.
    """
    resolved = _resolved(config)
    options.tracking_mode(resolved["tracking"]["mode"])
    options.tracking_project(resolved["tracking"]["project"])
    options.sweep_name(resolved.pop("sweep")["name"])
    resolved.pop("launcher", None)
    resolved["results_dir"] = str(options.results_dir(resolved["results_dir"]))
    task = classes.make("task", resolved["task"])
    policy_class = classes.policy_class(resolved["policy"]["_target_"])
    budget = budget_of(resolved["budget"]) if classes.takes_budget(policy_class) else None
    options.integer("evict_every", resolved["evict_every"], 1, MOST - 1)
    prompt = prompt_of(resolved["prompt"])
    _check_prompt(resolved["prefill"], prompt, policy_class, task)
    if budget is None:
        resolved |= UNBOUNDED
        prompt = None
    cell = Cell(
        config=resolved,
        task=task,
        policy_class=policy_class,
        policy_parameters=_changed(policy_class, resolved["policy"]),
        budget=budget,
        prompt=prompt,
        model=classes.make("model", resolved["model"]) if task.uses_model else None,
        dataset=classes.make("dataset", resolved["dataset"]) if task.uses_model else None,
        device=device_of(resolved["device"]) if task.uses_model else "",
    )
    if cell.evict_every > 1 and not task.uses_model:
        raise UsageError(f"evict_every={cell.evict_every}: task={task.name} evicts at every step; leave it out")
    length = cell.dataset.tokens if cell.dataset is not None else task.length
    if budget is None or isinstance(budget.value, int) or length is not None:
        policy = _checked_policy(cell, length or 0)
    else:  # a share of a length nobody knows yet; the other parameters must be right all the same
        policy = _checked_policy(dataclasses.replace(cell, budget=Length("budget", MOST)), 0)
    if prompt is not None and length is not None:
        prompt_tokens(prompt, length)
    if hasattr(task, "check"):
        task.check(cell, policy)
    cell.id  # noqa: B018  # reads the data's identity: a missing file is found now
    return cell


def _resolved(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain values: every name in it is known, and none is without a value."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        # A misspelt name is said before what it leaves without a value.
        _check_names(OmegaConf.to_container(config, resolve=True, throw_on_missing=False))
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as e:
        key = getattr(e, "full_key", None) or "an option"
        raise UsageError(f"{key} has no default and must be given: {key}=...") from e
    except OmegaConfBaseException as e:
        raise UsageError(str(e).splitlines()[0]) from e
    assert isinstance(resolved, dict)
    return {str(k): v for k, v in resolved.items()}


def _check_names(config: Any) -> None:
    from experiments.explain import unknown

    default = _default()
    for key in (*default, *options.GROUPS):
        if key not in config:
            raise UsageError(f"{key} must be given: {key}=...")
    for key, value in config.items():
        if key in options.GROUPS:
            if not isinstance(value, dict):
                raise UsageError(f"{key}={shown(value)}: must be the name of a {key}; --help lists them")
            classes.check_options(key, value)
        elif key == "launcher":  # says who runs cells, not which; who starts them looks at it
            continue
        elif key not in default:
            raise UsageError(unknown(str(key)))
        elif isinstance(default[key], dict):
            if not isinstance(value, dict):
                raise options.several(key, value)
            for name in value:
                if name not in default[key]:
                    raise UsageError(unknown(f"{key}.{name}"))


@lru_cache(maxsize=1)
def _default() -> dict[str, Any]:
    """The options of ``conf/config.yaml``, those of the groups apart."""
    import yaml

    from experiments.explain import CONF

    default = yaml.safe_load((CONF / "config.yaml").read_text())
    return {key: value for key, value in default.items() if key not in ("defaults", "hydra")}


def _check_prompt(prefill: Any, prompt: Length | None, policy_class: type[Policy], task: Any) -> None:
    from tova.cache import PREFILLS

    options.one_of("prefill", prefill, PREFILLS)
    takes_prompts = getattr(task, "takes_prompts", task.uses_model)
    if policy_class.prompt_only and not takes_prompts:
        raise UsageError(
            f"policy={policy_class.name}: selects once, at the end of a prompt, and task={task.name} has none"
        )
    if prompt is not None and not takes_prompts:
        raise UsageError(f"prompt={prompt}: task={task.name} has no prompts; leave it out")
    if prefill == "one_shot" and prompt is None:
        raise UsageError(
            "prefill=one_shot: say how much of each document is its prompt, prompt=1024 tokens or prompt=0.5 of it"
        )
    if policy_class.prompt_only and prefill != "one_shot":
        raise UsageError(
            f"policy={policy_class.name}: selects once, at the end of a prompt; add prefill=one_shot and prompt=..., "
            "or leave it out: 'policy=glob(*,exclude=*_prefill)' is all the others"
        )


def _changed(policy_class: type[Policy], given: dict[str, Any]) -> dict[str, Any]:
    """The parameters that say something: null is the policy's own choice, and what it is anyway need not be said.

    So the address of a result does not change when a file comes to name one more default.
    """
    from tova.policies import Policy

    defaults = {f.name: f.default for f in dataclasses.fields(policy_class) if f.init}
    # ``full`` takes no budget and no protection either; a sweep may still set them for the others.
    idle = set() if "budget" in defaults else {f.name for f in dataclasses.fields(Policy)}
    said = {k: v for k, v in given.items() if k != "_target_" and v is not None and k not in idle}
    return {k: v for k, v in said.items() if not (k in defaults and _same(defaults[k], v))}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _checked_policy(cell: Cell, length: int) -> Policy:
    try:
        return cell.policy(length)
    except UsageError:
        raise
    except Exception as e:
        name = cell.policy_class.name or cell.policy_class.__name__
        raise UsageError(f"policy={name}: cannot be made, {classes.cause(e)}") from e
