"""What ranks and keys cost as they grow: no cell of the grid is missing, which bars hold, and the document shows these rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench.scaling import (
    ANY,
    ATTACH,
    CASES,
    COLD,
    HOST,
    KEYS,
    LATE,
    LIMIT_S,
    NETWORK_BYTES_PER_S,
    ON_TIME,
    PROCESSES,
    RANKS,
    RELOAD,
    REQUESTS_PER_S,
    STEP_KEYS,
    STEPS,
    TIMING_S,
    TUNE,
    WARM,
    Traffic,
    rounds_of,
    simulate,
    simulate_reload,
    simulate_step,
    simulate_tuning,
)
from moe_dist.bench.servers import CLIENTS

ROOT = Path(__file__).parents[2]
KEPT: dict[str, Any] = json.loads((ROOT / "docs/evidence/scaling.json").read_text())
ROWS = {(row["phase"], row["strategy"], row["ranks"], row["keys"]): row for row in KEPT["scaling"]}
GRID = {(phase, strategy, ranks, keys) for phase, strategy in CASES for ranks in RANKS for keys in KEYS} | {
    (phase, ANY, ranks, STEP_KEYS) for phase in STEPS for ranks in RANKS
}
# Where one flat exchange a round, or each rank's own read of every entry, no longer serves; docs/scaling.md says what does.
BROKEN = {
    *((TUNE, strategy, 4096, keys) for strategy in ("reduce", "shard") for keys in KEYS),
    *((TUNE, "shard", 512, keys) for keys in KEYS),
    (ATTACH, ANY, 4096, 10_000),
    *((phase, ANY, 4096, STEP_KEYS) for phase in STEPS),
}


def shown(count: float) -> str:
    """Bytes as the document writes them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g} B"


def line(row: dict[str, Any]) -> str:
    cells = [
        row["phase"], row["strategy"], f"{row['ranks']:,}", f"{row['keys']:,}", row["how"], f"{row['requests']:,}", shown(row["said_bytes"]),
        shown(row["read_bytes"]), shown(row["server_bytes"]), f"{row['store_reads']:,}", shown(row["store_bytes"]), f"{row['seconds']:.3f}",
        f"{row['expected_s']:.2f}", "yes" if row["holds"] else "no",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def server_line(row: dict[str, Any]) -> str:
    cells = [row["server"], f"{row['clients']:,}", row["asks"], f"{row['requests']:,}", shown(row["bytes"]), f"{row['seconds']:.2f}"]
    return "| " + " | ".join([*cells, f"{row['requests_per_s']:,}", shown(row["bytes_per_s"]) + "/s"]) + " |"


def missing(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Cells of the grid that are not there exactly once."""
    found = [(row["phase"], row["strategy"], row["ranks"], row["keys"]) for row in rows]
    return sorted(cell for cell in GRID | set(found) if found.count(cell) != 1 or cell not in GRID)


def test_no_cell_is_missing_and_none_is_there_twice() -> None:
    assert KEPT["command"] == "moe-dist bench scaling --redis redis"
    assert (RANKS, KEYS) == ((8, 64, 512, 4096), (100, 1_000, 10_000))
    assert {strategy for phase, strategy in CASES if phase == TUNE} == {"reduce", "shard", "reload"}
    assert missing(KEPT["scaling"]) == []
    real = {row["how"] for row in KEPT["scaling"] if row["ranks"] <= PROCESSES and row["phase"] in (WARM, COLD, RELOAD)}
    assert real == {"processes"}


@pytest.mark.parametrize("phase", sorted({phase for phase, *_ in GRID}))
def test_a_missing_or_doubled_cell_is_refused(phase: str) -> None:
    rows = KEPT["scaling"]
    at = next(index for index, row in enumerate(rows) if row["phase"] == phase)
    cell = (phase, rows[at]["strategy"], rows[at]["ranks"], rows[at]["keys"])
    assert missing([*rows[:at], *rows[at + 1 :]]) == missing([*rows, rows[at]]) == [cell]


def test_which_bars_hold() -> None:
    for row in KEPT["scaling"]:
        assert row["limit_s"] == (row["keys"] * TIMING_S if row["phase"] == TUNE or row["phase"] in STEPS else LIMIT_S)
        answers = 0.0 if row["phase"] in STEPS else row["requests"] / REQUESTS_PER_S  # simulated
        parts = row["seconds"] + answers + (row["server_bytes"] + row["store_bytes"]) / NETWORK_BYTES_PER_S
        assert row["expected_s"] == pytest.approx(parts, abs=0.002)
        rounds = rounds_of(row["strategy"]) if row["phase"] == TUNE and row["strategy"] != "reload" else 0
        looking = row["keys"] * rounds * ROWS[ON_TIME, ANY, row["ranks"], STEP_KEYS]["seconds"]
        assert row["holds"] is (max(row["expected_s"], looking) <= row["limit_s"])
    assert {cell for cell, row in ROWS.items() if not row["holds"]} == BROKEN


def test_no_word_is_larger_than_a_tcp_store_takes() -> None:
    """It closes the connection over a value of more than 8 MiB, and the group is dead."""
    apart = [row for row in KEPT["scaling"] if row["phase"] in (WARM, COLD, RELOAD) or row["strategy"] == "reload"]
    assert max(row["said_bytes"] for row in apart) < 8 << 20


@pytest.mark.parametrize("phase", [WARM, COLD])
def test_the_kept_bytes_are_those_that_the_code_sends(phase: str) -> None:
    traffic, _ = simulate(512, 1_000, phase)
    assert sent(traffic) == pytest.approx(kept(phase, ANY), rel=0.1), "what zlib makes of the same bytes differs by its release"


def test_the_kept_bytes_of_tuning_and_reloading_are_those_that_the_code_sends() -> None:
    for strategy in ("reduce", "shard"):
        assert sent(simulate_tuning(512, 1_000, strategy)[0]) == kept(TUNE, strategy)
    for row, traffic in (
        (ROWS[TUNE, "reload", 512, 1_000], simulate_tuning(512, 1_000, "reload")[0]),
        (ROWS[RELOAD, ANY, 512, 1_000], simulate_reload(512, 1_000)[0]),
    ):
        assert (row["requests"], row["server_bytes"], row["store_reads"]) == (traffic.requests, traffic.server_bytes, traffic.store_reads)
        assert row["store_bytes"] == pytest.approx(traffic.store_bytes, rel=0.1)
        assert row["store_reads"] == 1 + 512 // HOST, "the leader, and one rank of each host"


def test_the_kept_steps_are_those_that_the_code_takes() -> None:
    for phase in STEPS:
        row, (traffic, seconds) = ROWS[phase, ANY, 64, STEP_KEYS], simulate_step(64, phase)
        assert (row["requests"], row["server_bytes"], row["seconds"]) == (traffic.requests, traffic.server_bytes, round(seconds, 3))
    late = [ROWS[LATE, ANY, ranks, STEP_KEYS]["requests"] / ranks for ranks in RANKS]
    assert late == sorted(late, reverse=True), "a rank asks less the more they are"


def sent(traffic: Traffic) -> tuple[int, int, int]:
    return traffic.requests, traffic.server_bytes, traffic.store_bytes


def kept(phase: str, strategy: str) -> tuple[int, int, int]:
    row = ROWS[phase, strategy, 512, 1_000]
    return row["requests"], row["server_bytes"], row["store_bytes"]


def test_the_servers_carry_what_is_expected_of_them() -> None:
    rows = {(row["server"], row["clients"]): row for row in KEPT["servers"]}
    assert set(rows) == {("rendezvous", min(CLIENTS)), *(("redis", clients) for clients in CLIENTS)}
    assert len(rows) == len(KEPT["servers"])
    assert rows["rendezvous", min(CLIENTS)]["requests_per_s"] >= REQUESTS_PER_S
    assert rows["redis", 4096 // HOST]["seconds"] < LIMIT_S, "one rank of each host"


def test_the_tables_of_the_document_are_these_rows() -> None:
    text = (ROOT / "docs/scaling.md").read_text().splitlines()
    shown_rows = [row for row in text if row.startswith(tuple(f"| {phase} |" for phase, *_ in GRID))]
    assert shown_rows == [line(row) for row in sorted(KEPT["scaling"], key=place)]
    assert [row for row in text if row.startswith(("| redis |", "| rendezvous |"))] == [server_line(row) for row in KEPT["servers"]]


def place(row: dict[str, Any]) -> tuple[int, int, int]:
    order = [*CASES, *((phase, ANY) for phase in STEPS)]
    return order.index((row["phase"], row["strategy"])), row["keys"], row["ranks"]
