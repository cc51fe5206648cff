"""A cell: one policy at one budget on one model and dataset, addressed by what determines its result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tova.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from experiments.data import Dataset
    from experiments.models import Model
    from experiments.tasks import Task
    from tova.policies import Policy

FORMAT = 2
"""Raise it when results change their meaning: older ones are then not found, instead of being mixed with new ones.

2: losses are summed in float64 (they were up to 2e-5 of a nat too low on some processors); NaN in attention is a step
without information.
"""


_MOST = 2**31
"""No text is so long; numbers far beyond would not fit where positions do."""


@dataclass(frozen=True)
class Budget:
    """Positions a layer may keep: a number of tokens, or a share of a document's length, rounded down."""

    value: int | float

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """From a configuration: an integer of at least 1, or a number strictly between 0 and 1."""
        wanted = "an integer of tokens (budget=256), or a share below 1 of the document's length (budget=0.125)"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"budget={value}: must be {wanted}")
        if value == 1 and isinstance(value, float):
            raise UsageError(
                f"budget={value}: a share of 1 would be the whole document, which is policy=full; one token is budget=1"
            )
        if isinstance(value, float) and not 0 < value < 1:
            raise UsageError(f"budget={value}: must be {wanted}")
        if value < 1 and isinstance(value, int):
            raise UsageError(f"budget={value}: must be at least 1 token, or a share above 0 and below 1")
        if value >= _MOST:
            raise UsageError(f"budget={value}: must be below {_MOST:,} tokens; no limit at all is policy=full")
        return cls(value)

    def tokens(self, length: int) -> int:
        """In tokens, for a document of ``length`` tokens."""
        if isinstance(self.value, int):
            return self.value
        tokens = math.floor(self.value * length + 1e-9)
        if tokens < 1:
            raise UsageError(f"budget={self.value}: is less than one token of a document of {length} tokens")
        return tokens

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Prompt:
    """How much of a document is its prompt: a number of tokens, or a share of its length, rounded down."""

    value: int | float

    @classmethod
    def parse(cls, value: Any) -> Prompt | None:
        """From a configuration: null, an integer of at least 2, or a number strictly between 0 and 1."""
        if value is None:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and value >= 2) and not (isinstance(value, float) and 0 < value < 1):
            raise UsageError(
                f"prompt={value}: must be null, an integer of at least 2 tokens (prompt=1024), or a share below 1 of "
                "the document's length (prompt=0.5)"
            )
        return cls(value)

    def tokens(self, length: int) -> int:
        """In tokens, for a document of ``length`` tokens; at least one token must follow."""
        tokens = self.value if isinstance(self.value, int) else math.floor(self.value * length + 1e-9)
        if not 2 <= tokens < length:
            raise UsageError(
                f"prompt={self.value}: is {tokens} tokens of a document of {length}; it takes at least 2, and at least "
                "one must follow"
            )
        return tokens


@dataclass(frozen=True)
class Cell:
    """What to run, composed and checked; nothing is loaded.

    Attributes:
        config: the resolved configuration, as it will be stored.
        policy_class: makes the policy once the budget is known in tokens.
        policy_parameters: those that differ from the policy's own defaults; the budget is no part of them.
        budget: None for a policy that takes none (``full``).
        prompt: None where a document has none: everything is as if decoded.
    """

    config: dict[str, Any]
    task: Task
    policy_class: type[Policy]
    policy_parameters: dict[str, Any]
    budget: Budget | None
    prompt: Prompt | None
    model: Model | None
    dataset: Dataset | None
    device: str

    def policy(self, length: int) -> Policy:
        """The policy for a document of ``length`` tokens."""
        if self.budget is None:
            return self.policy_class(**self.policy_parameters)
        return self.policy_class(budget=self.budget.tokens(length), **self.policy_parameters)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the result, and nothing else."""
        policy = {"class": f"{self.policy_class.__module__}.{self.policy_class.__qualname__}", **self.policy_parameters}
        identity: dict[str, Any] = {
            "format": FORMAT,
            "task": self.task.identity(),
            "policy": policy,
            "budget": None if self.budget is None else self.budget.value,
        }
        if self.model is not None:
            identity |= {"model": self.model.identity(), "device": self.device, "evict_every": self.evict_every}
            if self.prompt is not None:
                identity |= {"prefill": self.prefill, "prompt": self.prompt.value}
        if self.dataset is not None:
            identity["dataset"] = self.dataset.identity()
        return identity

    @property
    def evict_every(self) -> int:
        return int(self.config["evict_every"])

    @property
    def prefill(self) -> str:
        return str(self.config["prefill"])

    @cached_property
    def id(self) -> str:
        """The name of the cell's folder: readable first, then ten digits of the hash of its identity."""
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True, default=str).encode()).hexdigest()[:10]
        parts = [
            self.policy_class.name,
            "" if self.budget is None else str(self.budget),
            *(part.label for part in (self.model, self.dataset) if part is not None),
            digest,
        ]
        return "-".join(part.replace("/", "_") for part in parts if part)

    @property
    def title(self) -> str:
        """For people: ``tova sinks=4 256``."""
        changed = [f"{name}={value}" for name, value in self.policy_parameters.items()]
        how = ["one-shot"] if self.prefill == "one_shot" else []
        how += [f"every {self.evict_every}"] if self.evict_every > 1 else []
        budget = [] if self.budget is None else [str(self.budget)]
        return " ".join([self.policy_class.name, *changed, *how, *budget])

    def with_full_cache(self) -> Cell:
        """The same task on the same data by the model that forgets nothing."""
        from tova.policies import Full

        config = {**self.config, "policy": {"_target_": "tova.policies.Full"}, **_UNBOUNDED}
        return dataclasses.replace(
            self, config=config, policy_class=Full, policy_parameters={}, budget=None, prompt=None
        )


_UNBOUNDED = {"budget": None, "evict_every": 1, "prefill": "every_step", "prompt": None}
"""Options that make no difference where nothing is dropped."""


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
    budget = Budget.parse(resolved["budget"]) if takes_budget else None
    every = resolved["evict_every"]
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"evict_every={every}: must be an integer of at least 1")
    if every >= _MOST:
        raise UsageError(f"evict_every={every}: must be below {_MOST:,} tokens")
    prompt = Prompt.parse(resolved["prompt"])
    _check_prefill(resolved["prefill"], prompt, policy_class)
    if budget is None:
        resolved |= _UNBOUNDED
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
        prompt.tokens(length)
    cell.id  # noqa: B018  # reads the data's identity: a missing file is found now
    return cell


def _check_prefill(prefill: Any, prompt: Prompt | None, policy_class: type[Policy]) -> None:
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
