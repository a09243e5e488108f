"""The protocol, explored: over every order of requests, timeouts, crashes and restarts of a model, and over random orders of the code.

The invariants: no two survivors serve different tables or conclude differently; nobody waits past its cap; an aborted pass
changes nothing; a late word changes nothing. Each is shown to fail when its guard is taken out.
"""

from __future__ import annotations

import random
from typing import Any

import explorer
import pass_model
import pytest
from explorer import Explorer, Rendezvous, Scenario, stored
from pass_model import GUARDS, HIT_STEPS, Model, explore, wander

SHORT = ("measure", "decide")


@pytest.mark.parametrize(
    ("model", "states"),
    [
        # Two ranks, a whole pass: each waits up to twice, one may crash at any request.
        (Model(2), 4_000),
        (Model(2, raises=1), 2_000),
        (Model(2, raises=0), 1_000),
        (Model(2, deviates=1), 4_000),
        # Long words that differ: rank 0 alone holds the hit, so its bytes are sent.
        (Model(2, HIT_STEPS), 4_000),
        (Model(2, HIT_STEPS, deviates=1), 4_000),
        (Model(3, HIT_STEPS, looks=1), 4_000),
        # Started again while stragglers of the former run go on, at every request of both.
        (Model(2, ("decide",), looks=1, restarts=1), 30_000),
        # Three ranks: a whole pass, and its end with two crashes.
        (Model(3, looks=1), 60_000),
        (Model(3, ("decide",), looks=1, crashes=2), 10_000),
        (Model(3, SHORT, looks=1, raises=2), 800),
        (Model(3, SHORT, looks=1, deviates=2), 20_000),
        # One of those that wait watches for all; any may crash or be thought gone while it does.
        (Model(2, looks=1, watch=True), 5_000),
        (Model(3, ("decide",), looks=1, watch=True), 10_000),
    ],
)
def test_every_order_keeps_the_invariants(model: Model, states: int) -> None:
    found = explore(model)
    assert found.states > states, "the model lost orders that it had"
    ends = {end for ending in found.endings for end in ending}
    if model.deviates is None and model.raises is None:
        assert "serves" in ends
    # Both ways out are among the orders: it is not by refusing to end that the invariants hold.
    assert any(end.startswith("RankLost") for end in ends)
    assert ("left" in ends) == (model.raises is not None)
    assert any(end.startswith("PassAborted") for end in ends) == (model.deviates is not None)


@pytest.mark.parametrize(
    ("model", "walks"),
    [
        (Model(3, restarts=1, crashes=2), 150),
        (Model(8, crashes=3), 40),
        (Model(8, crashes=3, watch=True), 20),
        (Model(8, raises=5), 20),
        (Model(8, deviates=3), 20),
    ],
)
def test_random_orders_of_more_ranks_keep_the_invariants(model: Model, walks: int) -> None:
    found = wander(model, random.Random(7), walks)
    assert sum(found.endings.values()) == walks
    assert len(found.endings) > 1


@pytest.mark.parametrize(
    ("guard", "model", "broken"),
    [
        ("first verdict stands", {}, "survivors end differently: RankLost"),
        ("deadline", {}, "a rank waits past its cap"),
        ("serve what was committed", {}, "a table is served that was not committed"),
        ("second look", {}, "two survivors serve different tables"),
        ("digests compared", {"deviates": 1}, "two survivors serve different tables"),
        ("bytes stay for a step", {"steps": HIT_STEPS}, "the bytes of agree-1 are gone before rank 1 of run 0 has read them"),
        ("watch passes on", {"steps": ("decide",), "looks": 1, "watch": True}, "a rank waits past its cap"),
        ("words carry their run", {"steps": ("decide",), "looks": 1, "restarts": 1}, "a late word or verdict ended a pass with PassAborted"),
    ],
)  # fmt: skip
def test_each_invariant_fails_when_its_guard_is_taken_out(guard: str, model: dict[str, Any], broken: str) -> None:
    assert guard in GUARDS
    explore(Model(2, **model))
    with pytest.raises(pass_model.Violation, match=broken) as shown:
        explore(Model(2, without=frozenset({guard}), **model))
    assert "0 says" in str(shown.value), "the shortest order that shows it"


def test_every_guard_is_taken_out_once() -> None:
    (marker,) = [mark for mark in test_each_invariant_fails_when_its_guard_is_taken_out.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert sorted(row[0] for row in marker.args[1]) == sorted(GUARDS)


# -- the code itself, in random orders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "executions"),
    [
        (Scenario(2), 25),
        (Scenario(3, passes=2), 15),
        (Scenario(3, raises=(1,), allowed=("RankLost", "RankWithdrawn")), 15),
        # Rank 1, or the leader, closes in order after the first pass: the second ends for the others, and the first stands.
        (Scenario(3, passes=2, closes=(1,), allowed=("RankLost", "RankWithdrawn")), 20),
        (Scenario(2, passes=2, closes=(0,), allowed=("RankLost", "RankWithdrawn")), 20),
        (Scenario(8), 4),
        # Rank 1 alone is warm: its entry is offered by its digest, and its bytes are sent to the others.
        (Scenario(3, entries=stored(), holders=(1,)), 25),
    ],
)
def test_random_orders_of_the_real_pass_keep_the_invariants(scenario: Scenario, executions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Explorer(scenario, monkeypatch)
    found.some(executions, seed=3)
    assert sum(found.endings.values()) >= executions


def test_the_real_pass_breaks_without_the_compare_of_the_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness sees what the model sees."""

    def overwrite(self: Rendezvous, key: str, expected: str, desired: str) -> bytes:
        if "/claim/" not in key:
            self._world.point()
        self._values[key] = desired.encode()
        return self._values[key]

    found = Explorer(Scenario(2, entries=stored()), monkeypatch)
    monkeypatch.setattr(Rendezvous, "compare_set", overwrite)
    with pytest.raises(explorer.Violation):
        found.some(200, seed=1)
