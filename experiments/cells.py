"""A cell: one policy at one budget on one model and dataset, addressed by what determines its result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from experiments import fingerprint

if TYPE_CHECKING:
    from experiments.data import Dataset
    from experiments.lengths import Length
    from experiments.models import Model
    from experiments.tasks import Task
    from tova.policies import Policy


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
    budget: Length | None
    prompt: Length | None
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
        """Everything that determines the result, and nothing else: docs/runner.md says what that is.

        What is local counts by its content: a policy, a model, a dataset that was edited is another one, one that was
        renamed or moved is the same.
        """
        identity: dict[str, Any] = {
            "task": self.task.identity(),
            "policy": {"class": self.policy_class.__qualname__, **self.policy_parameters},
            "budget": None if self.budget is None else self.budget.value,
        }
        if self.model is not None:
            identity |= {"model": self.model.identity(), "device": self.device.split(":")[0]}
            identity["evict_every"] = self.evict_every
            if self.prompt is not None:
                identity |= {"prefill": self.prefill, "prompt": self.prompt.value}
        if self.dataset is not None:
            identity["dataset"] = self.dataset.identity()
        return identity | {"code": self._code}

    @property
    def _code(self) -> str:
        parts = [type(part) for part in (self.task, self.model, self.dataset) if part is not None]
        made_by = {c.__module__ for part in (*parts, self.policy_class) for c in part.__mro__ if c is not object}
        return fingerprint.digest(sorted(made_by))

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
            self.policy_name,
            "" if self.budget is None else str(self.budget),
            *(_called(part) for part in (self.model, self.dataset) if part is not None),
            digest,
        ]
        return "-".join(re.sub(r"[^\w.+]", "_", part)[:40] for part in parts if part)

    @property
    def policy_name(self) -> str:
        """The policy's own name; its class's where it has none."""
        return self.policy_class.name or self.policy_class.__name__

    @property
    def title(self) -> str:
        """For people: ``tova sinks=4 256``."""
        changed = [f"{name}={value}" for name, value in self.policy_parameters.items()]
        how = ["one-shot"] if self.prefill == "one_shot" else []
        how += [f"every {self.evict_every}"] if self.evict_every > 1 else []
        budget = [] if self.budget is None else [str(self.budget)]
        return " ".join([self.policy_name, *changed, *how, *budget])

    @property
    def policy_label(self) -> str:
        """The policy's name with the parameters that differ from its own: ``decay fade=0.8``."""
        try:
            return self.policy(2**20).label
        except Exception:  # a policy that cannot be made says so when it is
            return self.policy_name

    @cached_property
    def full(self) -> Cell:
        """The same task on the same data by the model that forgets nothing."""
        from tova.policies import Full

        config = {**self.config, "policy": {"_target_": "tova.policies.Full"}, **UNBOUNDED}
        return dataclasses.replace(
            self, config=config, policy_class=Full, policy_parameters={}, budget=None, prompt=None
        )


def _called(part: Model | Dataset) -> str:
    """What a model or dataset is called in an address: nothing that a new label, or a folder's new name, changes."""
    fields: tuple[Any, ...] = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    own: dict[str, Any] = {f.name: f.default for f in fields}
    if isinstance(label := own.get("label"), str) and label:
        return label
    if (hub := part.identity().get("hub")) is not None:
        return str(hub).rpartition("/")[2]
    return type(part).__name__.lower()


UNBOUNDED = {"budget": None, "evict_every": 1, "prefill": "every_step", "prompt": None}
"""Options that make no difference where nothing is dropped."""
