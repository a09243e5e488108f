"""The kernels beside their peers on one H200: no cell is missing, no result is wrong, and these bars hold and these do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench import kernel_bars, kernels

ROOT = Path(__file__).parents[2]
PEERS = {"vllm_triton": ["bf16", "fp8"], "vllm_deepgemm": ["fp8"], "torch_grouped_mm": ["bf16"], "sonicmoe": ["bf16"]}

# bf16's times are of the run up to 256 tokens, nine buckets: the whole ladder is still to be timed.
NOT_TIMED = [
    f"0 rows of tuning times for {shape.name} bf16 over its ladder of 15 buckets"
    for shape in kernels.Plan().shapes
    if "bf16" in shape.dtypes
]


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "docs/evidence/kernels-h200.json").read_text())
    return document


def test_the_kept_file_says_how_it_was_made(kept: dict[str, Any]) -> None:
    assert kept["machine"]["gpu"] == "NVIDIA H200"
    assert kept["versions"]["torch"].startswith("2.11")
    assert kept["versions"]["triton"] == "3.6.0"
    assert kept["peers"]["vllm_triton"] == kept["peers"]["vllm_deepgemm"] == "0.33.0"
    assert kept["command"].startswith("moe-dist bench kernels --peers ")


def test_every_cell_was_timed_and_every_result_is_right(kept: dict[str, Any]) -> None:
    rows = [row for row in kept["kernels"] if row["peer"] in PEERS]
    assert kernel_bars.objections(rows, kept["tuning"], kernels.Plan(), PEERS) == NOT_TIMED


def test_a_missing_cell_or_tuning_time_is_refused(kept: dict[str, Any]) -> None:
    rows = [row for row in kept["kernels"] if row["peer"] in PEERS]
    for gone in (0, len(rows) // 2, len(rows) - 1):
        found = kernel_bars.objections(rows[:gone] + rows[gone + 1 :], kept["tuning"], kernels.Plan(), PEERS)
        (new,) = set(found) - set(NOT_TIMED)
        assert new.startswith("no row for ")
    found = kernel_bars.objections(rows, [row for row in kept["tuning"] if row["shape"] != "deepseek-v3-ep8"], kernels.Plan(), PEERS)
    assert set(found) - set(NOT_TIMED) == {"0 rows of tuning times for deepseek-v3-ep8 fp8 over its ladder of 15 buckets"}


# The bars of these rows: met, missed, or judged by none of them.
BARS: dict[str, bool | None] = {
    "bf16: every graph cell against vLLM's best": True,
    "bf16: geometric mean over the graph cells": True,
    "bf16: geometric mean at one token": True,
    "bf16: over the floor, 4 to 256 tokens, geometric mean": True,
    "bf16: host time of an eager call at one token": True,
    "bf16: errors no larger than the peers'": False,
    "fp8: every graph cell against vLLM's best": False,
    "fp8: geometric mean over the graph cells": False,
    "fp8: geometric mean at one token": True,
    "fp8: over the floor, 4 to 256 tokens, geometric mean": True,
    "fp8: host time of an eager call at one token": True,
    "fp8: errors no larger than the peers'": True,
    "bf16: every graph cell of 4096 tokens and more against SonicMoE": False,
    "bf16: tuning a whole ladder, kernels cold": None,
    "bf16: tuning a whole ladder, kernels warm": None,
    "fp8: tuning a whole ladder, kernels cold": True,
    "fp8: tuning a whole ladder, kernels warm": True,
}
# Where a peer is faster: DeepGEMM, 32 wide experts.
BELOW = {("deepseek-v3-ep8", 1024), ("deepseek-v3-ep8", 4096), ("deepseek-v3-ep8", 16384)}


def test_these_bars_hold_and_these_do_not(kept: dict[str, Any]) -> None:
    assert {bar.name: bar.holds for bar in kernel_bars.bars(kept["kernels"], kept["tuning"])} == BARS


def test_only_sonicmoe_is_nearer_to_truth_and_by_three_percent(kept: dict[str, Any]) -> None:
    nearer = {}
    for row in kept["kernels"]:
        for routing, error in row.get("ours_error", {}).items():
            if error > kernel_bars.ERROR_TIE * row["peer_error"][routing]:
                nearer[row["peer"], row["shape"], row["tokens"], routing] = error / row["peer_error"][routing]
    assert {peer for peer, *_ in nearer} == {"sonicmoe"}
    assert max(nearer.values()) < 1.035
    assert len(nearer) == 3


def test_within_the_tie_sonicmoe_alone_is_nearer_by_any_amount_in_fifteen_more(kept: dict[str, Any]) -> None:
    ratios = [(row["peer"], error / row["peer_error"][routing]) for row in kept["kernels"] for routing, error in row["ours_error"].items()]
    within = [(peer, ratio) for peer, ratio in ratios if 1 < ratio <= kernel_bars.ERROR_TIE]
    assert (len(within), {peer for peer, _ in within}) == (15, {"sonicmoe"})


def test_a_peer_is_faster_in_three_cells_of_fp8_alone(kept: dict[str, Any]) -> None:
    best = {dtype: kernel_bars.best_peers(kept["kernels"], dtype, "cuda_graph", kernel_bars.VLLM) for dtype in kernels.DTYPES}
    assert {cell for cell, row in best["bf16"].items() if row["ratio"] < 1} == set()
    below = {cell: row["peer"] for cell, row in best["fp8"].items() if row["ratio"] < 1}
    assert below == dict.fromkeys(BELOW, "vllm_deepgemm")


def test_the_document_shows_the_tables_and_bars_of_these_rows(kept: dict[str, Any]) -> None:
    text = (ROOT / "docs/performance.md").read_text()
    said = [line for line in kernel_bars.tables(kept["kernels"], kept["tuning"]).splitlines() if line.startswith("|")]
    said += [f"- {bar}" for bar in kernel_bars.bars(kept["kernels"], kept["tuning"])]
    assert [line for line in said if line not in text.splitlines()] == []
