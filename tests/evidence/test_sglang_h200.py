"""Our kernels beside SGLang's Triton path on one H200: no cell is missing, no result is wrong, and these bars hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench import kernel_bars, kernels

ROOT = Path(__file__).parents[2]
PEERS = {"sglang_triton": ["bf16", "fp8"]}
PLAN = kernels.Plan(ladder=False)


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "docs/evidence/sglang-h200.json").read_text())
    return document


def judged(kept: Mapping[str, Any]) -> list[kernel_bars.Bar]:
    """The bars that these rows judge."""
    return [bar for bar in kernel_bars.bars(kept["kernels"], []) if bar.holds is not None]


def test_the_kept_file_says_how_it_was_made(kept: dict[str, Any]) -> None:
    assert kept["machine"]["gpu"] == "NVIDIA H200"
    assert kept["versions"]["torch"].startswith("2.11")
    assert kept["versions"]["triton"] == "3.6.0"
    assert kept["peers"]["sglang_triton"] == "0.5.23"
    assert kept["command"].startswith("moe-dist bench kernels --peers sglang ")


def test_every_cell_was_timed_and_every_result_is_right(kept: dict[str, Any]) -> None:
    assert kernel_bars.objections(kept["kernels"], [], PLAN, PEERS) == []


def test_a_missing_cell_is_refused(kept: dict[str, Any]) -> None:
    rows = kept["kernels"]
    for gone in (0, len(rows) // 2, len(rows) - 1):
        found = kernel_bars.objections(rows[:gone] + rows[gone + 1 :], [], PLAN, PEERS)
        assert len(found) == 1
        assert found[0].startswith("no row for ")


def test_every_bar_holds_and_sglang_is_faster_nowhere(kept: dict[str, Any]) -> None:
    assert {bar.name: bar.holds for bar in judged(kept)} == dict.fromkeys(BARS, True)
    assert [row for row in kept["kernels"] if row["ratio"] < 1] == []


BARS = (
    "bf16: host time of an eager call at one token",
    "bf16: errors no larger than the peers'",
    "bf16: every graph cell against SGLang",
    "bf16: geometric mean against SGLang",
    "fp8: host time of an eager call at one token",
    "fp8: errors no larger than the peers'",
    "fp8: every graph cell against SGLang",
    "fp8: geometric mean against SGLang",
)


def test_the_document_shows_the_tables_and_bars_of_these_rows(kept: dict[str, Any]) -> None:
    text = (ROOT / "docs/performance.md").read_text().splitlines()
    said = [line for line in kernel_bars.tables(kept["kernels"], []).splitlines() if line.startswith("|")]
    said += [f"- {bar}" for bar in judged(kept)]
    assert [line for line in said if line not in text] == []
