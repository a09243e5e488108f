"""Rank 0's process, which serves the rendezvous, outlasts the groups that it is not in, and waits for none for ever."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore

from moe_dist.cli import hosting
from moe_dist.cli.hosting import Hosted

PATIENCE, TO_END = timedelta(seconds=60), timedelta(seconds=10)


class Waiting:
    """Rank 0's wait for the other of two groups of two, in simulated time; `then` says what happens when. said: (when, what)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.said, self._then = 0.0, list[tuple[int, str]](), dict[float, Callable[[], None]]()
        monkeypatch.setattr(hosting, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        store = HashStore()
        self.host, self.beside, self.first, self.last = (
            Hosted(store, rank, rank // 2, groups=1, ranks=2, patience=PATIENCE, to_end=TO_END) for rank in range(4)
        )

    def then(self, when: float, happens: Callable[[], None]) -> None:
        self._then[when] = happens

    def seconds(self, *, wait: bool = True) -> float:
        """How long rank 0 stayed."""
        self.host.end(lambda what: self.said.append((round(self.now), what)), wait=wait)
        return self.now

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self._then if when <= self.now]:
            self._then.pop(when)()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(monkeypatch)


def test_rank_0_stays_until_each_rank_of_the_other_group_has_ended(waiting: Waiting) -> None:
    waiting.beside.end(print)  # of rank 0's own group: it counts for nothing
    waiting.then(1.0, lambda: waiting.first.end(print))
    waiting.then(4.0, lambda: waiting.last.end(print))
    assert waiting.seconds() == pytest.approx(4.0, abs=0.2)
    assert waiting.said == []


def test_patience_counts_from_the_last_pass_of_the_others(waiting: Waiting) -> None:
    for passed in (50.0, 100.0, 150.0):
        waiting.then(passed, waiting.first.go_on)
    assert waiting.seconds() == pytest.approx(150.0 + PATIENCE.total_seconds(), abs=0.5)
    assert waiting.said == [
        (5, "this process serves the rendezvous: it stays for 2 of the 2 ranks of other groups"),
        (210, "other groups: 2 of 2 ranks have not moved for 60 s; this process ends, and the rendezvous with it"),
    ]


def test_a_group_of_which_one_rank_has_ended_is_soon_over(waiting: Waiting) -> None:
    """As where its other rank was killed, which says nothing."""
    waiting.first.end(print)
    assert waiting.seconds() == pytest.approx(TO_END.total_seconds(), abs=0.5)
    assert waiting.said[-1] == (10, "other groups: 1 of 2 ranks have not moved for 10 s; this process ends, and the rendezvous with it")


def test_who_is_interrupted_says_so_and_waits_for_nobody(waiting: Waiting) -> None:
    assert waiting.seconds(wait=False) == 0.0
    for rank in (waiting.first, waiting.last):
        rank.end(print, wait=False)
    assert waiting.seconds() == 0.0, "both have said it"
