"""What the runner left behind: files, frames, W&B's logs; and a cell as it is planned."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pandas as pd
from hydra import compose, initialize_config_dir

import experiments
from experiments import settings, sweeper
from experiments.store import same_figures

ROOT = Path(__file__).parents[2]


def cell(*words: str):
    """A cell of the tiny random model, as ``words`` of the command line plan it."""
    sweeper.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return settings.planned(compose("config", ["model=random_llama", *words]))


def left_behind(place: Path) -> list[str]:
    """All paths below ``place`` but its texts."""
    return sorted(str(p.relative_to(place)) for p in place.rglob("*") if "texts" not in p.parts)


def frames(place: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The cells and the documents of the sweeps in ``place``."""
    root = place / "results/runs"
    return experiments.frame(root=root), experiments.documents(root=root)


def assert_same(a: pd.DataFrame, b: pd.DataFrame) -> None:
    """Bit for bit, times and where it was measured apart."""
    assert len(a) == len(b)
    times = ("wall_seconds", "git", "device_name")
    for x, y in zip(a.to_dict("records"), b.to_dict("records"), strict=True):
        assert same_figures(x, y, times) == [], x["cell"]


def offline_runs(folder: Path) -> list[dict]:
    """What the logs of offline W&B runs say: LevelDB-style blocks of protobuf records."""
    from wandb.proto import wandb_internal_pb2

    runs = []
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        data = path.read_bytes()
        assert data[:4] == b":W&B"
        run: dict = {"history": [], "config": {}, "summary": {}, "exit": None}
        position, pending = 7, b""
        while position + 7 <= len(data):
            if (left := 32768 - position % 32768) < 7:
                position += left
                continue
            _, size, kind = struct.unpack("<IHB", data[position : position + 7])
            if (size, kind) == (0, 0):
                break
            pending += data[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (2, 3):  # first or middle piece of a record
                continue
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            pending = b""
            kind_of = record.WhichOneof("record_type")
            if kind_of == "run":
                run |= {"group": record.run.run_group, "name": record.run.display_name, "project": record.run.project}
                run["config"] |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            elif kind_of == "config":
                run["config"] |= {i.key: json.loads(i.value_json) for i in record.config.update}
            elif kind_of == "history":
                items = record.history.item
                run["history"].append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
            elif kind_of == "summary":
                items = record.summary.update
                run["summary"] |= {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
            elif kind_of == "exit":
                run["exit"] = record.exit.exit_code
        runs.append(run)
    return runs
