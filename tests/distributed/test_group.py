"""The rendezvous of a group in one process: ranks are threads over one store, so that every wait and every word can be looked at."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest
from torch._C._distributed_c10d import FileStore, HashStore

from moe_dist.distributed import group as module
from moe_dist.distributed.group import RankGroup, Verdict, bundle, unbundle
from moe_dist.errors import (
    CallsDiffer,
    ConfigError,
    NothingRunnable,
    PassAborted,
    RankLost,
    RankWithdrawn,
    RendezvousLost,
    SettingsDiffer,
    TunerStateError,
)

Make = Callable[..., list[RankGroup]]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(count, store=...)`: ranks of a group over one store, all or `count` of `of` from `first`; they are closed at the end."""
    made: list[RankGroup] = []

    def ranks(
        count: int, store: Any = None, *, of: int = 0, first: int = 0, progress: float = 1.0, cap: float = 20.0, **settings: Any
    ) -> list[RankGroup]:
        store, deadlines = store or HashStore(), {"progress_timeout": timedelta(seconds=progress), "cap": timedelta(seconds=cap)}
        made.extend(RankGroup(store, rank, of or count, **deadlines, **settings) for rank in range(first, first + count))
        return made[-count:]

    yield ranks
    for group in made:
        group.close()


def together(ranks: list[RankGroup], action: Callable[[RankGroup], Any]) -> list[Future[Any]]:
    """`action` on every rank at once, to its end."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [pool.submit(action, rank) for rank in ranks]


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.exception() or future.result() for future in futures]


# -- words -----------------------------------------------------------------------------------------------------------------


def test_every_rank_gets_every_word_in_rank_order(make: Make) -> None:
    def talk(rank: RankGroup) -> list[list[bytes]]:
        rank.begin_pass()
        return [rank.exchange("one", b"%d" % rank.rank), rank.exchange("two", b"x" * rank.rank)]

    assert results(together(make(3), talk)) == [[[b"0", b"1", b"2"], [b"", b"x", b"xx"]]] * 3


def test_equal_words_are_published_once() -> None:
    words = [b"x" * 1000, b"", b"x" * 1000, b"y"] * 100
    assert unbundle(bundle(words)) == words
    assert len(bundle(words)) < 1000 + 2 * len(words)


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


def test_a_rendezvous_that_reads_one_value_at_a_time_serves_too(make: Make, tmp_path: Path) -> None:
    def talk(rank: RankGroup) -> list[bytes]:
        rank.begin_pass()
        return rank.exchange("agree", b"%d" % rank.rank)

    assert results(together(make(3, FileStore(str(tmp_path / "rendezvous"), 3)), talk)) == [[b"0", b"1", b"2"]] * 3


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


def one_pass(rank: RankGroup) -> list[bytes]:
    with rank.open_pass("run_pass"):
        words = rank.exchange("agree-1", b"x")
        rank.commit("table")
    return words


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
    keys = alone._store.num_keys()
    assert alone.exchange("one", b"me") == [b"me"]
    assert alone._store.num_keys() == keys
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
        sizes.append(ranks[0]._store.num_keys())
    # A pass leaves its verdict, one small key; the words of its last step go with the next pass.
    assert [after - before for before, after in itertools.pairwise(sizes)] == [1, 1, 1]


def test_a_word_of_an_earlier_pass_another_step_or_attachment_matches_nothing(make: Make) -> None:
    store = HashStore()
    ranks = make(2, store, progress=0.6)
    scope = ranks[0]._scope
    for late in ("1/1/000001/1", "2/2/000001/1", "1/2/000002/1", "1/2/000001/0"):
        store.set(f"{scope}/{late}", "late")
    for rank in ranks:
        rank._pass = 1
    ranks[0].begin_pass()
    assert ranks[0]._key("") == f"{scope}/1/2/"
    with pytest.raises(RankLost, match="rank 1 lost in pass 2, step agree: no progress for 1 s"):
        ranks[0].exchange("agree", b"")


def test_a_rank_that_comes_back_shares_no_word_with_its_former_self(make: Make) -> None:
    store = HashStore()
    (first,) = opened(make(1, store))
    first.close()
    (second,) = opened(make(1, store))
    assert first._key("x") != second._key("x")


# -- the verdict -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verdict", [Verdict(committed="d"), Verdict(error="RankLost", message="rank 3 lost", ranks=(3, 5)), Verdict(error="PassAborted")]
)
def test_a_verdict_survives_its_bytes(verdict: Verdict) -> None:
    assert Verdict.from_bytes(verdict.to_bytes()) == verdict


@pytest.mark.parametrize("kind", [RankLost, RankWithdrawn, PassAborted, SettingsDiffer, CallsDiffer, NothingRunnable])
def test_every_error_that_a_verdict_can_carry_comes_back_with_its_ranks(kind: type[Exception]) -> None:
    error = Verdict(error=kind.__name__, message="why", ranks=(2,)).exception
    assert type(error) is kind
    assert str(error) == "why"
    assert getattr(error, "ranks", (2,)) == (2,)
    assert Verdict(committed="table").exception is None


def opened(ranks: list[RankGroup]) -> list[RankGroup]:
    for rank in ranks:
        rank.begin_pass()
    return ranks


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
        self._store, self._meanwhile, self._first = store, meanwhile, 0.0

    def clone(self) -> _Racing:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        present = bool(self._store.check(keys))
        if keys[0].endswith("/all") and not present:
            self._first = self._first or time.monotonic()
            if time.monotonic() - self._first > 2 * module._LOOK_AROUND_S:
                self._meanwhile()
        return present


def test_words_that_are_published_and_committed_between_two_looks_are_read(make: Make) -> None:
    """The leader publishes the last words and commits at once: a rank that sees the commit first must still find the words."""
    store, go, committed = HashStore(), threading.Event(), threading.Event()
    (leader,) = make(1, store, of=2)
    (other,) = make(1, _Racing(store, lambda: meanwhile()), of=2, first=1)

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


# -- deadlines -------------------------------------------------------------------------------------------------------------


def test_a_silent_rank_is_lost_after_the_progress_timeout_and_the_group_is_dead(make: Make) -> None:
    ranks = opened(make(3, progress=0.5, names=[4, 5, 6]))
    started = time.monotonic()
    errors = results(together(ranks[:2], lambda rank: rank.exchange("agree", b"")))
    assert time.monotonic() - started < 10
    assert [(type(error), str(error), error.ranks) for error in errors] == [
        (RankLost, "rank 6 lost in pass 1, step agree: no progress for 0 s", (6,))
    ] * 2
    with pytest.raises(TunerStateError, match="this group is dead"):
        ranks[0].begin_pass()


def test_a_rank_that_moves_is_waited_for_beyond_the_progress_timeout(make: Make) -> None:
    waiting, working = opened(make(2, progress=1.5))

    def work() -> None:
        for _ in range(12):  # 3.6 s, more than twice the timeout
            time.sleep(0.3)
            working.progress()
        working.exchange("agree", b"done")

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        assert waiting.exchange("agree", b"") == [b"", b"done"]
        done.result(10)


def test_a_leader_that_moves_between_passes_is_waited_for_in_the_next_one(make: Make) -> None:
    """It publishes what the last pass came to, while its peers are in the next one already."""

    def two_passes(rank: RankGroup) -> list[bytes]:
        for number in (1, 2):
            rank.begin_pass()
            words = rank.exchange("one", b"%d" % number)
            rank.commit("t")
            if number == 1 and rank.is_leader:
                until = time.monotonic() + 6.0
                while time.monotonic() < until:
                    time.sleep(0.05)
                    rank.progress()
        return words

    assert results(together(make(2, progress=2.0), two_passes)) == [[b"2", b"2"]] * 2


class _SlowToPublish:
    """A leader's view of the rendezvous: what it publishes takes a while to get there."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def clone(self) -> _SlowToPublish:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        if key.endswith("/all"):
            time.sleep(self._seconds)
        self._store.set(key, value)


def test_the_leader_is_not_blamed_for_the_time_that_another_rank_took(make: Make) -> None:
    """Ranks 0 and 2 wait 3 s for rank 1, which works. Once it has spoken, the leader has its own 2 s to publish; it needs 1."""
    store = HashStore()
    (leader,) = make(1, _SlowToPublish(store, 1.0), of=3, progress=2.0)
    others = make(2, store, of=3, first=1, progress=2.0)

    def talk(rank: RankGroup) -> list[bytes]:
        rank.begin_pass()
        for _ in range(10 if rank.rank == 1 else 0):
            time.sleep(0.3)
            rank.progress()
        return rank.exchange("agree", b"%d" % rank.rank)

    assert results(together([leader, *others], talk)) == [[b"0", b"1", b"2"]] * 3


class _Requests:
    """A rank's view of the rendezvous that counts its requests and, of these, the looks around."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests, self.looks = store, 0, 0

    def clone(self) -> _Requests:
        return self

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self.requests += name != "has_extended_api"
            self.looks += name == "check" and args[0][0].endswith("/verdict")
            return getattr(self._store, name)(*args)

        return request


def test_waiting_for_a_late_rank_costs_each_rank_a_few_requests_a_look_however_many_they_are(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of 32 speaks when all others have looked around four times. Each asking about each would be 30 requests a look."""
    monkeypatch.setattr(module, "_POLL_S", 0.1)  # a few polls a look, so that they hide nothing
    monkeypatch.setattr(module, "_SLOWEST_POLL_S", 0.1)
    size, store = 32, HashStore()
    views = [_Requests(store) for _ in range(size)]
    ranks = [make(1, view, of=size, first=rank, progress=60.0, cap=120.0, version="9.1")[0] for rank, view in enumerate(views)]
    before = [view.requests for view in views]

    def talk(rank: RankGroup) -> bytes:
        rank.begin_pass()
        deadline = time.monotonic() + 60
        while rank.rank == size - 1 and min(view.looks for view in views[:-1]) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return rank.reduce("measure", b"x", lambda words: b"all")

    assert results(together(ranks, talk)) == [b"all"] * size
    looks, requests = sum(view.looks for view in views), sum(view.requests - start for view, start in zip(views, before, strict=True))
    assert requests < 10 * looks + 12 * size, f"{requests} requests in {looks} looks"


class _Frozen:
    """A rank's view of the rendezvous: the first rank of all that watches for the others gets no further until it is let go."""

    def __init__(self, store: Any, frozen: list[Any], go: threading.Event) -> None:
        self._store, self._frozen, self._go = store, frozen, go

    def clone(self) -> _Frozen:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        said = self._store.compare_set(key, expected, desired)
        if "/watch/" in key and not self._frozen and bytes(said).decode() == desired:
            self._frozen.append(self)
            self._go.wait(60)
        return said


def test_another_rank_watches_when_the_one_that_did_is_stopped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", timedelta(seconds=60))
    store, go, frozen = HashStore(), threading.Event(), list[Any]()
    views = [_Frozen(store, frozen, go) for _ in range(3)]
    ranks = [make(1, view, of=4, first=rank, cap=60.0)[0] for rank, view in enumerate(views)]
    opened(ranks)
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(rank.exchange, "agree", b"") for rank in ranks]
        deadline = time.monotonic() + 30
        while sum(end.done() for end in ends) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        waiting = [view for view, end in zip(views, ends, strict=True) if not end.done()]
        go.set()
        errors = [end.exception(30) for end in ends]
    assert waiting == frozen, "the others end without it"
    assert [(type(error), str(error)) for error in errors] == [(RankLost, "rank 3 lost in pass 1, step agree: no progress for 1 s")] * 3


class _SlowToSend:
    """A rank's view of the rendezvous: the bytes of its long word take a while to get there, and it moves meanwhile."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def clone(self) -> _SlowToSend:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        for moved in range(int(self._seconds / 0.3) if "/bytes/" in key else 0):
            time.sleep(0.3)
            self._store.set(key.replace("/1/000001/bytes/", "/progress/"), f"sending {moved}")
        self._store.set(key, value)


def test_a_rank_that_waits_for_the_bytes_of_a_word_is_not_blamed_by_ranks_that_need_none(make: Make) -> None:
    """Rank 1 sends for 3 s what rank 2 needs; ranks 0 and 3 are in the next step, where both are missing, for longer than the timeout."""
    store = HashStore()
    ranks = [make(1, _SlowToSend(store, 3.0) if rank == 1 else store, of=4, first=rank, progress=1.5)[0] for rank in range(4)]

    def talk(rank: RankGroup) -> list[bytes]:
        rank.begin_pass()
        rank.exchange("hits", b"entry" * 100 if rank.rank == 1 else b"", reads={1} if rank.rank == 2 else set())
        return rank.exchange("agree", b"")

    assert results(together(ranks, talk)) == [[b""] * 4] * 4


def test_a_leader_whose_words_have_all_come_waits_for_nobody(make: Make) -> None:
    leader, other = opened(make(2))
    for rank in (leader, other):
        rank._store.set(rank._key(f"000001/{rank.rank}"), b"")
    assert leader._silent("000001") == []
    assert other._silent("000001") == [0]


def test_the_cap_ends_a_wait_for_a_rank_that_moves_for_ever(make: Make) -> None:
    """For six times the cap, that is; then it speaks, so that without the cap this ends, too."""
    waiting, working = opened(make(2, progress=30.0, cap=1.0))
    stop = threading.Event()

    def work() -> None:
        for _ in range(60):
            if stop.wait(0.1):
                return
            working.progress(force=True)
        working._store.set(working._key("000001/1"), msgpack.packb(["a pass, step agree", b"late"]))

    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(work)
        ended = pool.submit(waiting.exchange, "agree", b"").exception(20)
        stop.set()
        done.result(10)
    assert isinstance(ended, RankLost), "awaited was RankLost at the cap of 1 s, but rank 1 was waited for until it spoke, after 6 s"
    assert str(ended) == "rank 1 lost in pass 1, step agree: the pass outlasted its cap of 1 s"


def test_a_leader_that_does_not_commit_is_lost(make: Make) -> None:
    ranks = opened(make(2, progress=0.5))
    results(together(ranks, lambda rank: rank.exchange("decide", b"")))
    with pytest.raises(RankLost, match="rank 0 lost in pass 1, step commit") as told:
        ranks[1].commit("table")
    assert told.value.ranks == (0,)
    with pytest.raises(RankLost, match="rank 0 lost"):
        ranks[0].commit("table")  # the leader comes back, and learns that it was given up


class _Stuck:
    """A rendezvous whose server stops answering."""

    def __init__(self, store: Any) -> None:
        self._store, self.stuck = store, threading.Event()

    def clone(self) -> _Stuck:
        return self

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            if self.stuck.is_set():
                time.sleep(3.0)
            return getattr(self._store, name)(*args)

        return request


def test_a_rendezvous_that_stops_answering_is_lost_in_bounded_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", timedelta(seconds=0.3))
    store = _Stuck(HashStore())
    rank = opened(make(2, store, host=0))[1]
    store.stuck.set()
    started = time.monotonic()
    with pytest.raises(RendezvousLost, match="the rendezvous store, which rank 0 serves, can't be reached") as told:
        rank.exchange("agree", b"")
    assert time.monotonic() - started < 2.5
    assert told.value.ranks == (0,)
    with pytest.raises(TunerStateError, match=r"dead \(rendezvous lost\)"):
        rank.begin_pass()


# -- misuse ----------------------------------------------------------------------------------------------------------------


def test_two_passes_at_once_are_refused(make: Make) -> None:
    (rank,) = opened(make(1))
    with pytest.raises(TunerStateError, match="a pass is already open on this group; two can't run at once"):
        rank.begin_pass()


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
