"""Tuners on the same ranks: two at once, one after another, and one that could not be made."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.in_threads import Make
from distributed.passes import (
    COSTS,
    POLICY,
    agreed,
    make_tuner,
    one_operation,
    table,
    tune,
)
from fakes import FakeOperation
from ranks import Rank, run_ranks
from torch._C._distributed_c10d import HashStore

from moe_dist.errors import RendezvousLost, TunerStateError
from moe_dist.tuning.context import autotune
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner


def two_on_one_group(rank: Rank) -> Any:
    group = rank.group()
    try:
        rank.group()
    finally:
        group.close()


def test_two_open_tuners_on_one_group_are_refused(tmp_path: Path) -> None:
    outcomes = run_ranks(two_on_one_group, 2, tmp_path)
    assert {outcome.error for outcome in outcomes} == {"TunerStateError"}
    assert "rank 1 of group 'group' has an open tuner already; close that one first" in outcomes[1].message


def refused_alone(rank: Rank) -> Any:
    """After a first pass rank 1 alone asks for a second tuner while its first is open. What the next tuner of all ranks comes to."""
    with make_tuner(rank, "reduce", ladder=BucketLadder((1,))) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        tuner.run_pass()
        if rank.index == 1:
            with pytest.raises(TunerStateError, match="rank 1 of group 'group' has an open tuner already"):
                make_tuner(rank, "reduce")
    return tune(rank, "reduce", one_operation)


def test_a_tuner_that_one_rank_alone_was_refused_spoils_no_later_one(tmp_path: Path) -> None:
    assert set(agreed(run_ranks(refused_alone, 3, tmp_path)).values()) == {"quick"}


def two_blocks(rank: Rank) -> Any:
    """Two autotune blocks, one after the other, on one group; then the first one's tuner still reloads."""
    store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
    tuners = []
    for name in "ab":
        with autotune(
            store=str(rank.folder / "store"), group=dist.group.WORLD, policy=POLICY, ladder=BucketLadder((1,)), device="cpu"
        ) as tuner:
            tuner.record(FakeOperation(name, COSTS))
        tuners.append(tuner)
    return [len(tuner.epoch.winners) for tuner in tuners], tuners[0].reload()


def test_one_autotune_block_may_follow_another(tmp_path: Path) -> None:
    outcomes = run_ranks(two_blocks, 2, tmp_path)
    assert [outcome.value for outcome in outcomes] == [([1, 1], True)] * 2, outcomes


def fails_to_open(rank: Rank) -> Any:
    """The first tuner can't be made: its journal lies in the home of a user who does not exist. Then another on the same ranks."""
    store = dist.TCPStore("127.0.0.1", rank.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.size)
    try:
        Tuner(group=dist.group.WORLD, journal="~no-such-user/journal", device="cpu")
    except RuntimeError as error:
        refused = str(error)
    with Tuner(
        group=dist.group.WORLD, policy=POLICY, ladder=BucketLadder((1,)), device="cpu", progress_timeout=timedelta(seconds=20)
    ) as tuner:
        tuner.record(FakeOperation("a", COSTS))
        return refused, table(tuner.run_pass())


def test_a_tuner_that_failed_to_open_keeps_no_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(fails_to_open, 2, tmp_path)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    assert all("home directory" in outcome.value[0] for outcome in outcomes)
    assert [outcome.value[1] for outcome in outcomes] == [{"a 1": "quick"}] * 2


def _returns() -> None:
    for _ in range(1):
        with autotune(**SETTINGS) as tuner:
            HELD.append(tuner)
            return


def _in_the_block(error: BaseException) -> None:
    with autotune(**SETTINGS) as tuner:
        HELD.append(tuner)
        raise error


def _in_the_pass(error: BaseException) -> None:
    def fail(event: Any) -> None:
        raise error

    with autotune(**SETTINGS, on_progress=fail) as tuner:
        HELD.append(tuner)
        tuner.record(FakeOperation("a", COSTS))


HELD: list[Tuner] = []  # as a user's variable or a traceback holds it
SETTINGS: dict[str, Any] = {"policy": POLICY, "ladder": BucketLadder((1,)), "device": "cpu"}
WAYS_OUT = {
    "a return": (_returns, None),
    "an exception": (lambda: _in_the_block(KeyError("x")), KeyError),
    "an interrupt": (lambda: _in_the_block(KeyboardInterrupt()), KeyboardInterrupt),
    "the process's end": (lambda: _in_the_block(SystemExit(1)), SystemExit),
    "an exception in the pass": (lambda: _in_the_pass(KeyError("x")), KeyError),
    "an interrupt in the pass": (lambda: _in_the_pass(KeyboardInterrupt()), KeyboardInterrupt),
}


@pytest.mark.parametrize("way_out", WAYS_OUT)
def test_an_autotune_block_frees_its_ranks_whatever_way_it_is_left(way_out: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    leave, expected = WAYS_OUT[way_out]
    monkeypatch.setattr(sys.modules[__name__], "HELD", [])
    monkeypatch.setitem(SETTINGS, "group", make(1, store)[0])
    if expected is None:
        leave()
    else:
        with pytest.raises(expected):
            leave()
    assert len(HELD) == 1
    with Tuner(**{**SETTINGS, "group": make(1, store)[0]}) as after:  # TunerStateError: the place is held
        after.record(FakeOperation("a", COSTS))
        assert after.run_pass().measured == 3


def test_a_tuner_closed_late_frees_no_place_that_another_has_taken(make: Make) -> None:
    store = HashStore()
    with autotune(**SETTINGS, group=make(1, store)[0]) as first:
        pass
    with Tuner(**SETTINGS, group=make(1, store)[0]):
        first.close()
        first.close()
        with pytest.raises(TunerStateError, match="has an open tuner already"):
            make(1, store)


def test_a_block_left_by_an_exception_whose_rendezvous_is_gone_raises_that_and_closes(make: Make) -> None:
    group, closed = make(1, HashStore(), of=2)[0], []

    def lost() -> None:
        raise RendezvousLost("the rendezvous store was lost", ())

    group._member.attach = lost
    close = group.close
    group.close = lambda: (closed.append(True), close())[1]
    with pytest.raises(KeyError, match="mine"), autotune(**SETTINGS, group=group):
        raise KeyError("mine")
    assert closed == [True]
