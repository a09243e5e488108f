"""The steps of a pass and its verdict, with ranks as threads over one store, so that every word can be looked at."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from distributed.in_threads import Make, one_pass, opened, results, together
from torch._C._distributed_c10d import HashStore

from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.words import Verdict
from moe_dist.errors import (
    CallsDiffer,
    PassAborted,
    RankLost,
    RankWithdrawn,
    SettingsDiffer,
    TunerStateError,
)


def test_every_rank_gets_every_word_in_rank_order(make: Make) -> None:
    def talk(rank: RankGroup) -> list[list[bytes]]:
        rank.begin_pass()
        return [rank.exchange("one", b"%d" % rank.rank), rank.exchange("two", b"x" * rank.rank)]

    assert results(together(make(3), talk)) == [[[b"0", b"1", b"2"], [b"", b"x", b"xx"]]] * 3


class _Counting:
    """A rank's view of the rendezvous that counts the bytes which it writes and reads."""

    def __init__(self, store: Any) -> None:
        self._store, self.written, self.read = store, 0, 0

    def clone(self) -> _Counting:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        self.written += len(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self.read += len(value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


def counted(make: Make, words: list[bytes], talk: Callable[[RankGroup, bytes], Any]) -> tuple[list[Any], list[int], list[int]]:
    """(what each rank got, bytes that it wrote, bytes that it read) in one step."""
    store = HashStore()
    views = [_Counting(store) for _ in words]
    ranks = [make(1, view, of=len(words), first=rank)[0] for rank, view in enumerate(views)]
    before = [view.read for view in views]

    def step(rank: RankGroup) -> Any:
        rank.begin_pass()
        return talk(rank, words[rank.rank])

    got = results(together(ranks, step))
    return got, [view.written for view in views], [view.read - start for view, start in zip(views, before, strict=True)]


def test_a_long_word_that_all_say_never_travels(make: Make) -> None:
    word = bytes(range(256)) * 40
    got, written, read = counted(make, [word] * 4, lambda rank, said: rank.exchange("agree", said))
    assert got == [[word] * 4] * 4
    assert max(written) < 200
    assert max(read) < 400, "the leader reads four heads"


def test_long_words_that_differ_are_sent_once_each_to_those_that_lack_them(make: Make) -> None:
    """Ranks 0 and 2 say one word, rank 1 another, rank 3 a short one."""
    one, other = b"a" * 10_000, b"b" * 10_000
    got, written, read = counted(make, [one, other, one, b"short"], lambda rank, said: rank.exchange("agree", said))
    assert got == [[one, other, one, b"short"]] * 4
    assert [size > 10_000 for size in written] == [True, True, False, False], "the first that says a word sends it"
    assert [size // 10_000 for size in read] == [1, 1, 1, 2], "nobody reads what it said itself"


def test_a_rank_reads_the_long_words_that_it_needs(make: Make) -> None:
    words = [b"a" * 10_000, b"b" * 10_000, b"c" * 10_000]
    got, _, read = counted(make, words, lambda rank, said: rank.exchange("hits", said, reads={0} if rank.rank == 2 else set()))
    assert got == [[words[0], b"", b""], [b"", words[1], b""], [words[0], b"", words[2]]]
    assert [size // 10_000 for size in read] == [0, 0, 1]


def test_reducing_lets_the_leader_alone_read_what_the_others_say(make: Make) -> None:
    words = [bytes([rank]) * 1000 for rank in range(5)]
    got, _, read = counted(make, words, lambda rank, said: rank.reduce("measure", said, lambda all_words: max(all_words)[:3]))
    assert got == [b"\4\4\4"] * 5
    assert read[0] > 5000
    assert max(read[1:]) < 50


def test_a_group_of_one_reduces_its_own_word() -> None:
    alone = RankGroup.alone()
    alone.begin_pass()
    assert alone.reduce("measure", b"me", lambda words: b"+".join(words)) == b"me"
    alone.close()


def test_ranks_that_meet_in_different_calls_all_learn_it_at_once(make: Make) -> None:
    def talk(rank: RankGroup) -> list[bytes]:
        with rank.open_pass("reload" if rank.rank == 1 else "run_pass"):
            return rank.exchange("reload-accept" if rank.rank == 1 else "agree-1", b"")

    ranks = make(3, progress=30.0, names=[4, 5, 6])
    started = time.monotonic()
    errors = results(together(ranks, talk))
    assert time.monotonic() - started < 10, "the deadline is 30 s"
    said = "ranks are in different calls: rank 5 in reload, step reload-accept, the rest in run_pass, step agree-1; "
    assert [(type(error), error.ranks, str(error)) for error in errors] == [
        (CallsDiffer, (5,), said + "all ranks of a group make the same calls in the same order")
    ] * 3
    # Nobody is gone: the group goes on.
    assert results(together(ranks, one_pass)) == [[b"x"] * 3] * 3


@pytest.mark.parametrize("odd", [0, 1, 2])  # the leader, a rank that others outnumber, the last
def test_a_rank_of_another_version_is_named_with_both_at_once_and_again(make: Make, odd: int) -> None:
    """Its words lie elsewhere, so that nobody takes them for words of its own version; it concludes the same as those that wait for it."""
    store = HashStore()
    ranks = [make(1, store, of=3, first=at, progress=30.0, cap=60.0, version="9.0+old" if at == odd else "9.1+new")[0] for at in range(3)]
    for call in ("a pass", "another"):  # no rank is lost, and the group not dead: the second call says it again

        def act(rank: RankGroup, call: str = call) -> None:
            with rank.open_pass(call):
                rank.exchange("agree", b"word")

        for error in results(together(ranks, act)):
            assert isinstance(error, SettingsDiffer), error
            assert str(error) == (
                f"ranks run other versions of moe_dist: rank {odd} 9.0+old, the rest 9.1+new; install the same on all: "
                "mixed_environments allows other GPUs, drivers and libraries, no other code of ours, which reads what ranks say"
            )
            assert error.ranks == (odd,)


def test_ranks_of_one_version_meet(make: Make) -> None:
    def talk(rank: RankGroup) -> list[bytes]:
        rank.begin_pass()
        return rank.exchange("one", b"%d" % rank.rank)

    assert results(together(make(3, version="9.1+new"), talk)) == [[b"0", b"1", b"2"]] * 3


def test_a_group_of_one_talks_to_itself_and_writes_no_word() -> None:
    alone = RankGroup.alone()
    alone.begin_pass()
    keys = alone._rendezvous._store.num_keys()
    assert alone.exchange("one", b"me") == [b"me"]
    assert alone._rendezvous._store.num_keys() == keys
    alone.commit("digest")
    alone.close()


def test_words_that_all_have_read_are_removed_so_that_many_passes_leave_the_rendezvous_flat(make: Make) -> None:
    ranks = make(2)

    def one_pass(rank: RankGroup) -> None:
        rank.begin_pass()
        for step in ("agree", "measure", "decide"):
            rank.exchange(step, b"word" * 100)
        rank.commit("digest")

    sizes = []
    for _ in range(4):
        results(together(ranks, one_pass))
        sizes.append(ranks[0]._rendezvous._store.num_keys())
    # A pass leaves its verdict, one small key; the words of its last step go with the next pass.
    assert [after - before for before, after in itertools.pairwise(sizes)] == [1, 1, 1]


@pytest.mark.parametrize("late", ["earlier step", "earlier pass", "other attachment"])
def test_a_word_of_an_earlier_pass_another_step_or_attachment_matches_nothing(make: Make, late: str) -> None:
    """All that rank 1 said before arrives once more; of what rank 0 waits for now it has said nothing."""
    store = HashStore()
    ranks = make(2, store, progress=0.6)
    said: list[tuple[str, Any]] = []
    say = ranks[1]._rendezvous.set

    def remember(key: str, value: Any) -> None:
        said.append((key, value))
        say(key, value)

    ranks[1]._rendezvous.set = remember  # type: ignore[method-assign]
    if late == "earlier step":
        opened(ranks)
        assert results(together(ranks, lambda rank: rank.exchange("agree-1", b"x"))) == [[b"x", b"x"]] * 2
        waiting, place = ranks[0], "pass 1, step agree-1"
    else:
        assert results(together(ranks, one_pass)) == [[b"x", b"x"]] * 2
        if late == "other attachment":
            for rank in ranks:
                rank.close()
            ranks = make(2, store, progress=0.6)
        waiting, place = ranks[0], f"pass {2 if late == 'earlier pass' else 1}, step agree-1"
        waiting.begin_pass()
    words = [(key, value) for key, value in said if key.endswith("/1") and "/progress/" not in key]
    assert words, "rank 1 said nothing that could be taken for a word"
    for key, value in words:
        store.set(key, value)
    with pytest.raises(RankLost, match=f"rank 1 lost in {place}: no progress for 1 s"):
        waiting.exchange("agree-1", b"x")


def test_what_was_committed_first_stands_and_a_late_abort_changes_nothing(make: Make) -> None:
    """The compare of the commit: without it the last writer would win, and ranks would end differently."""
    leader, late = opened(make(2))
    leader.commit("table")
    late.abort(RankLost("rank 0 lost", [0]))
    assert leader._read_verdict() == late._read_verdict() == Verdict(committed="table")


def test_what_was_aborted_first_stands_and_the_leader_does_not_commit(make: Make) -> None:
    leader, other = opened(make(2))
    other.abort(RankWithdrawn("rank 1 left the pass: KeyError", [1]))
    with pytest.raises(RankWithdrawn, match="rank 1 left the pass: KeyError") as told:
        leader.commit("table")
    assert told.value.ranks == (1,)
    assert leader.dead


def test_a_rank_that_holds_another_table_than_the_committed_one_does_not_serve_it(make: Make) -> None:
    leader, other = opened(make(2, names=[6, 7]))
    leader.commit("table")
    with pytest.raises(PassAborted, match="pass 1 was committed to table table, but rank 7 holds mine") as told:
        other.commit("mine")
    assert told.value.ranks == (7,)
    with pytest.raises(TunerStateError, match=r"this group is dead \(committed to another table\)"):
        other.begin_pass()


def test_a_verdict_ends_a_wait_for_words_at_once(make: Make) -> None:
    waiting, leaving = opened(make(2, progress=30.0))
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(waiting.exchange, "agree", b"")
        leaving.withdraw("KeyError: 'x'")
        error = wait.exception(10)
    assert isinstance(error, RankWithdrawn)
    assert time.monotonic() - started < 10, "the deadline is 30 s"


class _Racing:
    """A rank's view of the rendezvous: between its last look for the words and its look at the verdict, `meanwhile` happens."""

    def __init__(self, store: Any, meanwhile: Callable[[], None]) -> None:
        self._store, self._meanwhile = store, meanwhile

    def clone(self) -> _Racing:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        present = bool(self._store.check(keys))
        if keys[0].endswith("/all") and not present:
            self._meanwhile()
        return present


def test_words_that_are_published_and_committed_between_two_looks_are_read(make: Make) -> None:
    """The leader publishes the last words and commits at once: a rank that sees the commit first must still find the words."""
    store, go, committed = HashStore(), threading.Event(), threading.Event()
    (leader,) = make(1, store, of=2)
    (other,) = make(1, _Racing(store, lambda: meanwhile()), of=2, first=1)
    other._look_s = 0.0  # at the verdict, after each look for the words

    def meanwhile() -> None:
        go.set()
        assert committed.wait(10)

    def lead() -> list[bytes]:
        leader.begin_pass()
        assert go.wait(10)
        words = leader.exchange("decide", b"table")
        leader.commit("table")
        committed.set()
        return words

    def follow() -> list[bytes]:
        other.begin_pass()
        words = other.exchange("decide", b"table")
        other.commit("table")
        return words

    with ThreadPoolExecutor(2) as pool:
        assert [future.result(20) for future in (pool.submit(lead), pool.submit(follow))] == [[b"table", b"table"]] * 2


def test_an_error_that_all_conclude_is_told_to_who_lost_patience_before_it_could(make: Make) -> None:
    first, second, late = opened(make(3))
    error = SettingsDiffer("settings differ", [1])
    first.conclude(error)
    second.conclude(error)
    with pytest.raises(SettingsDiffer, match="settings differ"):
        late._lose([0], "agree", over_cap=False)


def test_who_concludes_an_error_after_a_peer_lost_patience_says_what_that_peer_says(make: Make) -> None:
    hasty, other = opened(make(2))
    with pytest.raises(RankLost, match="rank 1 lost"):
        hasty._lose([1], "agree", over_cap=False)
    with pytest.raises(RankLost, match="rank 1 lost"):
        other.conclude(SettingsDiffer("settings differ", [1]))


def test_a_pass_that_is_over_cannot_be_aborted(make: Make) -> None:
    leader, other = opened(make(2))
    leader.commit("t")
    other.commit("t")
    other.abort(PassAborted("too late"))
    assert other._read_verdict() == Verdict(committed="t")
    other.begin_pass()


def test_two_passes_at_once_are_refused(make: Make) -> None:
    (rank,) = opened(make(1))
    with pytest.raises(TunerStateError, match="a pass is already open on this group; two can't run at once"):
        rank.begin_pass()
