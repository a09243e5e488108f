"""Symmetric memory: reserved by all ranks or by none, gone with them, and no step in it waits for ever."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from ranks import Rank, Ranks, run_ranks
from tmpfs import tmpfs

from moe_dist.distributed import symmetric
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.symmetric import Arena, Refused, reserve, why_no_arena
from moe_dist.errors import CallsDiffer, GroupError, RankLost

MIB = 1 << 20
NAMES = (4, 5, 6)  # global ranks that are not the group's own, so that an error with the wrong ones shows


def arenas(names: tuple[int, ...] = NAMES, nbytes: int = 1024) -> list[Arena]:
    """The ranks of one arena in one process, for threads."""
    fd = os.memfd_create("arena")
    os.ftruncate(fd, symmetric._total(len(names), nbytes))
    made = [Arena(fd, rank, names, nbytes) for rank in range(len(names))]
    os.close(fd)
    return made


def together(*actions: Callable[[], Any]) -> list[Any]:
    """What each action returns or raises; all run at once."""

    def caught(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except GroupError as error:
            return error

    with ThreadPoolExecutor(len(actions)) as threads:
        return [future.result(timeout=60) for future in [threads.submit(caught, action) for action in actions]]


def meet(arena: Arena, steps: list[str], patience_s: float = 20.0) -> None:
    for step in steps:
        arena.post(step)
        arena.wait(step, patience_s)


def test_what_was_written_before_a_step_is_read_after_it() -> None:
    ranks = arenas()

    def run(arena: Arena) -> list[float]:
        seen = []
        for step in range(50):  # enough for each rank to run ahead of the others
            arena.data(arena.rank, torch.float32, 1).fill_(step * 10 + arena.rank)
            meet(arena, [f"step {step}, written"])
            seen += [float(arena.data(rank, torch.float32, 1)) for rank in range(3)]
            meet(arena, [f"step {step}, read"])
        return seen

    expected = [float(step * 10 + rank) for step in range(50) for rank in range(3)]
    assert together(*(lambda arena=arena: run(arena) for arena in ranks)) == [expected] * 3


def test_data_of_ranks_do_not_overlap_and_have_the_room_that_was_asked_for() -> None:
    ranks = arenas(nbytes=4097)  # one byte more than a page
    for arena in ranks:
        arena.data(arena.rank, torch.uint8, 4097).fill_(arena.rank + 1)
    assert [int(ranks[0].data(rank, torch.uint8, 4097).float().mean()) for rank in range(3)] == [1, 2, 3]
    meet_all = together(*(lambda arena=arena: meet(arena, ["filled"]) for arena in ranks))
    assert meet_all == [None] * 3, "data reached into the words of the ranks"


def test_ranks_that_do_not_come_are_named_by_all_at_once() -> None:
    ranks = arenas()
    started = time.monotonic()
    # The second would wait for a minute: it is told what the first concludes.
    first, second = together(lambda: meet(ranks[0], ["call 1"], 0.5), lambda: meet(ranks[2], ["call 1"], 60.0))
    assert time.monotonic() - started < 30
    assert isinstance(first, RankLost)
    assert isinstance(second, RankLost)
    assert str(first) == "rank 5 lost in call 1: not there after 0.5 s"
    assert str(second) == "rank 5 lost in call 1: said rank 4"
    assert first.ranks == second.ranks == (5,)
    (late,) = together(lambda: meet(ranks[1], ["call 1", "call 2"]))
    assert isinstance(late, RankLost)
    assert late.ranks == (5,), "the late rank learns that it was lost"


def test_an_arena_serves_nothing_after_an_error_until_all_restart() -> None:
    ranks = arenas((4, 5))
    together(lambda: meet(ranks[0], ["call 1"], 0.1))
    (again,) = together(lambda: meet(ranks[0], ["call 2"], 60.0))
    assert str(again) == "rank 5 lost in call 1: not there after 0.1 s"
    for arena in ranks:
        arena.restart()
    assert together(*(lambda arena=arena: meet(arena, ["call 1", "call 2"]) for arena in ranks)) == [None] * 2


def test_another_call_is_an_error_that_names_the_odd_rank_everywhere() -> None:
    ranks = arenas()
    calls = ["one_shot of [4, 7]", "one_shot of [4, 7]", "two_shot of [4, 7]"]
    raised = together(*(lambda arena=arena, call=call: meet(arena, [call]) for arena, call in zip(ranks, calls, strict=True)))
    assert [(type(error), error.ranks) for error in raised] == [(CallsDiffer, (6,))] * 3
    assert "rank 6 made another call than the rest (rank 4: one_shot of [4, 7])" in str(raised[0])


def test_a_rank_that_leaves_is_named_at_once_and_spoils_no_step_that_it_took() -> None:
    ranks = arenas()
    for arena in ranks:
        arena.post("call 1")
    ranks[1].leave()
    assert together(*(lambda arena=arena: arena.wait("call 1", 60.0) for arena in ranks)) == [None] * 3
    started = time.monotonic()
    first, second = together(lambda: meet(ranks[0], ["call 2"], 60.0), lambda: meet(ranks[2], ["call 2"], 60.0))
    assert time.monotonic() - started < 30
    assert (type(first), first.ranks, type(second), second.ranks) == (RankLost, (5,), RankLost, (5,))
    assert "rank 5 lost in call 2: said rank " in str(first)


def test_no_arena_for_more_ranks_than_a_word_can_name() -> None:
    assert why_no_arena(62) is None
    assert why_no_arena(63) == "an arena has room for 62 ranks, not 63"


# -- reserve, with real ranks ------------------------------------------------------------------------------------------------


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder of shared memory of the test's own, so that what is left there is this test's."""
    folder = symmetric.FOLDER / f"test-{uuid4().hex}"
    folder.mkdir()
    yield folder
    left = list(folder.iterdir())
    for path in left:
        path.unlink()
    folder.rmdir()
    assert not left, "a name was left in shared memory"


def open_group(rank: Rank, shm: Path, progress_timeout: float = 30.0) -> tuple[RankGroup, list[str]]:
    """The group with a pass begun, and the steps that it exchanges."""
    symmetric.FOLDER = shm
    group = rank.group(progress_timeout=progress_timeout)
    group.begin_pass()
    steps: list[str] = []
    exchange = group.exchange

    def counted(step: str, word: bytes) -> list[bytes]:
        steps.append(step)
        return exchange(step, word)

    group.exchange = counted  # type: ignore[method-assign]
    return group, steps


def reserve_thrice(rank: Rank, shm: Path) -> Any:
    group, steps = open_group(rank, shm)
    first = reserve(group, "first", 1000 * rank.index)
    assert isinstance(first, Arena)
    first.data(rank.index, torch.int64, 1).fill_(100 + rank.index)
    meet(first, ["filled"])
    seen = [int(first.data(peer, torch.int64, 1)) for peer in range(rank.size)]
    smaller = reserve(group, "smaller", 500, first)
    larger = reserve(group, "larger", 10_000 if rank.index == 1 else 0, first)
    assert isinstance(larger, Arena)
    nothing = reserve(group, "nothing", 0)
    return seen, first.nbytes, smaller is first, larger.nbytes, nothing, len(steps)


def test_all_ranks_map_the_most_that_one_asked_for(shm: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(reserve_thrice, 3, tmp_path, shm)
    # 3 exchanges each time: made, kept, made again, nothing asked for.
    assert [outcome.value for outcome in outcomes] == [([100, 101, 102], 2000, True, 10_000, None, 12)] * 3, outcomes


def limited(rank: Rank, shm: Path, who: int) -> Any:
    """Rank `who` may not have 48 MiB: as the maker of the file (0) by a limit on its size, else by one on its address space."""
    group, steps = open_group(rank, shm)
    if rank.index == who:
        if who == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 16 * MIB, resource.RLIM_INFINITY))
    got = reserve(group, "test", 16 * MIB)
    assert isinstance(got, Refused)
    return got.reason, got.ranks, len(steps)


@pytest.mark.parametrize(("who", "why"), [(0, "OSError: [Errno 27] File too large"), (2, "OSError: [Errno 12] Cannot allocate memory")])
def test_one_rank_that_cannot_have_it_is_a_refusal_for_all(who: int, why: str, shm: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(limited, 3, tmp_path, shm, who)
    reason = f"16777216 bytes of symmetric memory a rank could not be reserved: rank {who}: {why}"
    assert [outcome.value for outcome in outcomes] == [(reason, (who,), 3)] * 3, outcomes


def fill(rank: Rank, folder: Path) -> Any:
    """More than there is room for, then less: every byte of which can be written."""
    group, _ = open_group(rank, folder)
    refused = reserve(group, "much", MIB)
    assert isinstance(refused, Refused)
    arena = reserve(group, "less", 64 * 1024)
    assert isinstance(arena, Arena)
    arena.data(1 - rank.index, torch.uint8, arena.nbytes).fill_(7)
    return refused.reason


def test_shared_memory_that_is_full_is_a_refusal_not_a_crash_at_the_first_write(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", "256k"):
        outcomes = run_ranks(fill, 2, tmp_path / "ranks", tmp_path / "shm")
    reason = "1048576 bytes of symmetric memory a rank could not be reserved: rank 0: OSError: [Errno 28] No space left on device"
    assert [outcome.value for outcome in outcomes] == [reason] * 2, outcomes


def stopped_in(rank: Rank, shm: Path, who: int) -> Any:
    group, _ = open_group(rank, shm, progress_timeout=4.0)
    step = "_make" if who == 0 else "_open"
    real = getattr(symmetric, step)

    def stop(*args: Any) -> None:
        real(*args)
        rank.mark("there")
        time.sleep(3600)

    if rank.index == who:
        setattr(symmetric, step, stop)
    return reserve(group, "test", MIB)


# 0: the leader dies when it has made the file; 1: a rank dies when it has mapped it, so that the name is still there.
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_while_reserving_is_named_and_leaves_no_memory(who: int, shm: Path, tmp_path: Path) -> None:
    with Ranks(stopped_in, 3, tmp_path, shm, who) as ranks:
        ranks.wait("there")
        assert len(list(shm.iterdir())) == 1
        ranks.signal(who, signal.SIGKILL)
        survivors = [ranks.join_one(rank, 30.0) for rank in range(3) if rank != who]
    assert [(outcome.error, outcome.culprits) for outcome in survivors] == [("RankLost", (who,))] * 2, survivors
