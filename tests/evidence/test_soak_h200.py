"""Twenty minutes of mixed traffic over one real server on an H200: no request failed, and neither latency nor memory grew."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench.soak import soak_objections

ROOT = Path(__file__).parents[2]
BESIDE = 6  # windows in which tests ran on the same card
Windows = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def kept() -> Windows:
    rows: Windows = json.loads((ROOT / "docs/evidence/soak-h200.json").read_text())["soak"]
    return rows


def test_twenty_minutes_without_an_error_and_nothing_grows(kept: Windows) -> None:
    assert [row["window"] for row in kept] == list(range(20)), "a window is missing"
    assert soak_objections(kept) == []


def test_alone_on_its_card_latency_and_the_card_s_memory_stay_as_they_are(kept: Windows) -> None:
    """Stricter than `soak_objections`, whose first third has other processes on the card."""
    alone = kept[BESIDE:]
    first, last = (statistics.median(row["p50_ms"] for row in part) for part in (alone[:5], alone[-5:]))
    assert last <= 1.05 * first
    assert len({tuple(row["device_mib"]) for row in alone}) == 1


def test_the_document_says_what_the_windows_say(kept: Windows) -> None:
    said = " ".join((ROOT / "docs/performance.md").read_text().split())
    requests, tokens = sum(row["requests"] for row in kept), sum(row["tokens"] for row in kept)
    p50, p99 = ([row[name] for row in kept[BESIDE:]] for name in ("p50_ms", "p99_ms"))
    resident = [kept[index]["resident_mib"] for index in (0, BESIDE, -1)]
    assert f"{requests:,} requests with {tokens / 1e6:.2f} million tokens, none failed" in said
    assert f"50% within {min(p50):.0f} to {max(p50):.0f} ms and 99% within {min(p99):.0f} to {max(p99):.0f}" in said
    assert (
        f"resident memory {resident[0]:,} MiB after the first minute, {resident[1]:,} after the seventh, {resident[2]:,} at the end" in said
    )
