"""Who does which cells, and how long it may take: shares for workers, and the plan that ``--plan`` prints."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.cells import Cell
from experiments.store import CellFolder

if TYPE_CHECKING:
    from experiments.settings import Settings

_TOKENS = 2048
"""Tokens a document is taken to have where nothing says how long it is."""


@dataclass(frozen=True)
class Estimate:
    """What a cell may take.

    Attributes:
        documents: None where the texts would have to be fetched to know.
        tokens: of a document.
        seconds_each: for a document; None where nothing is known.
        bytes: of memory; None likewise.
        measured: how many earlier cells the seconds are from; 0 for a rough guess from the model's size.
    """

    documents: int | None
    tokens: int
    seconds_each: float | None
    bytes: int | None
    measured: int

    @property
    def seconds(self) -> float | None:
        """For the cell; None where its documents are not counted."""
        if self.seconds_each is None or self.documents is None:
            return None
        return self.seconds_each * self.documents


def shares(cells: Sequence[Cell], workers: int, root: Path) -> list[list[Cell]]:
    """The cells dealt out to at most so many workers, about equally long, cells of one model and text together."""
    history = History.of(root)
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[_loads(cell)].append(cell)
    estimates = {cell.id: history.estimate(cell) for cell in cells}
    # Where documents are not counted, there are taken to be a dozen.
    known = {i: e.seconds_each * (e.documents or 12) for i, e in estimates.items() if e.seconds_each is not None}
    usual = sum(known.values()) / len(known) if known else 1.0
    cost = {cell.id: known.get(cell.id, usual) or 1e-9 for cell in cells}
    total = sum(cost.values())
    found: list[list[Cell]] = []
    spent = 0.0
    for group in groups.values():
        for cell in group:
            # The share in whose part of the whole the cell's middle lies.
            place = min(workers - 1, int((spent + cost[cell.id] / 2) / total * workers))
            while len(found) <= place:
                found.append([])
            found[place].append(cell)
            spent += cost[cell.id]
    return [share for share in found if share]


def _loads(cell: Cell) -> str:
    """What a process must load for it."""
    model = None if cell.model is None else cell.model.identity()
    dataset = None if cell.dataset is None else cell.dataset.identity()
    return json.dumps([model, dataset, cell.device], sort_keys=True, default=str)


@dataclass(frozen=True)
class History:
    """Tokens per second of cells that were measured before: by model, device and policy, and by less."""

    speeds: dict[tuple[str, ...], list[float]]

    @classmethod
    def of(cls, root: Path) -> History:
        """From the summaries under ``root``."""
        speeds: dict[tuple[str, ...], list[float]] = defaultdict(list)
        for path in root.glob("*/summary.json") if root.is_dir() else ():
            try:
                found = json.loads(path.read_text())
                model, device, policy = found["model"], found["device_name"], found["policy"].split(" ")[0]
                speed, tokens = float(found["tokens_per_second"]), int(found["tokens"])
                size = _octave(tokens // max(1, int(found.get("documents", 1))))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            for key in ((model, device, policy, size), (model, device, size), (model, device)):
                speeds[tuple(map(str, key))].append(speed)
        return cls(dict(speeds))

    def estimate(self, cell: Cell) -> Estimate:
        """What ``cell`` may take."""
        documents, per_document = lengths_of(cell)
        if cell.model is None:
            return Estimate(documents, per_document, None, None, 0)
        from experiments.provenance import device_name

        model, device = cell.model.label, device_name(cell.device)
        parameters = parameters_of(cell.model)
        memory = None if parameters is None else _bytes(cell, parameters, per_document)
        size = _octave(per_document)
        for key in ((model, device, cell.policy_class.name, size), (model, device, size), (model, device)):
            if known := self.speeds.get(tuple(map(str, key))):
                speed = sorted(known)[len(known) // 2]
                return Estimate(documents, per_document, per_document / speed, memory, len(known))
        if parameters is None:
            return Estimate(documents, per_document, None, memory, 0)
        # Two floating-point operations a parameter and token, and as much again for attention and measures.
        seconds = 4 * parameters * per_document / flops(cell.device)
        return Estimate(documents, per_document, seconds, memory, 0)


def _octave(tokens: int) -> str:
    return f"2^{max(1, tokens).bit_length() - 1}"


def lengths_of(cell: Cell) -> tuple[int | None, int]:
    """How many documents, None where they would have to be fetched to know, and tokens of each."""
    if cell.dataset is None:
        return 1, cell.task.length or 0
    documents = cell.dataset.documents
    if documents is None:
        identity: Any = next((v for v in cell.dataset.identity().values() if isinstance(v, dict | list)), None)
        documents = len(identity) if identity is not None else None
    return documents, cell.dataset.tokens or _TOKENS


def parameters_of(model: Any) -> int | None:
    """How many a model has, or is called after; None where nothing says."""
    if (known := getattr(model, "parameters", None)) is not None:
        return int(known)
    name = getattr(model, "name", None)
    if name is None:
        return None
    if (from_files := _from_files(name)) is not None:
        return from_files
    # Most are called by their size.
    if said := re.search(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", str(name).lower()):
        return int(float(said[1]) * {"b": 1e9, "m": 1e6}[said[2]])
    return None


def _from_files(name: str) -> int | None:
    """From its configuration alone; None where that is not on this machine."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return sum(p.numel() for p in made.parameters())
    except Exception:  # not here, or not one that can be made so
        return None


_FLOPS: dict[str, float] = {}


def flops(device: str) -> float:
    """Floating-point operations per second of a device, from one product, rough."""
    if device not in _FLOPS:
        import torch

        a = torch.rand(1024, 1024, device=device)
        a @ a
        began = time.perf_counter()
        for _ in range(3):
            b = a @ a
        b[0, 0].item()
        _FLOPS[device] = 3 * 2 * 1024**3 / (time.perf_counter() - began) / 2
    return _FLOPS[device]


def _bytes(cell: Cell, parameters: int, tokens: int) -> int:
    """Weights, and per token what measures keep of keys and queries and what a layer works with."""
    size = {"float32": 4}.get(str(getattr(cell.model, "dtype", "float32")), 2)
    width = (parameters / 200) ** 0.5  # of a model as deep as usual
    return int(parameters * size + tokens * width * size * 60 + 2**29)


def show(cells: Sequence[Cell], how: Settings) -> None:
    """Print what a sweep would do: its cells by model and text, what is done, time and memory; nothing is run."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from experiments.runner import with_references

    every = with_references(cells)
    history = History.of(how.root)
    title = f"{how.name}: {len(every)} cells"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, justify in (
        ("model", "left"), ("dataset", "left"), ("cells", "right"), ("done", "right"), ("tokens", "right"),
        ("about", "right"), ("memory", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in every:
        groups[_loads(cell)].append(cell)
    whole, unknown, rough, failed = 0.0, 0, 0, 0
    for group in groups.values():
        todo, failing = _todo(group, how.root)
        failed += failing
        estimates = [history.estimate(cell) for cell in todo]
        counted = all(e.documents is not None for e in estimates)
        each = [e.seconds_each for e in estimates if e.seconds_each is not None]
        seconds = [e.seconds for e in estimates if e.seconds is not None]
        unknown += len(estimates) - len(seconds)
        rough += sum(e.measured == 0 and e.seconds is not None for e in estimates)
        whole += sum(seconds)
        memory = max((e.bytes for e in estimates if e.bytes is not None), default=None)
        first = group[0]
        tokens = sum((e.documents or 1) * e.tokens for e in estimates)
        per = "" if counted else "n x "
        took = sum(seconds) if counted else sum(each)
        table.add_row(
            "-" if first.model is None else first.model.label,
            "-" if first.dataset is None else first.dataset.label,
            str(len(group)),
            str(len(group) - len(todo)),
            f"{per}{tokens:,}",
            f"{per}{duration(took)}" if len(each) == len(todo) else "?",
            "?" if memory is None else f"{memory / 2**30:.1f} GiB",
        )
    out = Console()
    out.print(table)
    for line in _lines(every, how, whole, unknown, rough, failed):
        print(line)


def _todo(cells: Iterable[Cell], root: Path) -> tuple[list[Cell], int]:
    folders = [(cell, CellFolder(root, cell.id)) for cell in cells]
    return [cell for cell, f in folders if not f.done and not f.failed], sum(f.failed for _, f in folders)


def _lines(every: Sequence[Cell], how: Settings, whole: float, unknown: int, rough: int, failed: int) -> list[str]:
    added = len(every) - len({c.id for c in every if c.budget is not None or c.policy_class.name != "full"})
    lines = [f"{added} of the cells are full caches, which the others are compared with"] if added else []
    jobs = how.launcher.get("jobs") or how.launcher.get("workers")
    if jobs:
        todo, _ = _todo(every, how.root)
        parts = shares(todo, int(jobs), how.root)
        sizes = sorted(len(part) for part in parts)
        if sizes:
            lines.append(f"{len(parts)} workers begin with {sizes[0]} to {sizes[-1]} cells each")
            whole = whole / len(parts)
    if failed:
        lines.append(f"{failed} cells failed before and are left as they are; retry=failed runs them")
    source = "by speeds measured before" if not rough else f"{rough} cells roughly, by their models' sizes"
    lines.append(f"time left: about {duration(whole)} at this machine's speed" + (f" ({source})" if whole else ""))
    if unknown:
        lines.append(f"not counted in: {unknown} cells, whose models are not known here, or texts not how many (n)")
    lines.append("nothing was run; leave out --plan to run it")
    return lines


def duration(seconds: float) -> str:
    """For people: ``45 s``, ``12 min``, ``3.5 h``, ``2.1 days``."""
    for unit, size, form in (("days", 86400, ".1f"), ("h", 3600, ".1f"), ("min", 60, ".0f")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:{form}} {unit}"
    return f"{seconds:.0f} s"
