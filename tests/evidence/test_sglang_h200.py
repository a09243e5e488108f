"""SGLang's experts beside ours on one H200: no cell is missing, no result is wrong, and these bars hold and these do not.

`kernels`: our kernels beside SGLang's Triton path. `core`: the plugin's runner core beside SGLang's Triton runner, each from SGLang's
dispatch to its combine, with the tactic that the plugin's own start-up chose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench import kernel_bars, kernel_inputs, kernels

ROOT = Path(__file__).parents[2]
PEERS = {"sglang_triton": ["bf16", "fp8"]}
PLAN = kernels.Plan(ladder=False)
CORE_TOKENS, CORE_EAGER = (1, 16, 64, 256, 1024, 4096), (1, 16, 256, 4096)
CORE_CELLS = {
    (shape.name, dtype, tokens, mode)
    for shape in kernel_inputs.SHAPES
    for dtype in shape.dtypes
    for mode, counts in (("cuda_graph", CORE_TOKENS), ("eager", CORE_EAGER))
    for tokens in counts
}
CORE_FIELDS = ("sglang_us", "ours_us", "ratio", "tactic", "sglang_error", "ours_error")
Rows = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "docs/evidence/sglang-h200.json").read_text())
    return document


def core_key(row: Mapping[str, Any]) -> tuple[str, str, int, str]:
    return row["shape"], row["dtype"], row["tokens"], row["mode"]


def core_objections(rows: Rows) -> list[str]:
    """What is missing or wrong in `core`."""
    seen = [core_key(row) for row in rows]
    found = [f"no row for {' '.join(map(str, cell))}" for cell in sorted(CORE_CELLS - set(seen))]
    found += [f"{seen.count(cell)} rows for {' '.join(map(str, cell))}" for cell in sorted(set(seen)) if seen.count(cell) > 1]
    for row in rows:
        found += [f"{core_key(row)}: no field {name}" for name in CORE_FIELDS if name not in row]
        if {"ratio", "sglang_us", "ours_us"} <= row.keys() and abs(row["ratio"] * row["ours_us"] / row["sglang_us"] - 1) > 0.002:
            found.append(f"{core_key(row)}: ratio {row['ratio']} is not {row['sglang_us']} over {row['ours_us']}")
    return found


def core_bars(rows: Rows) -> dict[str, bool]:
    """SGLang's own experts are in the pool: a served layer may not lose to them, and is no further from the truth."""
    graph, eager = ({core_key(row): row["ratio"] for row in rows if row["mode"] == mode} for mode in ("cuda_graph", "eager"))
    return {
        "core: every graph cell": min(graph.values()) >= kernel_bars.LEAST_RATIO,
        "core: every eager cell": min(eager.values()) >= kernel_bars.LEAST_RATIO,
        "core: errors": all(row["ours_error"] <= kernel_bars.ERROR_TIE * row["sglang_error"] for row in rows),
    }


def core_table(rows: Rows) -> list[str]:
    """Markdown lines: microseconds of ours, in brackets SGLang's over ours; a star where SGLang's own experts won the tuning."""
    held = {core_key(row): row for row in rows}
    columns = [("cuda_graph", tokens) for tokens in CORE_TOKENS] + [("eager", tokens) for tokens in CORE_EAGER]
    lines = ["| | " + " | ".join(f"{'graph' if mode == 'cuda_graph' else mode}, {tokens}" for mode, tokens in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for shape in kernel_inputs.SHAPES:
        for dtype in shape.dtypes:
            cells = []
            for mode, tokens in columns:
                row = held[shape.name, dtype, tokens, mode]
                star = " \\*" if row["tactic"].startswith("sglang(") else ""
                cells.append(f"{row['ours_us']:.1f} ({row['ratio']:.2f}){star}")
            lines.append(f"| {shape.name} {dtype} | " + " | ".join(cells) + " |")
    means = [kernel_bars.geometric_mean(row["ratio"] for row in rows if (row["mode"], row["tokens"]) == column) for column in columns]
    lines.append("| geometric mean of the ratios | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    return lines


def kernel_lines(kept: Mapping[str, Any]) -> list[str]:
    """Markdown lines of `kernels`: the tables, and the bars that these rows judge."""
    lines = kernel_bars.tables(kept["kernels"], []).splitlines()
    return lines + [f"- {bar}" for bar in kernel_bars.bars(kept["kernels"], []) if bar.holds is not None]


def test_the_kept_file_says_how_it_was_made(kept: dict[str, Any]) -> None:
    assert kept["machine"]["gpu"] == kept["core_made_with"]["device"] == "NVIDIA H200"
    assert kept["versions"]["torch"].startswith("2.11")
    assert kept["versions"]["triton"] == kept["core_made_with"]["triton"] == "3.6.0"
    assert kept["peers"]["sglang_triton"] == kept["core_made_with"]["versions"]["sglang"] == "0.5.23"
    assert kept["command"].startswith("moe-dist bench kernels --peers sglang ")


def test_every_cell_was_timed_and_every_result_is_right(kept: dict[str, Any]) -> None:
    assert kernel_bars.objections(kept["kernels"], [], PLAN, PEERS) == []
    assert core_objections(kept["core"]) == []


def test_a_missing_cell_is_refused(kept: dict[str, Any]) -> None:
    for table, objections in (("kernels", lambda rows: kernel_bars.objections(rows, [], PLAN, PEERS)), ("core", core_objections)):
        rows = kept[table]
        for gone in (0, len(rows) // 2, len(rows) - 1):
            found = objections(rows[:gone] + rows[gone + 1 :])
            assert len(found) == 1
            assert found[0].startswith("no row for ")


# The bars of these rows: met or missed.
BARS: dict[str, bool] = {
    "bf16: host time of an eager call at one token": True,
    "bf16: errors no larger than the peers'": True,
    "bf16: every graph cell against SGLang": True,
    "bf16: geometric mean against SGLang": True,
    "fp8: host time of an eager call at one token": True,
    "fp8: errors no larger than the peers'": True,
    "fp8: every graph cell against SGLang": True,
    "fp8: geometric mean against SGLang": True,
    "core: every graph cell": True,
    "core: every eager cell": True,
    "core: errors": True,
}
# Where SGLang is faster than our kernels: (shape, dtype, tokens) of graph cells.
BELOW: set[tuple[str, str, int]] = set()


def test_these_bars_hold_and_these_do_not(kept: dict[str, Any]) -> None:
    judged = {bar.name: bar.holds for bar in kernel_bars.bars(kept["kernels"], []) if bar.holds is not None}
    assert judged | core_bars(kept["core"]) == BARS


def test_sglang_is_faster_in_these_cells_alone(kept: dict[str, Any]) -> None:
    below = {(row["shape"], row["dtype"], row["tokens"]) for row in kept["kernels"] if row["mode"] == "cuda_graph" and row["ratio"] < 1}
    assert below == BELOW


def test_the_document_shows_the_tables_and_bars_of_these_rows(kept: dict[str, Any]) -> None:
    text = (ROOT / "docs/performance.md").read_text().splitlines()
    said = [line for line in kernel_lines(kept) if line.startswith(("|", "- "))] + core_table(kept["core"])
    assert [line for line in said if line not in text] == []
