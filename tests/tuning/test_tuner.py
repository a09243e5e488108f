"""A tuner alone: one pass from record to epoch, what a second process reuses, and what is refused with its reason."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeOperation, FakeProbe, tactic

import moe_dist as md
from moe_dist.distributed.epoch import published
from moe_dist.errors import ConfigError, NothingRunnable, TunerStateError
from moe_dist.stores.codec import decode_entry, encode_entry
from moe_dist.stores.degrade import Unavailable
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning.context import autotune
from moe_dist.tuning.measure import journal_key
from moe_dist.tuning.pass_terms import BUDGET_ENDED, NONE_WON, Limits
from moe_dist.tuning.policy import STRATEGIES, MeasurementPolicy
from moe_dist.tuning.problem import Bucket, BucketLadder, Cell, ProbeSpec, Tactic
from moe_dist.tuning.search import Race
from moe_dist.tuning.tuner import PassReport, Tuner

# Well apart, so that a loaded machine can't reorder them.
COSTS: Mapping[str, float | str] = {"plain": 30_000.0, "quick": 500.0}
POLICY = MeasurementPolicy(rounds=1, sweeps=2, window=timedelta(milliseconds=2))
ONE = BucketLadder((4,))


def make_tuner(**settings: Any) -> Tuner:
    return Tuner(**({"policy": POLICY, "ladder": ONE, "device": "cpu"} | settings))


def tune(operation: FakeOperation, **settings: Any) -> PassReport:
    with make_tuner(**settings) as tuner:
        tuner.record(operation)
        return tuner.run_pass()


def winners(report: PassReport) -> list[str | None]:
    return [str(row.winner.tactic["name"]) if row.winner else None for row in report.rows]


def runs(operation: FakeOperation) -> list[str]:
    return sorted(set(operation.calls))


class Outages(FilesystemStore):
    """A disk that takes nothing while `out`."""

    out = False

    def _write(self, key: str, value: bytes) -> None:
        if self.out:
            raise Unavailable("no space left")
        super()._write(key, value)


def test_an_epoch_that_could_not_be_published_is_said_once_an_outage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Outages(tmp_path)
    said = []
    with make_tuner(store=store) as tuner:
        for number, out in enumerate((False, True, True, False, True)):
            store.out = out
            tuner.record(FakeOperation(f"operation {number}", COSTS))
            tuner.run_pass()
            said.append(caplog.text.count("nobody can join until it is, or a later one"))
    assert said == [0, 1, 1, 1, 2]
    assert "epoch 2 could not be published" in caplog.text
    assert "epoch 5 could not be published" in caplog.text


# -- one pass --------------------------------------------------------------------------------------------------------------


class Unlisted(FakeOperation):
    """Its default is not among the candidates that it offers."""

    def candidates(self, bucket: Bucket, mode: str) -> list[Tactic]:
        return [tactic(name) for name in list(self.costs)[1:]]


def test_a_default_that_is_fastest_wins_though_nobody_listed_it() -> None:
    report = tune(Unlisted("a", {"plain": 500.0, "x": 30_000.0, "y": 40_000.0}))
    assert winners(report) == ["plain"]
    row = report.rows[0].winner
    assert row is not None
    assert (row.tactic, row.default, row.source) == (tactic("plain"), tactic("plain"), "tuned")
    assert row.tactic_us == row.default_us
    assert report.measured == 3


def test_a_report_keeps_every_rejected_candidate_with_its_reason() -> None:
    operation = FakeOperation("a", {"plain": 500.0, "big": 1.0, "bad": "raise", "slow": 90_000.0, "gone": 1.0},
                              objections={"gone": "no such kernel"}, workspaces={"big": 2048})  # fmt: skip
    report = tune(operation, workspace_limit=1024)
    reasons = {str(rejected["name"]): reason for _, rejected, reason in report.rejected}
    assert reasons["big"] == "rank 0: needs 2048 bytes of workspace; the limit is 1024"
    assert reasons["bad"] == "rank 0: ValueError: this tactic can't be compiled"
    assert reasons["gone"] == "rank 0: no such kernel"
    assert reasons["slow"].endswith("x the best after round 0")
    assert winners(report) == ["plain"]
    assert "big" not in operation.calls, "what is not in the plan is not run"


def test_nothing_runnable_is_an_error_and_changes_nothing() -> None:
    with make_tuner() as tuner:
        tuner.record(FakeOperation("a", COSTS, objections={"plain": "no", "quick": "no"}))
        before = tuner.epoch
        with pytest.raises(NothingRunnable, match=r"tokens 1-4: no candidate can run on all ranks: fake\(name=plain\): rank 0: no"):
            tuner.run_pass()
        assert tuner.epoch is before
        assert tuner.store.list("entries") == []


@pytest.mark.parametrize("strategy", ["reduce", "shard", "reload"])
def test_a_default_that_cannot_run_leaves_the_race_to_the_others(strategy: str) -> None:
    operation = FakeOperation("a", {"plain": 1.0, "x": 30_000.0, "y": 500.0}, objections={"plain": "needs a newer driver"})
    report = tune(operation, strategy=strategy)
    assert winners(report) == ["y"]
    assert "plain" not in operation.calls
    row = report.rows[0].winner
    assert row is not None
    assert row.default_us is None, "the default could not be timed"


def test_nothing_is_measured_outside_a_pass() -> None:
    operation = FakeOperation("a", COSTS)
    with make_tuner() as tuner:
        tuner.record(operation)
        assert not tuner.reload()
        assert operation.calls == []
        tuner.run_pass()
        assert runs(operation) == ["plain", "quick"]
        operation.calls.clear()
        tuner.record(FakeOperation("b", COSTS))
        tuner.reload()
        assert len(tuner.epoch.winners) == 1
        assert operation.calls == []


def test_equal_problems_are_one_record_and_the_first_is_kept() -> None:
    first, second = FakeOperation("a", COSTS), FakeOperation("a", COSTS)
    with make_tuner() as tuner:
        tuner.record(first)
        tuner.record(second)
        assert len(tuner.run_pass().rows) == 1
    assert first.calls
    assert not second.calls


def test_a_pass_extends_the_epoch_of_the_one_before() -> None:
    with make_tuner(ladder=BucketLadder((1, 4)), store=MemoryStore(), deployment="d") as tuner:
        tuner.record(FakeOperation("a", COSTS))
        first = tuner.run_pass([Bucket(1, 1)])
        assert [str(row.cell.bucket) for row in first.rows] == ["1"]
        tuner.record(FakeOperation("b", COSTS))
        second = tuner.run_pass()
        assert (second.measured, second.hits) == (2 * 3, 1)
        assert len(tuner.epoch.winners) == 4
        assert (first.epoch, second.epoch) == (1, 2)
        again = tuner.run_pass()
        assert (again.measured, again.hits, again.digest, again.epoch) == (0, 4, second.digest, 2), "nothing new: no other epoch"


@pytest.mark.parametrize(
    ("bounds", "passed", "left"),
    [
        ((2, 8), None, ["1-2", "3-8", "9-16"]),  # 1 and 2-4 are taken whole, of 5-16 the rest serves on
        ((2, 8), [Bucket(3, 8)], ["1", "2", "3-8", "9-16"]),  # of 2-4 the 2
        ((6, 8, 20), [Bucket(7, 8)], ["1", "2-4", "5-6", "7-8", "9-16"]),  # within 5-16: both sides of it
        ((1, 4, 16), None, ["1", "2-4", "5-16"]),
    ],
)
def test_another_ladder_leaves_each_token_count_one_winner(
    bounds: tuple[int, ...], passed: list[Bucket] | None, left: list[str], tmp_path: Path
) -> None:
    tune(FakeOperation("a", COSTS), store=str(tmp_path), ladder=BucketLadder((1, 4, 16)))
    other = FakeOperation("a", {"plain": 500.0, "quick": 30_000.0})  # another winner, so that it shows whose is served
    with make_tuner(store=str(tmp_path), ladder=BucketLadder(bounds), probe=ProbeSpec(seed=1)) as tuner:
        tuner.record(other)
        assert tuner.reload()
        report = tuner.run_pass(passed)
        served = tuner.epoch.of(other.problem, "eager")
        assert [str(bucket) for bucket in served] == left
        timed = {row.cell.bucket for row in report.rows}
        assert {bucket: str(winner.tactic["name"]) for bucket, winner in served.items()} == {
            bucket: "plain" if bucket in timed else "quick" for bucket in served
        }


def test_a_run_of_many_passes_leaves_the_last_epoch_and_the_one_before(tmp_path: Path) -> None:
    ladder = BucketLadder((1, 2, 4, 8))
    for run in ("cold", "warm"):
        with make_tuner(store=str(tmp_path), ladder=ladder) as tuner:
            tuner.record(FakeOperation("a", COSTS))
            tuner.reload()
            last = [tuner.run_pass([bucket]) for bucket in ladder.buckets()][-1]
        names = published(FilesystemStore(tmp_path), "default")
        assert [name.number for name in names] == [4, 3], run
        assert names[0].table == last.digest


def test_jobs_of_two_ladders_that_start_in_turn_leave_one_epoch_each(tmp_path: Path) -> None:
    for bounds in ((4,), (2,), (4,), (2,)):
        tune(FakeOperation("a", COSTS), store=str(tmp_path), ladder=BucketLadder(bounds))
    assert [name.number for name in published(FilesystemStore(tmp_path), "default")] == [2, 1]


def test_what_others_published_is_never_removed(tmp_path: Path) -> None:
    tune(FakeOperation("b", COSTS), store=str(tmp_path))
    with make_tuner(store=str(tmp_path), ladder=BucketLadder((1, 2, 4))) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        for bucket in tuner.ladder.buckets():
            tuner.run_pass([bucket])
    assert [name.number for name in published(FilesystemStore(tmp_path), "default")] == [4, 3, 1]


def test_an_epoch_that_more_passes_complete_is_shown_to_no_joiner(tmp_path: Path) -> None:
    ladder = BucketLadder((1, 4))
    first, second = ladder.buckets()

    def joined() -> int:
        with make_tuner(store=str(tmp_path), ladder=ladder) as joiner:
            joiner.record(FakeOperation("a", COSTS))
            joiner.reload()
            return len(joiner.epoch.winners)

    for start, numbers in (("cold", [2]), ("warm", [2]), ("warm", [2])):  # a start that measures nothing publishes nothing
        with make_tuner(store=str(tmp_path), ladder=ladder) as tuner:
            tuner.record(FakeOperation("a", COSTS))
            report = tuner.run_pass([first], publish=False)
            assert (report.hits, report.measured > 0) == ((0, True) if start == "cold" else (1, False))
            assert joined() == (0 if start == "cold" else 2), start
            tuner.run_pass([second])
            assert joined() == 2
        assert [name.number for name in published(FilesystemStore(tmp_path), "default")] == numbers, start


def test_a_bucket_outside_the_ladder_is_refused() -> None:
    with make_tuner() as tuner, pytest.raises(ConfigError, match=r"bucket 9 is not in the ladder \(4,\)"):
        tuner.run_pass([Bucket(9, 9)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "vote"}, "strategy is 'vote'; choose one of reduce, shard, reload"),
        ({"objective": "min"}, "objective is 'min'; choose one of max, mean"),
        ({"budget": timedelta(0)}, "budget is 0:00:00; it must be above 0"),
        ({"policy": MeasurementPolicy("cuda_graph")}, "policy 'cuda_graph' needs a CUDA device, not 'cpu'"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tuner(**settings)


def test_an_error_in_a_pass_leaves_the_previous_epoch_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_tuner() as tuner:
        tuner.record(FakeOperation("a", COSTS))
        tuner.run_pass()
        served = tuner.epoch
        broken = FakeOperation("b", COSTS)
        monkeypatch.setattr(FakeProbe, "check", lambda self, run: undefined_name)  # type: ignore[name-defined]  # noqa: F821
        tuner.record(broken)
        with pytest.raises(NameError):
            tuner.run_pass()
        assert tuner.epoch is served
        monkeypatch.undo()
        assert len(tuner.run_pass().rows) == 2, "alone, the next pass heals"


def test_a_closed_tuner_is_refused_and_still_serves() -> None:
    with make_tuner() as tuner:
        tuner.record(FakeOperation("a", COSTS))
        tuner.run_pass()
    with pytest.raises(TunerStateError, match="this tuner is closed; make another"):
        tuner.run_pass()
    with pytest.raises(TunerStateError, match="closed"):
        tuner.reload()
    assert len(tuner.epoch.winners) == 1


# -- contexts ---------------------------------------------------------------------------------------------------------------


def test_nested_autotune_is_refused_and_the_outer_one_goes_on() -> None:
    with autotune(policy=POLICY, ladder=ONE, device="cpu") as tuner:
        with pytest.raises(TunerStateError, match="autotune blocks can't nest"), autotune(device="cpu"):
            pass
        tuner.record(FakeOperation("a", COSTS))
    assert len(tuner.epoch.winners) == 1


def test_leaving_autotune_by_an_exception_tunes_nothing_and_the_next_block_works() -> None:
    operation = FakeOperation("a", COSTS)
    recorded = []

    def calibrate() -> None:
        with autotune(policy=POLICY, ladder=ONE, device="cpu") as tuner:
            recorded.append(tuner)
            tuner.record(operation)
            raise KeyError("calibration")

    with pytest.raises(KeyError, match="calibration"):
        calibrate()
    (tuner,) = recorded
    assert operation.calls == []
    assert tuner.epoch.winners == {}
    with autotune(policy=POLICY, ladder=ONE, device="cpu"):
        pass


def test_two_tuners_live_side_by_side() -> None:
    """Same problem, stores of their own: what one concludes is nothing to the other."""
    with make_tuner() as one, make_tuner() as two:
        one.record(FakeOperation("a", {"plain": 30_000.0, "quick": 500.0}))
        two.record(FakeOperation("a", {"plain": 500.0, "quick": 30_000.0}))
        first, second = one.run_pass(), two.run_pass()
        assert (winners(first), winners(second)) == (["quick"], ["plain"])
        assert one.epoch.digest != two.epoch.digest
        assert winners(one.run_pass()) == ["quick"], "and it stays so"


# -- what another process reuses ----------------------------------------------------------------------------------------------


def test_a_second_tuner_measures_nothing(tmp_path: Path) -> None:
    first = tune(FakeOperation("a", COSTS), store=str(tmp_path))
    again = FakeOperation("a", COSTS)
    second = tune(again, store=str(tmp_path))
    assert (first.measured, first.hits, second.measured, second.hits) == (2, 0, 0, 1)
    assert again.calls == []
    assert second.digest == first.digest
    assert second.rows[0].winner is not None
    assert second.rows[0].winner.source == "hit"


def test_another_environment_misses_and_overwrites_nothing(tmp_path: Path) -> None:
    tune(FakeOperation("a", COSTS), store=str(tmp_path), versions={"flashinfer": "1"})
    other = tune(FakeOperation("a", COSTS), store=str(tmp_path), versions={"flashinfer": "2"})
    assert (other.measured, other.hits) == (2, 0)
    back = tune(FakeOperation("a", COSTS), store=str(tmp_path), versions={"flashinfer": "1"})
    assert (back.measured, back.hits) == (0, 1)


def only_entry(path: Path) -> tuple[FilesystemStore, str, bytes]:
    store = FilesystemStore(path)
    (key,) = store.list("entries")
    value = store.get(key)
    assert value is not None
    return store, key, value


def test_a_stored_winner_that_why_not_refuses_is_a_miss_said_once_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tune(FakeOperation("a", COSTS), store=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        report = tune(FakeOperation("a", COSTS, objections={"quick": "needs 99 KB of shared memory"}), store=str(tmp_path))
    assert (report.measured, report.hits, winners(report)) == (1, 0, ["plain"])
    said = [record.getMessage() for record in caplog.records if "is a miss" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("the stored winner fake(name=quick) is a miss: needs 99 KB of shared memory")
    caplog.clear()
    assert tune(FakeOperation("a", COSTS, objections={"quick": "needs 99 KB of shared memory"}), store=str(tmp_path)).hits == 1
    assert not caplog.records, "the refused entry was replaced"


def test_a_stored_tactic_that_nobody_knows_any_more_is_a_miss(tmp_path: Path) -> None:
    tune(FakeOperation("a", {"plain": 30_000.0, "old": 500.0}), store=str(tmp_path))
    assert winners(tune(FakeOperation("a", COSTS), store=str(tmp_path))) == ["quick"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "misplaced", "empty"])
def test_a_damaged_entry_is_a_miss_said_once_and_is_replaced(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tune(FakeOperation("a", COSTS), store=str(tmp_path))
    store, key, value = only_entry(tmp_path)
    other = encode_entry(dataclasses.replace(decode_entry(value), key=b"another key"))
    store.put(
        key,
        {"truncated": value[:-1], "flipped": value[:40] + bytes([value[40] ^ 1]) + value[41:], "misplaced": other, "empty": b""}[damage],
    )
    with caplog.at_level(logging.WARNING):
        report = tune(FakeOperation("a", COSTS), store=str(tmp_path), deployment="fresh")
    assert (report.measured, report.hits, winners(report)) == (2, 0, ["quick"])
    assert len([record for record in caplog.records if "the stored entry is a miss: " in record.getMessage()]) == 1
    assert tune(FakeOperation("a", COSTS), store=str(tmp_path)).hits == 1


def test_reload_adopts_the_newest_epoch_and_measures_nothing(tmp_path: Path) -> None:
    served = tune(FakeOperation("a", COSTS), store=str(tmp_path), deployment="d")
    with make_tuner(store=str(tmp_path), deployment="d") as joiner:
        operation = FakeOperation("a", COSTS)
        joiner.record(operation)
        assert joiner.reload()
        assert (joiner.epoch.number, joiner.epoch.digest) == (served.epoch, served.digest)
        assert {winner.source for winner in joiner.epoch.winners.values()} == {"epoch"}
        assert joiner.run_pass().hits == 1, "the entries came with the epoch"
        assert operation.calls == []


def test_reload_of_another_deployment_finds_nothing(tmp_path: Path) -> None:
    tune(FakeOperation("a", COSTS), store=str(tmp_path), deployment="d")
    with make_tuner(store=str(tmp_path), deployment="e") as joiner:
        assert not joiner.reload()
        assert joiner.epoch.winners == {}


@pytest.mark.parametrize(
    ("settings", "operation", "reason"),
    [
        ({"versions": {"flashinfer": "2"}}, FakeOperation("a", COSTS), r"it was tuned in another environment: backends \(\), here \(\('flashinfer', '2'\),\)"),
        ({}, FakeOperation("a", COSTS, objections={"quick": "gone"}), r"tokens 1-4: fake\(name=quick\): gone"),
    ],
)  # fmt: skip
def test_an_epoch_that_cannot_be_served_here_is_not_adopted_and_the_reason_is_said(
    settings: dict[str, Any], operation: FakeOperation, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tune(FakeOperation("a", COSTS), store=str(tmp_path), deployment="d")
    with make_tuner(store=str(tmp_path), deployment="d", **settings) as joiner:
        joiner.record(operation)
        with caplog.at_level(logging.WARNING):
            assert not joiner.reload()
        assert joiner.epoch.winners == {}
    assert any("the committed epoch is not adopted: " in text for text in caplog.messages)
    assert re.search(reason, caplog.text)


# Local tactics are raced, those that talk to peers are not; what fails is out of no time.
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("costs", "untimed"),
    [
        ({"plain": 500.0, "quick": 300.0}, BUDGET_ENDED),
        ({"all-gloo": 500.0, "all-shot": 300.0}, BUDGET_ENDED),
        ({"all-gloo": "raise"}, NONE_WON),
        ({"plain": "raise"}, NONE_WON),
    ],
)
def test_a_cell_without_a_winner_says_whether_it_was_the_budget(costs: dict[str, Any], untimed: str, strategy: str) -> None:
    budget = timedelta(microseconds=1) if untimed == BUDGET_ENDED else None
    assert [row.untimed for row in tune(FakeOperation("a", costs), strategy=strategy, budget=budget).rows] == [untimed]
    assert [row.untimed for row in tune(FakeOperation("a", COSTS), strategy=strategy).rows] == [None]


# -- deaths -----------------------------------------------------------------------------------------------------------------

DIES = """
import sys
from datetime import timedelta
from fakes import FakeOperation
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner
policy = MeasurementPolicy(rounds=1, sweeps=2, window=timedelta(milliseconds=2))
with Tuner(store=sys.argv[1], policy=policy, ladder=BucketLadder((4,)), device="cpu") as tuner:
    tuner.record(FakeOperation("a", {"plain": 30_000.0, "killer": "exit", "quick": 500.0}))
    report = tuner.run_pass()
    print(report.rows[0].winner.tactic["name"])
    print(*[reason for _, tactic, reason in report.rejected if tactic["name"] == "killer"])
"""


def test_a_tactic_that_ends_the_process_twice_is_not_run_a_third_time(tmp_path: Path) -> None:
    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", DIES, str(tmp_path)], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip

    assert [start().returncode, start().returncode] == [9, 9]
    third = start()
    assert third.returncode == 0, third.stderr
    assert third.stdout.splitlines()[0] == "quick"
    assert "rank 0: it was running when its process died, at " in third.stdout


def test_the_default_is_never_quarantined() -> None:
    """It is what runs where nothing wins."""
    operation = FakeOperation("a", COSTS)
    cell = Cell(operation.problem, "eager", Bucket(1, 4))
    default = operation.default(cell.bucket, cell.mode)
    limits = Limits(None, {journal_key(cell, one): "it ended a process" for one in (default, tactic("quick"))})
    assert default != tactic("quick")
    assert limits.why_not(operation, cell, tactic("quick")) == "it ended a process"
    assert limits.why_not(operation, cell, default) is None


# -- serving: from the epoch only -----------------------------------------------------------------------------------------------


class Watched(MemoryStore):
    """Counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def get(self, key: str) -> bytes | None:
        self.asked.append(key)
        return super().get(key)

    def get_many(self, keys: Any) -> dict[str, bytes]:
        keys = list(keys)
        self.asked.extend(keys)
        return super().get_many(keys)

    def list(self, prefix: str) -> Any:
        self.asked.append(prefix)
        return super().list(prefix)


@pytest.fixture
def layer_and_store() -> tuple[md.MoEConfig, tuple[md.MoEActivationPack, md.MoEWeightPack], Watched]:
    config = md.MoEConfig(
        routing=md.RoutingConfig(4, 2), experts=md.ExpertConfig(hidden_size=16, intermediate_size=16), execution=md.ExecutionConfig(tune_max_num_tokens=4)
    )  # fmt: skip
    problem = md.MoEProblem.of(config, routed=True)
    weights = md.make_random_weights(problem, 0, 0, torch.device("cpu"))
    acts = md.MoEActivationPack(
        hidden_states=torch.randn(3, 16).bfloat16(), topk_ids=torch.tensor([[0, 1]] * 3).int(), topk_weights=torch.ones(3, 2)
    )
    return config, (acts, weights), Watched()


def test_serving_asks_the_store_nothing_though_it_holds_a_winner(layer_and_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another job put there is not served until a pass or a reload adopts it: else ranks that look at different moments differ."""
    config, tensors, store = layer_and_store
    problem = md.MoEProblem.of(config, routed=True)
    ladder = BucketLadder.powers_of_two(4)
    operation = md.MoEOperation(problem, tensors[1], torch.device("cpu"))

    def never_the_default(race: Race) -> Any:
        return next(found for tactic in race._times if tactic != race.default and (found := race.standing(tactic)) is not None)

    with make_tuner(store=store, ladder=ladder) as writer, monkeypatch.context() as rigged:
        rigged.setattr(Race, "winner", never_the_default)
        writer.record(operation)
        report = writer.run_pass()
    stored = {row.cell.bucket: row.winner.tactic for row in report.rows if row.winner}
    assert len(stored) == 3
    store.asked.clear()
    with make_tuner(store=store, ladder=ladder) as reader:
        layer = md.MoELayer(**config, tuner=reader).get_tuned_layer(tensors)
        for bucket in stored:
            assert layer.lookup(bucket.high) == operation.default(bucket, "eager") != stored[bucket]
        layer(tensors)
        assert store.asked == [], "neither the layer nor the tuner looks outside a pass"
        reader.run_pass()
        assert {bucket: layer.lookup(bucket.high) for bucket in stored} == stored
