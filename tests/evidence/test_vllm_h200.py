"""vLLM's rows on H200s: no cell is missing, and these bars of served speed, memory, tuning time and agreement hold and those do not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench.engines import engine_objections

ROOT = Path(__file__).parents[2]
DTYPES, MODES, BATCHES = ("bf16", "fp8"), ("cuda_graph", "eager"), (1, 32, 256)
SLOW, NOT_FASTER = "below 0.98", "not above 1.05"
# The bars that are missed, of both throughput and latency; docs/performance.md says why. Every other bar of every cell holds.
MISSED = {
    ("bf16 cuda_graph batch 32", NOT_FASTER),
    ("fp8 cuda_graph batch 32", NOT_FASTER),
}


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs/evidence/vllm-h200.json").read_text())
    return found


def test_every_cell_is_there_and_these_bars_are_missed_alone(tables: dict[str, Any]) -> None:
    found = engine_objections(tables, DTYPES, MODES, BATCHES)
    missed = [re.fullmatch(rf"(.+) tp 1 ep 1: (?:throughput|latency) [^:]*({SLOW}|{NOT_FASTER}).*", line) for line in found]
    assert [line for line, known in zip(found, missed, strict=True) if known is None] == []
    assert {known.groups() for known in missed if known} == MISSED


def test_a_missing_cell_is_refused(tables: dict[str, Any]) -> None:
    for gone in range(len(tables["cells"])):
        cells = [row for index, row in enumerate(tables["cells"]) if index != gone]
        row = tables["cells"][gone]
        modes, batches, dtypes = (MODES, BATCHES, DTYPES) if row["tp"] == 1 else (["eager"], [32], ["bf16"])
        found = engine_objections(tables | {"cells": cells}, dtypes, modes, batches, row["tp"], row["ep"])
        assert f"no row for {row['dtype']} {row['mode']} batch {row['batch']} tp {row['tp']} ep {row['ep']}" in found


@pytest.mark.parametrize("ep", [1, 2])
def test_two_cards_serve_one_epoch_and_are_faster(ep: int, tables: dict[str, Any]) -> None:
    assert engine_objections(tables, ["bf16"], ["eager"], [32], 2, ep) == []
    ours = [row for row in tables["starts"] if (row["tp"], row["ep"], row["backend"]) == (2, ep, "moe_dist")][-1]
    assert ours["alike"]
    assert len(ours["epochs"]) == 1
    assert ours["experts"] == ["MoEDistExperts"]


def test_our_experts_ran(tables: dict[str, Any]) -> None:
    """A replayed graph calls nothing anew: there the captures count."""
    places = {(row["dtype"], row["mode"], row["tp"], row["ep"]) for row in tables["tokens"]}
    one_card = {(dtype, mode, 1, 1) for dtype in DTYPES for mode in MODES}
    assert places == one_card | {("bf16", "eager", 2, 1), ("bf16", "eager", 2, 2)}
    for row in tables["tokens"]:
        assert row["executed"]["captured" if row["mode"] == "cuda_graph" else "eager"] > 0, row


def test_no_layer_is_further_from_the_truth_than_stock_s(tables: dict[str, Any]) -> None:
    assert len(tables["errors"]) == 6
    for row in tables["errors"]:
        for ours, stock in zip(row["layer_moe_dist"], row["layer_auto"], strict=True):
            assert ours <= stock, row
        if row["dtype"] == "fp8":
            assert row["logits_moe_dist"] <= 1.1 * row["logits_auto"], row


def test_the_table_of_the_document_is_these_rows(tables: dict[str, Any]) -> None:
    text = (ROOT / "docs/performance.md").read_text()
    for row in tables["cells"]:
        (low, high), (least, most) = row["throughput_interval"], row["latency_interval"]
        layout = "" if row["tp"] == 1 else f", TP {row['tp']} EP {row['ep']}"
        line = (
            f"| {row['dtype']}{layout} | {row['mode']} | {row['batch']} | {row['tokens_per_s_auto']:.0f} | {row['tokens_per_s']:.0f} "
            f"| {row['throughput_ratio']:.2f} ({low:.2f} to {high:.2f}) | {row['latency_ratio']:.2f} ({least:.2f} to {most:.2f}) "
            f"| {row['moe_us_auto']:.0f} | {row['moe_us']:.0f} | {row['moe_us_auto'] / row['moe_us']:.2f} |"
        )
        assert line in text, line
