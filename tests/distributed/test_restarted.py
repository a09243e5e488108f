"""One rank is started again alone, on a rendezvous that outlives its process: peers learn it at once, and new tuners of all meet."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed.in_threads import Make, one_pass, results, together
from distributed.passes import COSTS, Hanging, make_tuner, table
from fakes import FakeOperation
from ranks import Outcome, Rank, Ranks
from torch._C._distributed_c10d import HashStore

from moe_dist.distributed import group as group_module
from moe_dist.distributed.group import RankGroup
from moe_dist.errors import PassAborted, RankLost, RankWithdrawn, SettingsDiffer, TunerStateError
from moe_dist.process import Process, started_s
from moe_dist.tuning.problem import BucketLadder
from moe_dist.versions import code_version

FOR_EVER_S = 40.0  # a progress timeout and a cap that end no wait before a test's own deadline
OLD, NEW = "9.0+01d", "9.1+0e3"
DIFFER = (
    f"ranks run other versions of moe_dist: rank 5 {NEW}, the rest {OLD}; install the same on all: mixed_environments allows other GPUs, "
    "drivers and libraries, no other code of ours, which reads what ranks say"
)


# -- real processes -----------------------------------------------------------------------------------------------------------------------


def killed_while_it_measures(rank: Rank, culprit: int, release: str) -> Any:
    """All serve an epoch. In the second pass the culprit is killed; it comes back, of `release` if one is given, and all make a new tuner."""
    settings: dict[str, Any] = {"progress_timeout": FOR_EVER_S, "cap": FOR_EVER_S, "ladder": BucketLadder((1,))}
    again, told = (rank.folder / "mark-measuring").exists(), ""
    if again and release:
        group_module.code_version = lambda: release
    if not again:
        with make_tuner(rank, "reduce", **settings) as tuner:
            tuner.record(FakeOperation("a", COSTS))
            tuner.run_pass()
            served = tuner.epoch.digest
            strikes = Hanging("b", {**COSTS, "slow": "hang"}) if rank.index == culprit else FakeOperation("b", COSTS)
            strikes.rank = rank  # type: ignore[union-attr]
            tuner.record(strikes)
            with pytest.raises(RankLost) as lost:
                tuner.run_pass()
            told = str(lost.value)
            assert (lost.value.ranks, tuner.epoch.digest) == ((culprit,), served), "the previous epoch serves"
    with make_tuner(rank, "reduce", **settings) as tuner:
        for name in "ab":
            tuner.record(FakeOperation(name, COSTS))
        try:
            report = tuner.run_pass()
        except SettingsDiffer as error:
            return told, str(error), error.ranks
        return told, table(report), report.digest


def killed_and_started_again(culprit: int, release: str, folder: Path) -> tuple[str, list[Outcome]]:
    """(what its peers were told, how all ended)."""
    with Ranks(killed_while_it_measures, 3, folder, culprit, release) as ranks:
        ranks.wait("measuring")
        ranks.kill(culprit)
        ranks.start_again(culprit)
        ended: list[Outcome] = ranks.join(60.0)  # nobody's patience ends before
    assert [outcome.error for outcome in ended] == [""] * 3, ended
    (said,) = {outcome.value[0] for rank, outcome in enumerate(ended) if rank != culprit}
    assert said.startswith(f"rank {culprit} was started again, as process ")
    assert said.endswith(" make a new tuner on all ranks, or restart them all"), "its end was seen, so that there is nothing to doubt"
    return said, ended


@pytest.mark.parametrize("culprit", [0, 1])  # the leader, whom all wait for, and another
def test_a_rank_killed_amid_a_pass_and_started_again_alone(culprit: int, tmp_path: Path) -> None:
    _, ended = killed_and_started_again(culprit, "", tmp_path)
    assert {outcome.value[2] for outcome in ended} == {ended[0].value[2]}
    assert ended[0].value[1] == {"a 1": "quick", "b 1": "quick"}


def test_a_rank_killed_amid_a_pass_and_started_again_alone_as_another_release(tmp_path: Path) -> None:
    said, ended = killed_and_started_again(1, NEW, tmp_path)
    assert f", with moe_dist {NEW} in place of {code_version()}: install the same on all ranks, then " in said
    assert {outcome.value[1:] for outcome in ended} == {(DIFFER.replace("rank 5", "rank 1").replace(OLD, code_version()), (1,))}


# -- threads over one store, with claims of processes that are gone, or can't be seen --------------------------------------------------


def place(rank: RankGroup) -> str:
    return f"{rank._member._root}/claim/{rank.rank}"


def becomes(rank: RankGroup, store: Any, **other: Any) -> Process:
    """The rank's claim is of another process: of this host and gone, unless `other` says otherwise."""
    process = dataclasses.replace(Process.this(), **({"started_s": 0.0} | other))
    store.set(place(rank), f"x {process.to_text()}")
    return process


@contextlib.contextmanager
def another() -> Iterator[Process]:
    """Another process of this host, which runs until the end of the block."""
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            yield dataclasses.replace(Process.this(), pid=child.pid, started_s=started_s(child.pid) or 0.0)
        finally:
            child.kill()


def again(make: Make, store: Any, rank: int, **settings: Any) -> RankGroup:
    return make(1, store, of=3, first=rank, **({"progress": FOR_EVER_S, "cap": FOR_EVER_S} | settings))[0]


def serving(make: Make, store: Any, passes: int = 1) -> list[RankGroup]:
    """Ranks that have committed passes, and are in none."""
    ranks = make(3, store, progress=FOR_EVER_S, cap=FOR_EVER_S, names=[4, 5, 6])
    for _ in range(passes):
        assert results(together(ranks, one_pass)) == [[b"x"] * 3] * 3
    return ranks


def renewed(make: Make, store: Any, rank: RankGroup, **settings: Any) -> RankGroup:
    rank.close()
    return again(make, store, rank.rank, names=rank.names, **settings)


def test_peers_that_serve_learn_it_in_their_next_pass_and_their_new_tuners_meet_it(make: Make) -> None:
    store = HashStore()
    ranks = serving(make, store)
    former = becomes(ranks[1], store)
    came = again(make, store, 1, names=[4, 5, 6])
    here = Process.this()
    said = f"rank 5 was started again, as {here} in place of {former}: make a new tuner on all ranks, or restart them all"
    started = time.monotonic()
    errors = results(together([ranks[0], ranks[2]], one_pass))
    assert time.monotonic() - started < 20, f"no patience ends before {FOR_EVER_S} s"
    assert [(type(error), str(error), error.ranks) for error in errors] == [(RankLost, said, (5,))] * 2
    with pytest.raises(TunerStateError, match="this group is dead"):
        ranks[0].begin_pass()
    assert results(together([renewed(make, store, ranks[0]), came, renewed(make, store, ranks[2])], one_pass)) == [[b"x"] * 3] * 3


def test_who_came_again_and_met_nobody_says_why_and_later_all_meet(make: Make) -> None:
    """Its peers go on serving for longer than it has patience."""
    store = HashStore()
    ranks = serving(make, store)
    becomes(ranks[1], store)
    came = again(make, store, 1, progress=0.3, names=[4, 5, 6])
    with pytest.raises(RankLost, match=r"^rank 5 was started again, .*: make a new tuner on all ranks, or restart them all$") as told:
        one_pass(came)
    assert told.value.ranks == (5,)
    errors = results(together([ranks[0], ranks[2]], one_pass))
    assert [(type(error), str(error)) for error in errors] == [(RankLost, str(told.value))] * 2
    assert results(together([renewed(make, store, rank) for rank in (ranks[0], came, ranks[2])], one_pass)) == [[b"x"] * 3] * 3


def test_a_peer_that_is_lost_after_all_had_come_again_is_named_by_all(make: Make) -> None:
    store = HashStore()
    ranks = serving(make, store)
    becomes(ranks[1], store)
    came = again(make, store, 1, progress=0.5, names=[4, 5, 6])
    ranks[0].close()
    first = again(make, store, 0, progress=0.5, names=[4, 5, 6])
    first._look_s = 1.0  # so that it is not the one that watches
    errors = results(together([first, came], one_pass))
    assert [(type(error), error.ranks) for error in errors] == [(RankLost, (6,))] * 2


# What the former process had gone through when it ended, beside a pass that was committed: nothing, a pass that all aborted, an older
# tuner that goes on.
@pytest.mark.parametrize("before", ["nothing", "aborted", "an older tuner goes on"])
def test_the_pass_that_is_ended_is_the_one_that_peers_are_in(before: str, make: Make) -> None:
    store = HashStore()
    ranks = make(3, store, progress=FOR_EVER_S, cap=FOR_EVER_S)
    if before == "nothing":
        ranks[1].begin_pass()  # it is killed in its very first pass
    else:
        results(together(ranks, one_pass if before != "aborted" else aborted))
    groups = [ranks]
    if before == "an older tuner goes on":
        for rank in ranks:
            rank.release()
        groups.append(make(3, store, progress=FOR_EVER_S, cap=FOR_EVER_S))
        results(together(groups[1], one_pass))
    becomes(groups[-1][1], store)
    again(make, store, 1)
    for group in groups:
        errors = results(together([group[0], group[2]], one_pass))
        assert [(type(error), error.ranks, "started again" in str(error)) for error in errors] == [(RankLost, (1,), True)] * 2


def aborted(rank: RankGroup) -> None:
    with rank.open_pass("run_pass"):
        rank.exchange("agree-1", b"x")
        raise PassAborted("digests differ", [1])


def test_who_was_started_again_before_its_first_pass_just_comes(make: Make) -> None:
    """Its peers wait for it in the pass that its former process never began."""
    store = HashStore()
    ranks = make(3, store, progress=FOR_EVER_S, cap=FOR_EVER_S)
    becomes(ranks[1], store)
    assert results(together([ranks[0], again(make, store, 1), ranks[2]], one_pass)) == [[b"x"] * 3] * 3


def test_who_left_in_order_is_not_said_to_have_been_started_again(make: Make) -> None:
    store = HashStore()
    ranks = serving(make, store)
    ranks[1].close()
    again(make, store, 1)
    errors = results(together([ranks[0], ranks[2]], one_pass))
    assert [(type(error), error.ranks) for error in errors] == [(RankWithdrawn, (5,))] * 2


ELSEWHERE = {"host": "far", "boot": "another boot"}


def test_two_processes_that_can_not_see_each_other_as_one_rank_end_typed_on_all(make: Make) -> None:
    """Nobody can tell whether the first one runs. It does."""
    store = HashStore()
    ranks = serving(make, store)
    far = becomes(ranks[1], store, **ELSEWHERE)
    came = again(make, store, 1, names=[4, 5, 6])
    errors = results(together(ranks, one_pass))
    said = f"rank 5 was started again, as {Process.this()} in place of {far}: make a new tuner on all ranks, or restart them all"
    said += "; if both processes run, end the one that was not meant to be this rank"
    assert [(type(error), str(error), error.ranks) for error in errors] == [(RankLost, said, (5,))] * 3
    # The first one makes a new tuner, and takes the place back; the second then ends in the same way, before or in its pass.
    becomes(came, store, **ELSEWHERE)
    first = renewed(make, store, ranks[1])
    with pytest.raises(RankLost, match=r"^rank 5 was started again, .*; if both processes run, end the one that was not meant"):
        one_pass(came)
    # Once it is ended, those that are left meet.
    assert results(together([renewed(make, store, ranks[0]), first, renewed(make, store, ranks[2])], one_pass)) == [[b"x"] * 3] * 3


def test_who_was_replaced_before_its_first_pass_disturbs_nobody(make: Make) -> None:
    store = HashStore()
    ranks = make(3, store, progress=FOR_EVER_S, cap=FOR_EVER_S)
    becomes(ranks[1], store, **ELSEWHERE)
    came = again(make, store, 1)
    with pytest.raises(RankLost, match=r"^rank 1 was started again, as .* in place of ") as told:
        one_pass(ranks[1])
    assert told.value.ranks == (1,)
    ranks[1].close()
    with pytest.raises(TunerStateError, match="rank 1 of group 'group' has an open tuner already; close that one first"):
        again(make, store, 1)  # what it closed was not the other's claim
    assert results(together([ranks[0], came, ranks[2]], one_pass)) == [[b"x"] * 3] * 3


def test_a_rank_whose_other_process_is_seen_to_run_is_refused_and_spoils_nothing(make: Make) -> None:
    store = HashStore()
    ranks = serving(make, store)
    with another() as child:
        becomes(ranks[1], store, pid=child.pid, started_s=child.started_s)
        with pytest.raises(TunerStateError) as refused:
            again(make, store, 1)
    where = f"process {child.pid} on host {os.uname().nodename}"
    assert str(refused.value) == (
        f"rank 1 of group 'group' has an open tuner already, in {where}, which still runs; end that process first, or start this one as "
        "another rank"
    )
    assert results(together(ranks, one_pass)) == [[b"x"] * 3] * 3
    again(make, store, 1)  # it has ended


class _TakenBeside:
    """A view of the rendezvous in which another process takes the place over just before this one would."""

    def __init__(self, store: Any, key: str, other: str) -> None:
        self._store, self._key, self._other = store, key, other

    def clone(self) -> _TakenBeside:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        if key == self._key and expected and self._other:
            self._store.set(key, self._other)
            self._other = ""
        return self._store.compare_set(key, expected, desired)


def test_of_two_that_come_at_once_one_has_the_place(make: Make) -> None:
    store = HashStore()
    ranks = serving(make, store)
    becomes(ranks[1], store)
    with another() as winner, pytest.raises(TunerStateError, match=f"in process {winner.pid} on host .*, which still runs"):
        again(make, _TakenBeside(store, place(ranks[1]), f"y {winner.to_text()}"), 1)


def test_who_closes_frees_no_place_that_another_has_taken_over_meanwhile(make: Make) -> None:
    """Whoever took the place is asked in the same request that frees it."""
    store = HashStore()
    (former,) = make(1, store, of=3, first=1)
    far = dataclasses.replace(Process.this(), **ELSEWHERE)
    store.set(place(former), f"x {far.to_text()}")
    former.close()
    assert store.get(place(former)).decode() == f"x {far.to_text()}"


def test_who_was_replaced_by_one_that_has_closed_since_holds_its_place_again(make: Make) -> None:
    store = HashStore()
    ranks = make(3, store, progress=FOR_EVER_S, cap=FOR_EVER_S)
    becomes(ranks[1], store, **ELSEWHERE)
    again(make, store, 1).close()
    assert results(together(ranks, one_pass)) == [[b"x"] * 3] * 3
    with pytest.raises(TunerStateError, match="has an open tuner already"):
        again(make, store, 1)


def test_a_group_that_was_dropped_without_being_closed_holds_no_place() -> None:
    """As in a notebook, whose cell is run again: nobody is left who could close the former."""
    store = HashStore()
    groups = [RankGroup(store, rank, 2) for rank in range(2)]
    assert results(together(groups, one_pass)) == [[b"x"] * 2] * 2
    del groups
    groups = [RankGroup(store, rank, 2) for rank in range(2)]
    assert results(together(groups, one_pass)) == [[b"x"] * 2] * 2
    with pytest.raises(TunerStateError, match="rank 0 of group 'group' has an open tuner already; close that one first"):
        RankGroup(store, 0, 2)
    for group in groups:
        group.close()


# -- restarted with another release -----------------------------------------------------------------------------------------------------


def of_old(make: Make, store: Any) -> list[RankGroup]:
    return make(3, store, progress=FOR_EVER_S, cap=FOR_EVER_S, names=[4, 5, 6], version=OLD)


def ends(futures: list[Any]) -> list[tuple[type, str, tuple[int, ...]]]:
    return [(type(error), str(error), error.ranks) for error in results(futures)]


# Where the former process was: beyond a pass, in its first, or not even there, so that it is its first words which are waited for.
@pytest.mark.parametrize("before", ["a pass", "in its first pass", "no pass"])
def test_who_is_started_again_as_another_release_is_named_by_its_peers_with_both(before: str, make: Make) -> None:
    """Peers wait for it, and know already that all are of one version. With the right release again, all meet."""
    store = HashStore()
    ranks = of_old(make, store)
    if before == "a pass":
        assert results(together(ranks, one_pass)) == [[b"x"] * 3] * 3
    elif before == "in its first pass":
        ranks[1].begin_pass()
    former = becomes(ranks[1], store)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(one_pass, rank) for rank in (ranks[0], ranks[2])]
        started = time.monotonic()
        while not any(rank._one_version for rank in ranks) and time.monotonic() < started + 20:
            time.sleep(0.01)
        came = again(make, store, 1, names=[4, 5, 6], version=NEW)
        assert ends(together([came], one_pass)) == [(SettingsDiffer, DIFFER, (5,))]
    said = f"rank 5 was started again, as {Process.this()} in place of {former}, with moe_dist {NEW} in place of {OLD}: "
    said += "install the same on all ranks, then make a new tuner on all ranks, or restart them all"
    assert ends(waiting) == [(RankLost, said, (5,))] * 2
    assert time.monotonic() - started < 30, f"no patience ends before {FOR_EVER_S} s"
    for rank in (*ranks, came):
        rank.close()
    assert results(together(of_old(make, store), one_pass)) == [[b"x"] * 3] * 3


def test_who_comes_with_the_right_release_at_last_ends_what_its_peers_began_without_it(make: Make) -> None:
    """Rank 5 was of another release from the first; its peers go on trying, and wait for it in a pass that it will never know of."""
    store = HashStore()
    ranks = of_old(make, store)
    ranks[1].close()
    odd = again(make, store, 1, names=[4, 5, 6], version=NEW)
    tried = [ranks[0], odd, ranks[2]]
    assert ends(together(tried, one_pass)) == [(SettingsDiffer, DIFFER, (5,))] * 3
    odd.close()
    mended = again(make, store, 1, names=[4, 5, 6], version=OLD)

    def again_until_it_meets(rank: RankGroup) -> Any:
        try:
            return one_pass(rank)
        except RankLost as lost:
            return str(lost), one_pass(renewed(make, store, rank, version=OLD))

    said = "all ranks run the same moe_dist again, after a restart: make a new tuner on all ranks, or restart them all"
    met = results(together([ranks[0], mended, ranks[2]], again_until_it_meets))
    assert met == [(said, [b"x"] * 3), [b"x"] * 3, (said, [b"x"] * 3)]


def test_another_release_takes_no_place_from_a_process_that_is_seen_to_run(make: Make) -> None:
    store = HashStore()
    ranks = of_old(make, store)
    assert results(together(ranks, one_pass)) == [[b"x"] * 3] * 3
    with another() as child:
        becomes(ranks[1], store, pid=child.pid, started_s=child.started_s)
        with pytest.raises(TunerStateError, match=f"has an open tuner already, in process {child.pid} on host .*, which still runs"):
            make(1, store, of=3, first=1, version=NEW)
    assert results(together(ranks, one_pass)) == [[b"x"] * 3] * 3


def test_what_releases_say_to_each_other_lies_where_each_of_them_looks(make: Make) -> None:
    """Change none of these: a release that says them otherwise is not understood by those before it."""
    store = HashStore()
    make(1, store, of=2, version=OLD)[0].begin_pass()
    claim = store.get("group/claim/0").decode()
    assert Process.from_text(claim.partition(" ")[2]) == Process.this()
    assert (store.get("group/version/0"), store.get(f"group/{OLD}/attach/0")) == (OLD.encode(), b"1")
    ended = f'["", "RankLost", "rank 0 was started again, as {Process.this()} in place of '
    store.set("group/claim/0", f"x {dataclasses.replace(Process.this(), started_s=0.0).to_text()}")
    make(1, store, of=2, version=NEW)
    verdict = store.get(f"group/{OLD}/1/1/verdict").decode()
    assert verdict.startswith(ended)
    assert verdict.endswith(' or restart them all", [0]]')
