"""The benchmarks run, small: noisy ranks that tune apart diverge and those that tune together don't; faults end as they must."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench import agreement, faults, report, server
from moe_dist.bench.fault_list import AGREED, BY_GLOO, DEADLINE_S, FAULTS, Fault
from moe_dist.bench.ranks import Outcome, Rank, Ranks
from moe_dist.bench.struck import struck_rank
from moe_dist.cli import bench
from moe_dist.cli.main import main
from moe_dist.errors import ConfigError
from moe_dist.tuning.tuner import Tuner


def test_ranks_that_tune_apart_diverge_and_no_strategy_does() -> None:
    """10 keys of 5 variants that cost nearly the same: that two ranks choose alike for all of them is next to impossible."""
    rows = agreement.diverged_table([2], keys=10, calls=120)
    assert [(row["strategy"], row["ranks"], row["keys"], row["calls"]) for row in rows] == [(arm, 2, 10, 120) for arm in agreement.ARMS]
    diverged = {row["strategy"]: row["diverged"] for row in rows}
    assert diverged.pop("unprotected") > 0
    assert set(diverged.values()) == {0}


@pytest.mark.parametrize(
    ("ranks", "keys", "calls", "message"),
    [
        ([2], 7, 10, "keys is 7; it must be a multiple of the 5 buckets of a problem"),
        ([2], 0, 10, "keys is 0"),
        ([1], 5, 10, "ranks is 1; divergence needs at least 2"),
        ([2], 5, 0, "calls is 0; it must be at least 1"),
    ],
)
def test_wrong_numbers_are_refused(ranks: list[int], keys: int, calls: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agreement.diverged_table(ranks, keys, calls)


def fault(phase: str, name: str) -> Fault:
    (found,) = [candidate for candidate in FAULTS if (candidate.phase, candidate.name) == (phase, name)]
    return found


# One of each kind of ending; `moe-dist bench agreement --faults` runs them all, in every strategy.
@pytest.mark.parametrize(
    ("phase", "name", "strategy"),
    [
        ("commit", "leader killed after its word", "reduce"),
        ("agree", "stopped, lost, then continued", "shard"),
        ("measure", "ended the process twice before", "reload"),
        ("reload", "another job publishes in between", "reload"),
        ("agree", "a pass within a pass", "reduce"),
        ("commit", "two passes at once", "reload"),
        ("measure", "two contexts at once", "shard"),
        ("commit", "store killed before the epoch", "reduce"),
        ("reload", "store killed", "shard"),
        ("measure", "another job publishes in between", "reload"),
        ("commit", "leader's disk full", "reload"),
        ("measure", "disk full", "shard"),
        ("measure", "out of memory in one tactic", "reduce"),
        ("measure", "out of memory for the probe", "shard"),
        ("measure", "killed for its memory twice before", "reduce"),
        ("commit", "no room for symmetric memory", "shard"),
        ("reload", "other candidates", "reduce"),
        ("commit", "leader killed after the commit", "shard"),
        ("measure", "killed in a collective", "reload"),
        ("measure", "late in a collective", "shard"),
        ("commit", "restarted alone with another release", "reload"),
        ("measure", "out of memory", "shard"),
        ("measure", "restarted alone", "shard"),
        ("reload", "store not shared", "reduce"),
    ],
)
def test_a_fault_ends_as_it_must(phase: str, name: str, strategy: str, request: pytest.FixtureRequest) -> None:
    if "disk full" in name:
        request.getfixturevalue("small_disks")
    wanted = fault(phase, name)
    (row,) = faults.fault_table([wanted], [strategy])
    assert (row["phase"], row["fault"], row["strategy"]) == (phase, name, strategy)
    assert (row["outcome"], row["collective"], row["previous_epoch"], row["restart"]) == (
        wanted.outcome,
        wanted.collective,
        "intact",
        "agreed",
    ), row
    assert row["seconds"] <= row["deadline_seconds"] == DEADLINE_S


def starts_slowly(seconds: float, rank: Rank, struck_by: Fault | None, *args: Any) -> dict[str, Any]:
    if struck_by is not None and rank.index == 2:
        time.sleep(seconds)
    return struck_rank(rank, struck_by, *args)


@pytest.mark.parametrize(
    ("takes_s", "start_s", "outcome", "less_s"),
    [
        (3.0, 60.0, "SettingsDiffer(1)", 3.0),  # from when all serve, which takes milliseconds
        (3600.0, 0.5, "hang before the fault: mark-serves-0 did not appear in 0 s", 30.0),
    ],
)
def test_what_a_start_takes_is_bounded_and_no_part_of_a_row(
    takes_s: float, start_s: float, outcome: str, less_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "struck_rank", functools.partial(starts_slowly, takes_s))
    monkeypatch.setattr(faults, "START_S", start_s)
    (row,) = faults.fault_table([fault("agree", "other GPU name")], ["reduce"])
    assert (row["outcome"], row["restart"]) == (outcome, "agreed")
    assert row["seconds"] < less_s


def never_ends(rank: Rank, fault: Fault | None, *args: Any) -> dict[str, Any]:
    """The culprit goes on for ever once it has met its fault, or where a wrong store first matters."""
    if fault is None or rank.index != fault.culprit:
        return struck_rank(rank, fault, *args)
    if fault.from_the_start:
        Tuner.reload = lambda tuner: time.sleep(3600.0)  # type: ignore[method-assign, assignment, return-value]
    try:
        return struck_rank(rank, fault, *args)
    finally:
        time.sleep(3600.0)


class GivesUpEarly(Ranks):
    """Rank 1, which never ends, is waited for for a second in place of half a minute."""

    def join_one(self, index: int, deadline: float) -> Outcome:
        return super().join_one(index, min(deadline, 1.0) if index == 1 else deadline)


# A culprit that leaves by an error of its own, one that was started again, and one that has its fault from the start.
def test_a_culprit_that_never_ends_makes_its_row_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "struck_rank", never_ends)
    monkeypatch.setattr(faults, "Ranks", GivesUpEarly)
    wanted = [fault("agree", "leaves by an exception"), fault("agree", "restarted alone"), fault("reload", "store not shared")]
    rows = faults.fault_table(wanted, ["reduce"])
    assert [row["outcome"] for row in rows] == ["hang: rank 1 still runs at its deadline"] * 3


def test_a_culprit_that_ends_otherwise_than_it_must_is_said(tmp_path: Path) -> None:
    left, lost = fault("agree", "leaves by an exception"), Outcome(error="RankWithdrawn", culprits=(1,))
    ended = {0: lost, 1: Outcome(error="KeyError"), 2: lost}
    assert faults._ending(left, tmp_path, ended, [0, 2]) == left.outcome
    ended[1] = Outcome(error="killed")
    assert faults._ending(left, tmp_path, ended, [0, 2]) == "RankWithdrawn(1); rank 1 itself: killed(), not KeyError()"


def test_what_the_peers_of_a_rank_started_again_were_told_is_part_of_its_row(tmp_path: Path) -> None:
    again, agreed = fault("agree", "restarted alone"), Outcome(value={"digest": "d", "ending": AGREED})
    ended = dict.fromkeys(range(3), agreed)
    (tmp_path / "told-0").write_text("RankLost(1)")
    assert faults._ending(again, tmp_path, ended, [0, 2]) == "RankLost(1); nothing, then agreed"
    (tmp_path / "told-2").write_text("RankLost(1)")
    assert faults._ending(again, tmp_path, ended, [0, 2]) == again.outcome
    ended[1] = Outcome(error="RankLost", culprits=(0, 2))
    assert faults._ending(again, tmp_path, ended, [0, 2]) == "RankLost(1), then differ: agreed; RankLost(0, 2); agreed"


def test_rows_come_in_order_however_many_are_made_at_once() -> None:
    """The second is done long before the first."""
    said: list[str] = []
    wanted = [fault("agree", "killed"), fault("agree", "leaves by an exception")]
    rows = faults.fault_table(wanted, ["reduce"], said.append)
    assert [row["fault"] for row in rows] == ["killed", "leaves by an exception"]
    assert [row["outcome"] for row in rows] == ["RankLost(1)", "RankWithdrawn(1)"]
    assert [line.split(", ")[1] for line in said] == ["fault killed", "fault leaves by an exception"]


# What attempts at a row come to, and how many are made: only what a stall has spoiled is tried again, and not for ever.
@pytest.mark.parametrize(("came", "attempts"), [(["served"], 1), ([BY_GLOO, "refused", "served"], 2), ([BY_GLOO] * 4, 3)])
def test_a_row_whose_ranks_were_left_with_gloo_is_made_again(came: list[str], attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = list(came)
    monkeypatch.setattr(faults, "_serve_first", lambda folder, strategy: "")
    monkeypatch.setattr(faults, "_row", lambda *given: {"collective": left.pop(0)})
    (row,) = faults.fault_table([fault("agree", "late")], ["reduce"])
    assert (row["collective"], len(came) - len(left)) == (came[attempts - 1], attempts)


@pytest.mark.parametrize(
    ("came", "attempts"), [([AGREED], 1), ([BY_GLOO, AGREED], 2), ([BY_GLOO] * 4, 3), (["agreed, untuned", AGREED], 1)]
)
def test_an_epoch_with_gloo_is_tuned_again_from_nothing(
    came: list[str], attempts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[bool] = []

    def run_ranks(*given: Any, deadline: float) -> list[Outcome]:
        found.append((tmp_path / "store").exists())
        (tmp_path / "store").mkdir(exist_ok=True)
        return [Outcome(value={"digest": "d", "ending": came[len(found) - 1]})] * 3

    monkeypatch.setattr(faults, "run_ranks", run_ranks)
    if came[attempts - 1] == AGREED:
        assert faults._serve_first(tmp_path, "reduce") == str(tmp_path / "store")
    else:
        with pytest.raises(RuntimeError, match=f"without a fault the ranks ended {came[attempts - 1]} under reduce"):
            faults._serve_first(tmp_path, "reduce")
    assert found == [False] * attempts


def test_what_a_collective_call_must_come_to_after_a_fault() -> None:
    assert fault("measure", "stopped in a collective").collective == "refused", "the group is dead"
    assert fault("commit", "leader killed after the commit").collective == "RankLost(0)", "the group does not know yet"
    assert fault("agree", "other GPU name").collective == "served", "the previous epoch, by all ranks"
    assert fault("measure", "late in a collective").collective == "served"


PHASES = ("agree", "measure", "commit", "reload")


def test_faults_cover_every_phase_and_are_named_once() -> None:
    """What can strike at any time is in every phase; what a pass times, or concludes, can go wrong only there."""
    phases: dict[str, list[str]] = {}
    for each in FAULTS:
        phases.setdefault(each.name, []).append(each.phase)
    anywhere = {name for name, found in phases.items() if tuple(found) == PHASES}
    assert anywhere == {
        "killed", "leader killed", "restarted alone", "restarted alone with another release", "stopped", "stopped and continued",
        "stopped, lost, then continued", "late", "leaves by an exception",
        "out of memory", "disk full", "leader's disk full", "store killed", "another job publishes in between", "two contexts at once",
        "two passes at once", "a pass within a pass", "late words of an old pass",
    }  # fmt: skip
    assert {name: found for name, found in phases.items() if name not in anywhere and len(found) > 1} == {
        "other software version": ["agree", "reload"],
        "other GPU name": ["agree", "reload"],
        "other candidates": ["agree", "reload"],
    }
    assert len({(fault.phase, fault.name) for fault in FAULTS}) == len(FAULTS)


def test_a_row_whose_fault_can_not_be_made_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "why_no_small_disk", lambda: "PermissionError: unshare: Operation not permitted")
    wanted = fault("agree", "disk full")
    (row,) = faults.fault_table([wanted], ["reduce"])
    said = [line for line in report.fault_objections([row]) if "no row" not in line]
    assert said[0] == (
        "disk full in agree under reduce: not made: no small disk can be mounted here: PermissionError: unshare: Operation not permitted,"
        " not agreed"
    )


def test_one_command_writes_both_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With one of the faults: it is then said that the others' rows are missing."""
    one = fault("commit", "leaves by an exception")
    monkeypatch.setattr(bench, "fault_table", lambda note: faults.fault_table([one], ["shard"], note))
    path = tmp_path / "table.json"
    assert main(["bench", "agreement", "--ranks", "4", "--keys", "5", "--calls", "50", "--faults", "--json", str(path)]) == 1
    kept = json.loads(path.read_text())
    assert kept["command"] == "moe-dist bench agreement --ranks 4 --keys 5 --calls 50 --faults"
    assert [(row["strategy"], row["ranks"], row["keys"], row["calls"]) for row in kept["divergence"]] == [
        (arm, 4, 5, 50) for arm in agreement.ARMS
    ]
    assert all(set(row) == set(report.DIVERGED_FIELDS) for row in kept["divergence"])
    (row,) = kept["faults"]
    assert set(row) == set(report.FAULT_FIELDS)
    assert (row["phase"], row["fault"], row["strategy"], row["outcome"]) == (
        "commit",
        "leaves by an exception",
        "shard",
        "RankWithdrawn(1)",
    )
    assert row["seconds"] <= row["deadline_seconds"]
    said = capsys.readouterr().err
    assert "moe-dist bench: no row for leaves by an exception in commit under reduce" in said


def test_without_a_server_to_kill_no_row_is_begun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "agreement", "--ranks", "2", "--keys", "5", "--calls", "1", "--faults"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("moe-dist: no Redis server that could be started and killed, or no redis-py, is installed here; install")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_the_lookup_benchmark_writes_its_table(tmp_path: Path) -> None:
    """That it runs; how long a lookup takes is the benchmark's to say, on a machine that is not busy with tests."""
    assert main(["bench", "lookup", "--json", str(tmp_path / "lookup.json")]) in (0, 1)
    kept = json.loads((tmp_path / "lookup.json").read_text())
    assert kept["command"] == "moe-dist bench lookup"
    assert [(row["part"], row["lookups"]) for row in kept["lookup"]] == [("index", 10_000), ("MoELayer.lookup", 10_000)]
    assert all(row["nanoseconds"] > 0 for row in kept["lookup"])


def test_a_wrong_command_line_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "agreement", "--ranks", "2", "--keys", "7"]) == 2
    assert capsys.readouterr().err == "moe-dist: keys is 7; it must be a multiple of the 5 buckets of a problem\n"


NO_FOLDER = "--json '/nosuch/out.json': the folder '/nosuch' does not exist; make it, or name another place\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agreement", "--ranks", "2", "0"], "ranks is 0; divergence needs at least 2"),
        (["scaling", "--ranks", "0", "--keys", "10"], "ranks is 0; scaling needs at least 2"),
        (["scaling", "--ranks", "8", "1", "--keys", "10"], "ranks is 1; scaling needs at least 2"),
        (["scaling", "--ranks", "2", "--keys", "10", "0"], "keys is 0; scaling needs at least 1"),
        (["scaling", "--redis", "redis://127.0.0.1:1"], "store redis://127.0.0.1:1"),
        (["scaling", "--redis", "redis://:secret@127.0.0.1:1"], "--redis: name one server, without TLS or a password: redis://HOST:PORT"),
        # Written only in the end, and so refused before: of every kind, by one check.
        (["agreement", "--json", "/nosuch/out.json"], NO_FOLDER),
        (["scaling", "--json", "/nosuch/out.json"], NO_FOLDER),
        (["kernels", "--device", "cpu", "--json", "/nosuch/out.json"], NO_FOLDER),
        (["stores", "memory:", "--json", "/nosuch/out.json"], NO_FOLDER),
        (["vllm", "--json", "/nosuch/out.json"], NO_FOLDER),
        (["vllm", "--json", "/tmp/out.json", "--logs", "/nosuch/logs"], "--logs '/nosuch/logs': the folder '/nosuch' does not exist"),
        (["kernels", "--merge", "/nosuch/part.json"], "argument --merge: there is no file '/nosuch/part.json' in /"),
        (["soak", "--model", "m", "--json", "/proc/out.json"], "--json '/proc/out.json' can't be written: "),
        (["soak", "--model", "m", "--json", "/proc"], "--json '/proc' is a folder; name a file"),
    ],
)
def test_what_could_not_end_well_is_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"moe-dist: {message}")
    assert said.err.count("\n") == 1
    assert said.out == ""
