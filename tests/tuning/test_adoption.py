"""Which committed epoch a group adopts, where groups that tune different problems share a deployment and a store."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
from fakes import FakeOperation, tactic

from moe_dist.distributed import epoch
from moe_dist.stores.codec import encode_epoch
from moe_dist.stores.memory import MemoryStore
from moe_dist.tuning.adoption import choose_committed
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Bucket, BucketLadder, Cell, Epoch, Problem, Winner, digest
from moe_dist.tuning.tuner import Tuner


def problem(name: str) -> Problem:
    return Problem.of("fake", name=name)


def digests(names: Iterable[str]) -> set[str]:
    return {digest(problem(name).packed) for name in names}


def committed(number: int, names: str, *, won: str = "quick") -> Epoch:
    """An epoch whose winners are of the problems `names`, one letter each."""
    winner = Winner(tactic(won), 1.0, tactic("plain"), 2.0, "tuned")
    return Epoch(number, "d", {Cell(problem(name), "eager", Bucket(1, 4)): winner for name in names})


def store_of(*epochs: Epoch) -> MemoryStore:
    store = MemoryStore()
    for table in epochs:
        epoch.publish(store, table, encode_epoch(table, {}))
    return store


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
