"""Which committed epoch a group adopts, where groups that tune different problems share a deployment and a store."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeOperation, tactic
from torch._C._distributed_c10d import HashStore

from moe_dist.distributed import epoch
from moe_dist.distributed.group import RankGroup
from moe_dist.errors import PassAborted
from moe_dist.stores.codec import decode_epoch, encode_epoch
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning import adoption
from moe_dist.tuning.adoption import adopt_newest, choose_committed
from moe_dist.tuning.identity import build_environment
from moe_dist.tuning.journal import Journal
from moe_dist.tuning.measure import journal_key
from moe_dist.tuning.pass_terms import Limits
from moe_dist.tuning.pins import Pins
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Bucket, BucketLadder, Cell, Epoch, Problem, Tactic, Winner, Workspace, digest
from moe_dist.tuning.tuner import Tuner


def problem(name: str) -> Problem:
    return Problem.of("fake", name=name)


def digests(names: Iterable[str]) -> set[str]:
    return {digest(problem(name).packed) for name in names}


WON = Winner(tactic("quick"), 1.0, tactic("plain"), 2.0, "tuned")


def committed(number: int, names: str, *, won: str = "quick") -> Epoch:
    """An epoch whose winners are of the problems `names`, one letter each."""
    winner = dataclasses.replace(WON, tactic=tactic(won))
    return Epoch(number, "d", {Cell(problem(name), "eager", Bucket(1, 4)): winner for name in names})


def store_of(*epochs: Epoch) -> MemoryStore:
    store = MemoryStore()
    for table in epochs:
        epoch.publish(store, table, encode_epoch(table, {}))
    return store


HERE, THERE, NOWHERE = (digest(name) for name in ("here", "there", "nowhere"))  # of environments


class CountingStore(MemoryStore):
    """Counts the values that it is asked for."""

    read = 0

    def get(self, key: str) -> bytes | None:
        self.read += 1
        return super().get(key)


def tuned_in(store: MemoryStore, table: Epoch, *environments: str, named: bool = True) -> None:
    """Publish an epoch with an entry for each of `environments`. named: its key says them, too."""
    entries = {f"entries/{environment}/{digest('key')}": b"entry" for environment in environments}
    epoch.publish(store, table, encode_epoch(table, entries), environments if named else ())


# Stages 0 and 1 of a pipeline publish in turn; replicas tune both; a deployment has grown.
@pytest.mark.parametrize(
    ("epochs", "wanted", "number"),
    [
        ([(1, "a"), (2, "b")], "a", 1),
        ([(1, "a"), (2, "b"), (3, "a"), (4, "b")], "a", 3),
        ([(1, "a"), (2, "b")], "b", 2),
        ([(1, "ab"), (2, "b")], "ab", 1),  # the most of what is wanted, before the newest
        ([(1, "ab"), (2, "abc")], "ab", 2),
        ([(1, "a"), (1, "b")], "b", 1),  # the same number, published at once
        ([(1, "a"), (2, "ab")], "", 2),  # nothing recorded: a deployment that grew is one deployment
    ],
)
def test_the_newest_epoch_that_holds_what_is_wanted_is_chosen(epochs: list[tuple[int, str]], wanted: str, number: int) -> None:
    store = store_of(*(committed(number, names) for number, names in epochs))
    found, _ = choose_committed(store, "d", digests(wanted))
    assert found is not None
    assert found.epoch.number == number
    assert digests(wanted) <= found.problems


@pytest.mark.parametrize(
    ("epochs", "number"),
    [
        ([(1, "a", 4), (2, "a", 2)], 1),  # a job of a shorter ladder, or a run that was ended early, is newer
        ([(1, "a", 2), (2, "a", 4)], 2),
        ([(1, "a", 4), (2, "a", 2), (3, "a", 4)], 3),  # the same cells: the newest
        ([(1, "a", 4), (2, "ab", 2)], 2),  # the problems go before their buckets
        ([(1, "a", 2), (2, "a", 1), (3, "b", 4)], 1),  # another problem's buckets are none of these
    ],
)
def test_of_epochs_of_one_problem_the_one_that_covers_most_of_the_own_ladder_is_chosen(
    epochs: list[tuple[int, str, int]], number: int
) -> None:
    ladder = BucketLadder((1, 2, 4, 8)).buckets()
    tables = [
        Epoch(number, "d", {Cell(problem(name), "eager", bucket): WON for name in names for bucket in ladder[:count]})
        for number, names, count in epochs
    ]
    wanted = "ab" if any(names == "ab" for _, names, _ in epochs) else "a"
    found, _ = choose_committed(store_of(*tables), "d", digests(wanted), (), {("eager", bucket) for bucket in ladder})
    assert found is not None
    assert found.epoch.number == number


def test_a_joiner_keeps_its_ladder_when_a_job_of_another_publishes(tmp_path: Path) -> None:
    policy = MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1))
    operation = FakeOperation("a", {"plain": 3000.0, "quick": 300.0})

    def tuner(*bounds: int) -> Tuner:
        made = Tuner(store=str(tmp_path), policy=policy, ladder=BucketLadder(bounds), device="cpu")
        made.record(operation)
        return made

    for bounds in ((1, 4, 16, 64), (1, 4)):
        with tuner(*bounds) as job:
            job.run_pass()
    with tuner(1, 4, 16, 64) as joiner:
        assert joiner.reload()
        assert [bucket.high for bucket in joiner.epoch.of(operation.problem, "eager")] == [1, 4, 16, 64]


# -- what is served is not left for what it superseded, nor for what a rank refuses ------------------------------------------------


# (number, problems, buckets of the ladder): what is stored, what is served, and what is chosen; None: nothing.
@pytest.mark.parametrize(
    ("stored", "served", "number"),
    [
        ([(1, "a", 4), (2, "a", 2)], (2, "a", 2), 2),  # what was superseded covers more
        ([(1, "a", 4)], (2, "a", 2), None),  # the epoch served could not be published
        ([(1, "a", 4), (2, "a", 2), (3, "a", 3)], (2, "a", 2), 3),
        ([(1, "a", 4), (2, "a", 2), (3, "a", 1)], (2, "a", 2), 2),  # newer, and fewer
        ([(2, "a", 4)], (2, "a", 2), 2),  # published by another at the same moment
        ([(1, "ab", 2), (2, "a", 4)], (2, "a", 4), 1),  # the only one that has a problem which is run here, too
        ([(1, "ab", 4), (2, "ab", 2)], (2, "ab", 2), 2),
        ([(1, "abc", 4), (2, "ab", 2)], (2, "ab", 2), 2),  # which nobody runs here
    ],
)
def test_no_epoch_is_left_for_one_that_it_superseded(
    stored: list[tuple[int, str, int]], served: tuple[int, str, int], number: int | None
) -> None:
    ladder = BucketLadder((1, 2, 4, 8)).buckets()

    def table(number: int, names: str, count: int) -> Epoch:
        return Epoch(number, "d", {Cell(problem(name), "eager", bucket): WON for name in names for bucket in ladder[:count]})

    store, run = store_of(*(table(*each) for each in stored)), {("eager", bucket) for bucket in ladder}
    found, reason = choose_committed(store, "d", digests("ab"), (), run, table(*served))
    assert (found and found.epoch.number) == number
    ours = next(iter(digests("a")))[:8]
    older = f"epoch 2 of problems {ours} is served here, and the newest of deployment 'd' is older: epoch 1 of problems {ours}; tune here, or open another tuner to take that over"
    assert reason == ("" if found else older)


POLICY = MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(milliseconds=1))
COSTS = {"plain": 3000.0, "quick": 300.0}


def tuner_of(store: Path, operation: FakeOperation, *bounds: int, **settings: Any) -> Tuner:
    made = Tuner(store=str(store), policy=POLICY, ladder=BucketLadder(bounds), device="cpu", **settings)
    made.record(operation)
    return made


# The second job's pass is of the first bucket; or of both, where the other's winner needs more workspace than there is, and another more time.
@pytest.mark.parametrize(
    ("settings", "passed"), [({}, 1), ({"workspace_limit": 10, "budget": timedelta(microseconds=1)}, 2)], ids=["a part", "budget and limit"]
)
def test_a_rank_that_serves_less_than_was_there_before_does_not_go_back(settings: Mapping[str, Any], passed: int, tmp_path: Path) -> None:

    class Growing(FakeOperation):
        def workspace(self, wanted: Tactic, num_tokens: int) -> Workspace:
            return Workspace(num_tokens if wanted == tactic("quick") else 0)

    operation = Growing("a", COSTS)
    with tuner_of(tmp_path, operation, 4, 16) as first:
        first.run_pass()
        assert [bucket.high for bucket in first.epoch.of(operation.problem, "eager")] == [4, 16]
    with tuner_of(tmp_path, operation, 4, 16, **settings) as second:
        second.run_pass(second.ladder.buckets()[:passed])
        assert second.reload(), "its own is the newest"
        assert (second.epoch.number, [bucket.high for bucket in second.epoch.of(operation.problem, "eager")]) == (2, [4])
    with tuner_of(tmp_path, operation, 4, 16) as joiner:
        assert joiner.reload()
        assert joiner.epoch.number == 1, "who has room joins with the most of what it runs"


def test_a_rank_whose_own_epoch_could_not_be_published_keeps_it_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tuner_of(tmp_path, FakeOperation("a", COSTS), 4, 16) as first:
        first.run_pass()
    with tuner_of(tmp_path, FakeOperation("a", {"plain": 300.0}), 4) as second:
        second.run_pass(publish=False)
        with caplog.at_level(logging.WARNING):
            assert not second.reload()
        assert second.epoch.number == 2
    assert "the newest of deployment 'default' is older: epoch 1 of problems" in caplog.text


def test_a_rank_that_serves_is_told_that_the_store_has_no_epoch_any_more_and_one_that_serves_none_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tuner_of(tmp_path, FakeOperation("a", COSTS), 4) as tuner, caplog.at_level(logging.INFO):
        assert not tuner.reload()
        assert caplog.text == ""
        tuner.run_pass()
        shutil.rmtree(tmp_path)
        assert not tuner.reload()
        assert tuner.epoch.number == 1
    said = f"deployment 'default' has no epoch any more; epoch 1 of problems {next(iter(digests('a')))[:8]} is served on"
    assert [(record.levelname, said in record.getMessage()) for record in caplog.records] == [("WARNING", True)]


DIES = """
import os, sys
from moe_dist.tuning.journal import Journal
with Journal(*sys.argv[1:3]).running(sys.argv[3]):
    os._exit(9)
"""


# What a candidate and a stored entry are refused for, an epoch is, too: (settings of the joiner, deaths of the winner here, the reason).
@pytest.mark.parametrize(
    ("settings", "deaths", "reason"),
    [
        ({"workspace_limit": 10}, 0, "tokens 1-4: fake(name=quick): needs 11 bytes of workspace; the limit is 10"),
        ({}, 2, "tokens 1-4: fake(name=quick): it was running when its process died, at "),
        ({"workspace_limit": 11}, 1, ""),
    ],
)
def test_an_epoch_whose_winner_this_rank_s_limit_or_journal_refuses_is_passed_over(
    settings: Mapping[str, Any], deaths: int, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    operation = FakeOperation("a", COSTS, workspaces={"quick": 11})
    with tuner_of(tmp_path, operation, 4) as job:
        report = job.run_pass()
    journal = Journal(tmp_path / "journal", job.environment.digest)
    for _ in range(deaths):
        killed = [
            sys.executable,
            "-c",
            DIES,
            tmp_path / "journal",
            job.environment.digest,
            journal_key(report.rows[0].cell, tactic("quick")),
        ]
        assert subprocess.run(killed, timeout=60).returncode == 9
    assert bool(journal.quarantined()) == (deaths == 2)
    with tuner_of(tmp_path, operation, 4, journal=tmp_path / "journal", **settings) as joiner, caplog.at_level(logging.WARNING):
        assert joiner.reload() == (not reason)
        assert bool(joiner.epoch.winners) == (not reason)
        assert ("the committed epoch is not adopted: rank 0: " in caplog.text) == bool(reason)
        assert reason in caplog.text
        # Another job tunes on without that winner, and leaves an epoch that can be served here: the one that covers less.
        caplog.clear()
        with tuner_of(tmp_path, FakeOperation("a", {"plain": 300.0}), 2) as other:
            other.run_pass()
        assert joiner.reload()
        assert (joiner.epoch.number, [bucket.high for bucket in joiner.epoch.of(operation.problem, "eager")]) == (
            (2, [2]) if reason else (1, [4])
        )
        assert (f"epoch 1 of problems {next(iter(digests('a')))[:8]} is passed over for epoch 2" in caplog.text) == bool(reason)


def test_two_groups_that_publish_at_once_overwrite_nothing() -> None:
    stages = committed(1, "a"), committed(1, "b")
    replicas = committed(1, "a"), committed(1, "a", won="other")
    assert len(store_of(*stages).list("epochs")) == len(store_of(*replicas).list("epochs")) == 2


def test_without_a_record_it_cannot_be_told_whose_epoch_is_meant_and_both_are_named() -> None:
    store = store_of(committed(3, "a"), committed(4, "b"))
    found, reason = choose_committed(store, "d")
    assert found is None
    ours, theirs = (next(iter(digests(name)))[:8] for name in "ba")
    assert reason == (
        f"groups that tune different problems have published under deployment 'd': epoch 4 of problems {ours} and epoch 3 of problems "
        f"{theirs}; record this group's operations before it reloads, or give each group a deployment name of its own"
    )


def test_an_epoch_of_other_problems_alone_is_none_and_is_named() -> None:
    found, reason = choose_committed(store_of(committed(3, "a")), "d", digests("b"))
    assert found is None
    wanted, there = (next(iter(digests(name)))[:8] for name in "ba")
    assert reason == f"deployment 'd' has no epoch of the problems recorded or served here ({wanted}): it has epoch 3 of problems {there}"


def test_a_damaged_epoch_is_passed_over_for_the_one_before() -> None:
    store = store_of(committed(1, "a"), committed(2, "a", won="other"))
    (name,) = [name for name in epoch.published(store, "d") if name.number == 2]
    store.put(name.key("d"), b"damaged")
    found, _ = choose_committed(store, "d", digests("a"))
    assert found is not None
    assert found.epoch.number == 1
    assert choose_committed(MemoryStore(), "d") == (None, "")


# A joiner's environment has an epoch behind 300 newer ones of others, in two sets of problems; has one newer than those; has none.
@pytest.mark.parametrize(("own", "number", "reads"), [((1, 2), 2, 2), ((1, 999), 999, 2), ((), 302, 1)])
def test_a_joiner_reads_no_epoch_of_another_environment(own: tuple[int, ...], number: int, reads: int) -> None:
    store = CountingStore()
    for other in range(3, 303):
        tuned_in(store, committed(other, "ab"[other % 2]), THERE)
    for mine, names in zip(own, ("a", "ab"), strict=False):
        tuned_in(store, committed(mine, names), HERE)
    found, reason = choose_committed(store, "d", digests("a"), [HERE])
    assert found is not None, reason
    assert (found.epoch.number, store.read) == (number, reads)
    # Where there is none the newest is read, whose refusal says what differs.
    assert found.serves([HERE]) == bool(own)


def test_a_joiner_of_another_environment_whose_problems_nobody_tuned_is_told_so() -> None:
    store = CountingStore()
    tuned_in(store, committed(3, "a"), THERE)
    found, reason = choose_committed(store, "d", digests("b"), [HERE])
    assert found is None
    assert reason == f"deployment 'd' has no epoch of this environment, and in another epoch 3 of problems {next(iter(digests('a')))[:8]}"


def test_a_mixed_group_chooses_what_was_tuned_in_all_its_environments_before_what_is_newer() -> None:
    store = CountingStore()
    tuned_in(store, committed(1, "a"), HERE, THERE)
    for number, environment in ((2, HERE), (3, THERE), (4, NOWHERE)):
        tuned_in(store, committed(number, "a"), environment)
    for environments, number in (([HERE, THERE], 1), ([HERE], 2), ([THERE], 3)):
        found, reason = choose_committed(store, "d", digests("a"), environments)
        assert found is not None, reason
        assert found.epoch.number == number
    assert store.read == 3, "one for each that chose"


def test_more_environments_than_a_name_holds_are_told_by_the_value() -> None:
    store, many = CountingStore(), [digest(str(number)) for number in range(16)]
    tuned_in(store, committed(1, "a"), *many)
    tuned_in(store, committed(2, "a"), NOWHERE, named=False)  # nor does this name say any
    assert [name.environments for name in epoch.published(store, "d")] == [(), ()]
    found, _ = choose_committed(store, "d", digests("a"), many[3:5])
    assert found is not None
    assert (found.epoch.number, found.serves(many)) == (1, True)


def test_an_epoch_that_lacks_an_entry_of_an_environment_was_not_tuned_there() -> None:
    store, table = MemoryStore(), committed(1, "ab")
    entries = {f"entries/{HERE}/{digest('a')}": b"", f"entries/{HERE}/{digest('b')}": b"", f"entries/{THERE}/{digest('a')}": b""}
    epoch.publish(store, table, encode_epoch(table, entries), [HERE, THERE])
    found, _ = choose_committed(store, "d", (), [HERE, THERE])
    assert found is not None
    assert (found.serves([HERE]), found.serves([THERE]), found.serves([HERE, THERE])) == (True, False, False)


def test_a_reload_keeps_to_its_own_problems_and_says_why_it_adopts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Two tuners, each with its own problem, take turns under one deployment name."""
    store, policy = MemoryStore(), MeasurementPolicy(rounds=1, sweeps=1)
    settings = {"store": store, "policy": policy, "ladder": BucketLadder((1,)), "device": "cpu", "deployment": "d"}
    first, second, third = (Tuner(**settings) for _ in range(3))  # type: ignore[arg-type]
    for tuner, name in ((first, "a"), (second, "b")):
        tuner.record(FakeOperation(name, {"plain": 3000.0, "quick": 100.0}))
        tuner.run_pass()
    served = first.epoch.digest
    assert first.reload()
    assert (first.epoch.number, first.epoch.digest) == (1, served), "what b's group published is not adopted"
    assert (second.epoch.number, second.reload()) == (2, True)
    with caplog.at_level(logging.WARNING):
        assert not third.reload()
    assert "groups that tune different problems have published under deployment 'd'" in caplog.text
    for tuner in (first, second, third):
        tuner.close()


class ListingStore(MemoryStore):
    """A store that threads share, as ranks share a server: counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.listings = 0
        self.reads: list[str] = []

    def list(self, prefix: str) -> list[str]:
        self.listings += 1
        return super().list(prefix)

    def get(self, key: str) -> bytes | None:
        self.reads.append(key)
        return super().get(key)


def reload_on_ranks(tuners: list[Tuner]) -> list[bool]:
    with ThreadPoolExecutor(len(tuners)) as pool:
        return [adopted.result(30) for adopted in [pool.submit(tuner.reload) for tuner in tuners]]


def test_the_leader_alone_lists_and_a_rank_that_serves_the_epoch_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch, "SHARED_MEMORY", tmp_path / "none")  # so that each rank reads for itself
    shared = ListingStore()
    tuners = three_ranks(shared)
    entries = {f"{tuners[0].environment.folder}/k": b"entry"}
    tables = [committed(1, "a"), committed(2, "a", won="plain")]
    epoch.publish(shared, tables[0], encode_epoch(tables[0], entries))
    assert reload_on_ranks(tuners) == [True] * 3
    assert (shared.listings, len(shared.reads)) == (1, 3), "each rank has read it once, and one has listed"
    assert reload_on_ranks(tuners) == [True] * 3
    assert (shared.listings, len(shared.reads)) == (2, 4), "the leader alone looks whether there is another"
    epoch.publish(shared, tables[1], encode_epoch(tables[1], entries))
    assert reload_on_ranks(tuners) == [True] * 3
    assert (shared.listings, len(shared.reads)) == (3, 7)
    assert {(tuner.epoch.number, tuner.epoch.digest) for tuner in tuners} == {(2, tables[1].digest)}
    for tuner in tuners:
        tuner.close()


def three_ranks(store: MemoryStore) -> list[Tuner]:
    """Each has recorded problem "a", and serves nothing."""
    rendezvous, deadlines = HashStore(), {"progress_timeout": timedelta(seconds=10), "cap": timedelta(seconds=30)}
    tuners = [
        Tuner(store=store, group=RankGroup(rendezvous, rank, 3, **deadlines), deployment="d", device="cpu", ladder=BucketLadder((4,)))
        for rank in range(3)
    ]
    for tuner in tuners:
        tuner.record(FakeOperation("a", COSTS))
    return tuners


def test_where_one_epoch_is_left_all_ranks_take_it_apart_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    all_at_it = threading.Barrier(3)

    def decode(value: bytes, **asked: Any) -> Any:
        all_at_it.wait(5)  # BrokenBarrierError: one of them waits for what another concludes from it
        return decode_epoch(value, **asked)

    monkeypatch.setattr(adoption, "decode_epoch", decode)
    tuners = three_ranks(store_of(committed(1, "a"), committed(2, "a", won="plain")))
    assert reload_on_ranks(tuners) == [True] * 3
    assert {tuner.epoch.number for tuner in tuners} == {2}
    for tuner in tuners:
        tuner.close()


# Of what is stored (number, problems, winner), the newest of which alone is named, the value is: damaged, older than what is served, of
# other problems. What all adopt then, and what is said.
@pytest.mark.parametrize(
    ("stored", "damaged", "served", "number", "said"),
    [
        ([(1, "a", "quick"), (2, "a", "other")], 2, None, 1, "a stored epoch is passed over: "),
        ([(1, "a", "quick")], 1, None, 0, "a stored epoch is passed over: "),
        ([(1, "a", "quick")], 0, (2, "a"), 2, "the newest of deployment 'd' is older: epoch 1"),
        ([(1, "b", "quick")], 0, None, 0, "has no epoch of the problems recorded or served here"),
    ],
    ids=["damaged", "damaged alone", "older", "other problems"],
)
def test_what_was_named_unread_and_is_not_the_leader_s_choice_no_rank_adopts(
    stored: list[tuple[int, str, str]],
    damaged: int,
    served: tuple[int, str] | None,
    number: int,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = store_of(*(committed(of, names, won=won) for of, names, won in stored))
    for name in epoch.published(store, "d"):
        if name.number == damaged:
            store.put(name.key("d"), b"damaged")
    tuners = three_ranks(store)
    for tuner in tuners if served else ():
        tuner.epoch = committed(*served)  # type: ignore[misc]
    with caplog.at_level(logging.INFO):
        assert reload_on_ranks(tuners) == [number == 1] * 3
    assert {tuner.epoch.number for tuner in tuners} == {number}
    assert said in caplog.text
    assert all(tuner.group.dead is None for tuner in tuners)
    for tuner in tuners:
        tuner.close()


def test_ranks_that_serve_different_epochs_and_adopt_none_are_told_so_and_may_tune() -> None:
    rendezvous, environment = HashStore(), build_environment(torch.device("cpu"))
    deadlines = {"progress_timeout": timedelta(seconds=10), "cap": timedelta(seconds=30)}
    groups = [RankGroup(rendezvous, rank, 3, **deadlines) for rank in range(3)]

    def adopt(group: RankGroup) -> None:
        serving = committed(2, "a", won="plain" if group.rank == 1 else "quick")
        with pytest.raises(PassAborted, match="epochs differ: rank 1 holds another than the rest; the pass is aborted, nothing") as told:
            adopt_newest(group, MemoryStore(), environment, {}, serving, None, Pins(), (), Limits.of(None, None))
        assert told.value.ranks == (1,)
        assert group.dead is None
        group.close()

    with ThreadPoolExecutor(3) as pool:
        for ended in [pool.submit(adopt, group) for group in groups]:
            ended.result(30)
