"""The kept evidence: no cell is missing and every bar holds. The judge itself is shown to refuse what it must."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench import report
from moe_dist.bench.agreement import ARMS, UNPROTECTED
from moe_dist.bench.faults import FAULTS
from moe_dist.tuning.policy import STRATEGIES

EVIDENCE = Path(__file__).parents[2] / "docs/evidence/agreement.json"
RANKS, KEYS, CALLS = (2, 4, 8), 50, 1000

# A table as it should be, whatever the machine that made the kept one.
DIVERGENCE: list[dict[str, Any]] = [
    {"strategy": arm, "ranks": ranks, "keys": KEYS, "calls": CALLS, "diverged": 30 if arm == UNPROTECTED else 0, "seconds": 1.0}
    for ranks in RANKS
    for arm in ARMS
]
MATRIX: list[dict[str, Any]] = [
    {
        "phase": fault.phase, "fault": fault.name, "strategy": strategy, "outcome": fault.outcome, "collective": fault.collective,
        "seconds": 2.0, "deadline_seconds": 30.0, "expected": fault.outcome, "previous_epoch": "intact", "restart": "agreed",
    }
    for fault in FAULTS
    for strategy in STRATEGIES
]  # fmt: skip


def diverged(rows: list[dict[str, Any]]) -> list[str]:
    return report.diverged_objections(rows, RANKS, KEYS, CALLS)


def test_the_kept_divergence_table_is_whole_and_no_key_diverges_under_any_strategy() -> None:
    assert diverged(json.loads(EVIDENCE.read_text())["divergence"]) == []


def test_the_kept_fault_matrix_is_whole_and_every_bar_holds() -> None:
    assert report.fault_objections(json.loads(EVIDENCE.read_text())["faults"]) == []


def test_the_kept_file_says_how_it_was_made() -> None:
    kept = json.loads(EVIDENCE.read_text())
    assert kept["command"] == "moe-dist bench agreement --ranks 2 4 8 --keys 50 --calls 1000 --faults"


def test_the_judge_accepts_what_is_right() -> None:
    assert diverged(DIVERGENCE) == []
    assert report.fault_objections(MATRIX) == []


@pytest.mark.parametrize("at", range(len(DIVERGENCE)))
def test_any_missing_row_of_the_divergence_table_is_refused(at: int) -> None:
    row = DIVERGENCE[at]
    assert diverged(DIVERGENCE[:at] + DIVERGENCE[at + 1 :]) == [f"no row for {row['strategy']} over {row['ranks']} ranks"]


def test_any_missing_row_of_the_matrix_is_refused() -> None:
    for at, row in enumerate(MATRIX):
        expected = [f"no row for {row['fault']} in {row['phase']} under {row['strategy']}"]
        assert report.fault_objections(MATRIX[:at] + MATRIX[at + 1 :]) == expected


def changed(rows: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """`rows` with the last one changed."""
    return [*rows[:-1], {**rows[-1], **fields}]


@pytest.mark.parametrize(
    ("fields", "objection"),
    [
        ({"diverged": 1}, "reload over 8 ranks: 1 keys diverged"),
        ({"diverged": None}, "reload over 8 ranks: None keys diverged"),
        ({"keys": 49}, "reload over 8 ranks: 49 keys in 1000 calls, not 50 in 1000"),
        ({"calls": 10}, "reload over 8 ranks: 50 keys in 10 calls, not 50 in 1000"),
        ({"strategy": "reduce"}, "two rows for reduce 8"),
    ],
)
def test_a_divergence_table_that_shows_less_is_refused(fields: dict[str, Any], objection: str) -> None:
    assert objection in diverged(changed(DIVERGENCE, **fields))


def test_a_table_whose_clocks_were_not_noisy_shows_nothing() -> None:
    rows = [{**row, "diverged": 0} for row in DIVERGENCE]
    assert diverged(rows) == [f"unprotected over {ranks} ranks: nothing diverged, so the clocks were not noisy" for ranks in RANKS]


WHERE = f"{FAULTS[-1].name} in {FAULTS[-1].phase} under {STRATEGIES[-1]}"


@pytest.mark.parametrize(
    ("fields", "objection"),
    [
        ({"outcome": "hang"}, f"{WHERE}: hang, not agreed"),
        ({"outcome": "differ: agreed; RankLost(1)"}, f"{WHERE}: differ: agreed; RankLost(1), not agreed"),
        # What a row claims to expect is not what it is judged by.
        ({"outcome": "RankLost(2)", "expected": "RankLost(2)"}, f"{WHERE}: RankLost(2), not agreed"),
        ({"collective": "served by gloo"}, f"{WHERE}: then a collective call was served by gloo, not served"),
        ({"seconds": 30.5}, f"{WHERE}: 30.5 s, past its deadline of 30.0 s"),
        ({"previous_epoch": "damaged"}, f"{WHERE}: the previous epoch is damaged"),
        ({"restart": "RankLost(1)"}, f"{WHERE}: after a restart RankLost(1)"),
    ],
)
def test_a_matrix_with_a_bar_that_does_not_hold_is_refused(fields: dict[str, Any], objection: str) -> None:
    assert report.fault_objections(changed(MATRIX, **fields)) == [objection]


@pytest.mark.parametrize(
    ("rows", "judge", "fields"),
    [(DIVERGENCE, diverged, report.DIVERGED_FIELDS), (MATRIX, report.fault_objections, report.FAULT_FIELDS)],
)
def test_a_missing_field_is_refused(rows: list[dict[str, Any]], judge: Callable[[Any], list[str]], fields: tuple[str, ...]) -> None:
    for name in fields:
        if name in ("phase", "fault", "strategy", "ranks"):
            continue  # they name the row
        stripped = [*rows[:-1], {key: value for key, value in rows[-1].items() if key != name}]
        assert any(f"no field {name}" in objection for objection in judge(stripped)), name


def test_a_slow_lookup_is_refused() -> None:
    rows = [{"part": "index", "lookups": 1, "nanoseconds": 1000.0}, {"part": "fast", "lookups": 1, "nanoseconds": 999.0}]
    assert report.lookup_objections(rows) == ["index takes 1000.0 ns; the bar is 1000"]


def test_a_file_has_one_row_a_line_and_reads_back(tmp_path: Path) -> None:
    content = report.document("the command", {"faults": MATRIX, "divergence": DIVERGENCE})
    report.write(tmp_path / "new/agreement.json", content)
    text = (tmp_path / "new/agreement.json").read_text()
    assert json.loads(text) == content
    assert len(text.splitlines()) == len(MATRIX) + len(DIVERGENCE) + 2 * 2 + 4 + 2
