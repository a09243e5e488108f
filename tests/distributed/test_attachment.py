"""Which ranks take part in a group: who opens, closes, leaves, comes back, is refused or comes too late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from distributed.in_threads import Make, one_pass, opened, results, together
from torch._C._distributed_c10d import HashStore

from moe_dist.distributed.group import RankGroup
from moe_dist.errors import (
    ConfigError,
    RankLost,
    RankWithdrawn,
    TunerStateError,
)


def test_a_rank_that_comes_back_shares_no_word_with_its_former_self(make: Make) -> None:
    store = HashStore()
    (first,) = opened(make(1, store))
    first.close()
    (second,) = opened(make(1, store))
    assert first._key("x") != second._key("x")


def test_who_withdraws_before_a_pass_spoils_the_next_one_alone(make: Make) -> None:
    ranks = make(2, progress=30.0)
    ranks[1].withdraw("KeyError: 'x'")
    ranks[0].begin_pass()
    with pytest.raises(RankWithdrawn, match="rank 1 left the pass: KeyError"):
        ranks[0].exchange("agree", b"")


@pytest.mark.parametrize("leaver", [0, 1])  # the leader, whom all wait for in the end, and another
def test_a_rank_that_closed_in_order_is_missed_at_once(make: Make, leaver: int) -> None:
    ranks = make(3, progress=30.0, names=[4, 5, 6])
    assert results(together(ranks, one_pass)) == [[b"x"] * 3] * 3
    ranks[leaver].close()
    rest = [rank for rank in ranks if rank.rank != leaver]
    started = time.monotonic()
    errors = results(together(rest, one_pass))
    assert time.monotonic() - started < 10, "the deadline is 30 s"
    said = f"rank {4 + leaver} closed its tuner before pass 2 (run_pass, step agree-1); all ranks of a group make the same calls"
    assert [(type(error), str(error), error.ranks) for error in errors] == [(RankWithdrawn, said, (4 + leaver,))] * 2
    with pytest.raises(TunerStateError, match="this group is dead"):
        rest[0].begin_pass()


def test_a_rank_that_has_closed_shows_peers_no_progress_any_more(make: Make) -> None:
    """Its tuner may work on. A count of it in place of what says that it has closed, and peers would wait for it until a deadline."""
    ranks = make(2)
    assert results(together(ranks, one_pass)) == [[b"x"] * 2] * 2
    ranks[1].close()
    ranks[1].progress(force=True)
    assert ranks[1].dead is None, "nor does it ask a thread that has ended"
    assert ranks[0]._progress_counts([1]) == {1: b"closed"}


class _ClosedBeside:
    """A rank's view of the rendezvous: while it looks for who has closed, `meanwhile` happens."""

    def __init__(self, store: Any, meanwhile: Callable[[], None]) -> None:
        self._store, self._meanwhile = store, meanwhile

    def clone(self) -> _ClosedBeside:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        if keys and "/progress/" in keys[0]:
            self._meanwhile()
        return bool(self._store.check(keys))


def test_a_leader_that_commits_and_closes_while_it_is_looked_for_is_not_missed(make: Make) -> None:
    """Between a rank's look for the verdict and its look for who is gone the leader publishes, commits and closes."""
    store, go, closed = HashStore(), threading.Event(), threading.Event()
    (leader,) = make(1, store, of=2)
    (other,) = make(1, _ClosedBeside(store, lambda: meanwhile()), of=2, first=1)

    def meanwhile() -> None:
        go.set()
        assert closed.wait(10)

    def lead() -> list[bytes]:
        assert go.wait(10)
        words = one_pass(leader)
        leader.close()
        closed.set()
        return words

    with ThreadPoolExecutor(2) as pool:
        assert [future.result(20) for future in (pool.submit(lead), pool.submit(one_pass, other))] == [[b"x"] * 2] * 2


def test_who_comes_back_after_closing_is_not_taken_for_gone(make: Make) -> None:
    store = HashStore()
    for rank in make(2, store):
        rank.close()
    assert results(together(make(2, store), one_pass)) == [[b"x"] * 2] * 2


def test_two_open_groups_of_one_rank_are_refused_and_closing_frees_the_place(make: Make) -> None:
    store = HashStore()
    (first,) = make(1, store)
    with pytest.raises(TunerStateError, match="rank 0 of group 'group' has an open tuner already"):
        make(1, store)
    first.close()
    first.close()
    make(1, store)


def attach(make: Make, store: Any, rank: int, **settings: Any) -> RankGroup:
    return make(1, store, of=2, first=rank, **settings)[0]


# What rank 0, or rank 1, has done alone before both attach again.
@pytest.mark.parametrize("alone", ["was refused", "was refused twice", "opened and closed one"])
@pytest.mark.parametrize("odd", [0, 1])
def test_what_one_rank_attached_alone_keeps_nobody_from_meeting(make: Make, odd: int, alone: str) -> None:
    store = HashStore()
    ranks = [attach(make, store, rank) for rank in range(2)]
    assert results(together(ranks, one_pass)) == [[b"x"] * 2] * 2
    for _ in range(2 if alone == "was refused twice" else 1):
        if "refused" in alone:
            with pytest.raises(TunerStateError, match=f"rank {odd} of group .* has an open tuner already"):
                attach(make, store, odd)
    for rank in ranks:
        rank.close()
    if alone == "opened and closed one":
        attach(make, store, odd).close()
    assert results(together([attach(make, store, rank) for rank in range(2)], one_pass)) == [[b"x"] * 2] * 2


def test_a_rank_that_was_refused_while_its_peer_tuned_meets_it_the_next_time(make: Make) -> None:
    """Both attach again; rank 0 is refused, since its first tuner is open, and rank 1 waits for it in vain."""
    store = HashStore()
    ranks = [attach(make, store, rank) for rank in range(2)]
    results(together(ranks, one_pass))
    ranks[1].close()
    with pytest.raises(TunerStateError, match="has an open tuner already"):
        attach(make, store, 0)
    waiting = attach(make, store, 1, progress=0.3)
    with pytest.raises(RankLost, match="rank 0 lost in pass 1, step agree-1"):
        one_pass(waiting)
    for rank in (ranks[0], waiting):
        rank.close()
    assert results(together([attach(make, store, rank) for rank in range(2)], one_pass)) == [[b"x"] * 2] * 2


def test_a_rank_that_came_too_late_says_what_its_peers_said_of_it(make: Make) -> None:
    store = HashStore()
    others = make(2, store, of=3, progress=0.3)
    said = "rank 2 lost in pass 1, step agree-1: no progress for 0 s"
    assert [(type(error), str(error)) for error in results(together(others, one_pass))] == [(RankLost, said)] * 2
    (late,) = make(1, store, of=3, first=2, progress=0.3)
    with pytest.raises(RankLost, match=said) as told:  # after it has waited for them to come again
        one_pass(late)
    assert told.value.ranks == (2,)
    for rank in (*others, late):
        rank.close()
    assert results(together(make(3, store), one_pass)) == [[b"x"] * 3] * 3


def test_a_rank_that_left_its_block_before_the_first_pass_is_named_to_peers_that_come_later(make: Make) -> None:
    store = HashStore()
    leaves, stays = (attach(make, store, rank, progress=30.0) for rank in range(2))
    leaves.withdraw("KeyError: 'x'")
    leaves.close()
    again = attach(make, store, 0)  # its next block
    with pytest.raises(RankWithdrawn, match="rank 0 left the pass: KeyError: 'x'"):
        one_pass(stays)
    stays.close()
    assert results(together([again, attach(make, store, 1)], one_pass)) == [[b"x"] * 2] * 2


def test_groups_of_other_scopes_share_a_store_and_never_meet(make: Make) -> None:
    store = HashStore()
    stages = [make(2, store, scope=f"stage-{stage}", names=[2 * stage, 2 * stage + 1]) for stage in range(2)]

    def talk(rank: RankGroup) -> list[bytes]:
        rank.begin_pass()
        return rank.exchange("agree", b"%d" % rank.names[rank.rank])

    assert results(together([*stages[0], *stages[1]], talk)) == [[b"0", b"1"]] * 2 + [[b"2", b"3"]] * 2


@pytest.mark.parametrize(
    ("rank", "size", "settings", "message"),
    [
        (2, 2, {}, "rank 2 is outside a group of 2; ranks go from 0 to 1"),
        (-1, 2, {}, "rank -1 is outside"),
        (0, 1, {"cap": timedelta(0)}, "progress_timeout .* and cap 0:00:00 must be above 0"),
    ],
)
def test_wrong_places_and_deadlines_are_refused(rank: int, size: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RankGroup(HashStore(), rank, size, **settings)


def test_all_who_missed_an_attachment_and_meet_nobody_say_the_same(make: Make) -> None:
    """Rank 2 gave up the others before they came; of those rank 0 gives up before rank 1 has said a word."""
    ranks = make(3, progress=0.3)
    with pytest.raises(RankLost) as told:
        one_pass(ranks[2])
    assert told.value.ranks == (0, 1)
    for rank in ranks[:2]:
        rank.begin_pass("run_pass")
    for rank in ranks[:2]:
        with pytest.raises(RankLost) as lost:
            rank.exchange("agree-1", b"x")
        assert (str(lost.value), lost.value.ranks) == (str(told.value), (0, 1))
