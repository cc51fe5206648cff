"""The result as a reader gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.benchmarks import tables
from experiments.tasks import Row


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown tables."""
    made, rows = result["made"], result["rows"]
    lines = [
        f"# Replay and decoding on {made['card']}",
        "",
        f"{made['date']}; driver {made['driver']}, CUDA {made['cuda']}, torch {made['torch']}, triton "
        f"{made['triton']}, transformers {made['transformers']}, tova {made['tova']}, Python {made['python']}.",
    ]
    if made["tiny"]:
        lines += ["", "A tiny shape, to see that everything runs: **the figures mean nothing**."]

    def table(part: str, title: str, columns: dict[str, Callable[[Row], Any]]) -> None:
        mine = [row for row in rows if row["part"] == part]
        if part not in result["parts"]:
            return
        lines.extend(["", f"## {title}", ""])
        ended = result["parts"][part]
        if ended["ended"] != "ok":
            lines.extend([f"This part did not come to its end: {ended['ended']}.", ""])
        if not mine:
            lines.append("Nothing was measured.")
            return
        lines.extend(tables.table(list(columns), [_cells(columns, row) for row in mine]))

    table("card", "The card, measured", {
        "TB/s copied": lambda r: r["bytes_per_second"] / 1e12, "TFLOP/s": lambda r: r["flops_per_second"] / 1e12,
    })  # fmt: skip
    table("decisions", "Decisions against the reference scan, on the same logits", {
        "policy": lambda r: r["policy"], "logits": lambda r: r["dtype"], "scan": lambda r: r["scan"],
        "rounds": lambda r: r["rounds"], "decisions": lambda r: r["decisions"], "different": lambda r: r["different"],
        "sets that differ": lambda r: r["sets_different"], "of them from a near-tie on": lambda r: r["from_a_near_tie"],
        "near-ties / evictions": lambda r: f"{r['near_ties']} / {r['evictions']}",
    })  # fmt: skip
    table("launch", "The scan kernel by launch", {
        "sets": lambda r: r["rows"], "tile": lambda r: r["tile"], "warps": lambda r: r["warps"],
        "a step ahead": lambda r: "yes" if r["ahead"] else "no",
        "microseconds a step": lambda r: r["microseconds_per_step"],
    })  # fmt: skip
    replays: dict[str, Callable[[Row], Any]] = {
        "batch": lambda r: r["batch"], "tokens": lambda r: r["tokens"], "budget": lambda r: r["budget"],
        "scan": lambda r: r["scan"], "chunk": lambda r: r["chunk"], "rounds": lambda r: r["rounds"],
        "ms": lambda r: 1e3 * r["seconds"], "GB": lambda r: r["bytes"] / 1e9, "of full attention": lambda r: r["ratio"],
    }  # fmt: skip
    longest = {
        "longest kernels, ms": lambda r: "; ".join(f"{1e3 * s:.1f} {k[:40]}" for k, s in [*r["where"].items()][:4])
    }
    table("layer", "One layer: replay beside full attention", replays | longest)
    table("long", "One long sequence", replays)
    table("rows", "Runs as rows of one batch, beside one after another", {
        "runs": lambda r: r["cells"], "tokens": lambda r: r["tokens"], "decisions": lambda r: r["decisions"],
        "different": lambda r: r["different"], "ms one after another": lambda r: 1e3 * r["alone_seconds"],
        "ms as rows": lambda r: 1e3 * r["seconds"], "of one after another": lambda r: r["ratio"],
    })  # fmt: skip
    full = [r["tokens_per_second"] for r in rows if r["part"] == "decode" and r["budget"] is None and "error" not in r]
    table("decode", "Decoding", {
        "budget": lambda r: r["budget"] or "full", "batch": lambda r: r["batch"], "length": lambda r: r["length"],
        "tokens/s": lambda r: r["tokens_per_second"], "of the full cache": lambda r: r["tokens_per_second"] / full[0],
        "bound, tokens/s": lambda r: r["bound_tokens_per_second"], "of the bound": lambda r: r["of_bound"],
        "GB": lambda r: r["bytes"] / 1e9,
        "ms a step: held": lambda r: ", ".join(f"{1e3 * s:.1f}: {n}" for n, s in r["places"]),
        "as a graph, ms": lambda r: 1e3 * r["graph_seconds"] if "graph_seconds" in r else r["graph_error"],
        "tokens/s with the graph": lambda r: r["graph_tokens_per_second"],
        "of the full cache with it": lambda r: r["graph_tokens_per_second"] / full[0],
    })  # fmt: skip
    lines += [
        "",
        "Near-tie: the two lowest scores of a step are within 1e-5 of each other. Bound: the larger of bytes (weights "
        "and cache) over the copy's rate and operations over the product's; the share of it is the better way's. With "
        "the graph: a full cache is decoded by tova.DecodeGraph, one that still fills up as usual. The full cache is "
        "transformers' DynamicCache.",
    ]
    return "\n".join(lines)


def _cells(columns: dict[str, Callable[[Row], Any]], row: Row) -> list[str]:
    """What the columns say of a row; the last says what went wrong with it."""
    cells = [_cell(column, row) for column in columns.values()]
    return [*cells[:-1], row["error"].replace("|", "/")] if "error" in row else cells


def _cell(column: Callable[[Row], Any], row: Row) -> str:
    try:
        value = column(row)
    except (KeyError, IndexError, TypeError):  # not measured for this row
        return ""
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")
