"""The judge of the kept evidence refuses what it must: a missing cell, a missing field, a bar that does not hold."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench import report
from moe_dist.bench.agreement import ARMS, UNPROTECTED
from moe_dist.bench.fault_list import FAULTS
from moe_dist.bench.persistence import LIMITS_S, STORES
from moe_dist.tuning.policy import STRATEGIES

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

STORE_ROWS: list[dict[str, Any]] = [
    {
        "store": store, "what": what, "count": count, "median_s": limit_s / 2, "worst_s": 2 * limit_s, "limit_s": limit_s, "holds": True,
        "load": 0.5,
    }
    for store in STORES
    for what, (count, limit_s) in LIMITS_S.items()
]  # fmt: skip


def stores(rows: list[dict[str, Any]]) -> list[str]:
    return report.store_objections(rows, STORES)


def diverged(rows: list[dict[str, Any]]) -> list[str]:
    return report.diverged_objections(rows, RANKS, KEYS, CALLS)


def test_the_judge_accepts_what_is_right() -> None:
    assert diverged(DIVERGENCE) == []
    assert report.fault_objections(MATRIX) == []
    assert stores(STORE_ROWS) == []


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


@pytest.mark.parametrize("at", range(len(STORE_ROWS)))
def test_any_missing_row_of_the_stores_is_refused(at: int) -> None:
    row = STORE_ROWS[at]
    assert stores(STORE_ROWS[:at] + STORE_ROWS[at + 1 :]) == [f"no row for {row['what']} from {row['store']}"]


@pytest.mark.parametrize(
    ("fields", "objections"),
    [
        # The median of what was really measured is what the bar is for; the worst is only shown.
        ({"median_s": 0.051, "holds": False}, ["first reload from layered: 0.051 s; the bar is 0.05 s"]),
        ({"median_s": 0.05, "holds": True}, ["first reload from layered: 0.05 s against 0.05 s is said to hold: True", "first reload from layered: 0.05 s; the bar is 0.05 s"]),
        ({"limit_s": 0.5}, ["first reload from layered: 0.025 s against 0.5 s is said to hold: True"]),
        ({"count": 999}, ["first reload from layered: of 999, not 1000"]),
        ({"store": "file"}, ["two rows for file first reload", "no row for first reload from layered"]),
    ],
)  # fmt: skip
def test_a_table_of_stores_that_shows_less_is_refused(fields: dict[str, Any], objections: list[str]) -> None:
    assert stores(changed(STORE_ROWS, **fields)) == objections


@pytest.mark.parametrize(
    ("rows", "judge", "fields"),
    [
        (DIVERGENCE, diverged, report.DIVERGED_FIELDS),
        (MATRIX, report.fault_objections, report.FAULT_FIELDS),
        (STORE_ROWS, stores, report.STORE_FIELDS),
    ],
)
def test_a_missing_field_is_refused(rows: list[dict[str, Any]], judge: Callable[[Any], list[str]], fields: tuple[str, ...]) -> None:
    for name in fields:
        if name in ("phase", "fault", "strategy", "ranks", "store", "what"):
            continue  # they name the row
        stripped = [*rows[:-1], {key: value for key, value in rows[-1].items() if key != name}]
        assert any(f"no field {name}" in objection for objection in judge(stripped)), name


def test_a_slow_lookup_is_refused() -> None:
    rows = [{"part": "index", "lookups": 1, "nanoseconds": 1000.0}, {"part": "fast", "lookups": 1, "nanoseconds": 999.0}]
    assert report.lookup_objections(rows) == ["index takes 1000.0 ns; the bar is 1000"]


def test_a_file_has_one_row_a_line_and_reads_back(tmp_path: Path) -> None:
    content = report.document("the command", {"faults": MATRIX, "divergence": DIVERGENCE})
    report.write(tmp_path / "agreement.json", content)
    text = (tmp_path / "agreement.json").read_text()
    assert json.loads(text) == content
    assert len(text.splitlines()) == len(MATRIX) + len(DIVERGENCE) + 2 * 2 + 4 + 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "plain"),
    [
        (io.StringIO(), True),  # a pipe
        (Terminal(), False),  # 80 columns hold this
    ],
)
def test_a_narrow_table_is_drawn_on_a_terminal_alone(out: io.StringIO, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    report.show("few", [{"ranks": 8, "case": "one host"}, {"ranks": 64, "case": "all"}], out)
    lines = out.getvalue().splitlines()
    assert (lines == ["few", "ranks\tcase", "8\tone host", "64\tall"]) is plain
    assert any("┃" in line for line in lines) is not plain


def test_a_table_wider_than_the_terminal_is_printed_plainly_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    row = {f"a_long_name_{at}": 1_000_000 + at for at in range(13)}  # as many as scaling has
    out = Terminal()
    report.show("many", [row], out)
    assert out.getvalue().splitlines() == ["many", "\t".join(row), "\t".join(map(str, row.values()))]


def test_no_rows_are_a_title(capsys: pytest.CaptureFixture[str]) -> None:
    report.show("none", [])
    assert capsys.readouterr().out == "none\n"
