"""The race: what it drops, what can't be dropped, and that noise does not choose the winner."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from moe_dist.tuning.problem import Abstain, Failed, Measurement, Tactic, Timed
from moe_dist.tuning.search import DEVICE_DROP_RATIOS, DROP_RATIOS, TIE_RATIO, Race, finalists


def tactic(name: str) -> Tactic:
    return Tactic.of("fake", name=name)


DEFAULT, A, B = tactic("plain"), tactic("a"), tactic("b")


def times(**us: float | Measurement) -> dict[Tactic, Measurement]:
    return {tactic(name): value if isinstance(value, (Timed, Failed, Abstain)) else Timed(value, 0.0, 1) for name, value in us.items()}


@pytest.mark.parametrize(("device_time", "ratios"), [(False, DROP_RATIOS), (True, DEVICE_DROP_RATIOS)])  # the host's noise, or none
def test_each_round_drops_what_is_behind_by_more_than_its_ratio(device_time: bool, ratios: tuple[float, ...]) -> None:
    for number, ratio in enumerate(ratios):
        race = Race([DEFAULT, A, B], DEFAULT, device_time=device_time)
        # The ratios fall, so what is just behind this round's survived the earlier, wider ones.
        for _ in range(number + 1):
            race.feed(times(plain=100.0, a=100.0 * ratio * 0.999, b=100.0 * ratio * 1.001))
        assert race.alive == [DEFAULT, A], f"round {number}"
        assert race.rejected == {B: f"{ratio * 1.001:.2f}x the best after round {number}"}


def test_rounds_beyond_the_last_ratio_keep_it() -> None:
    race = Race([DEFAULT, A], DEFAULT)
    for _ in range(len(DROP_RATIOS) + 3):
        race.feed(times(plain=100.0, a=100.0 * DROP_RATIOS[-1] * 0.999))
    assert race.alive == [DEFAULT, A]


def test_the_default_is_never_dropped_however_slow() -> None:
    race = Race([DEFAULT, A], DEFAULT)
    for _ in range(4):
        race.feed(times(plain=5000.0, a=1.0))
    assert DEFAULT in race.alive
    standing = race.standing(DEFAULT)
    assert standing is not None
    assert (standing.median_us, standing.rounds) == (5000.0, 4), "its time is known to the end"
    winner = race.winner()
    assert winner is not None
    assert winner.tactic == A


@pytest.mark.parametrize(("measured", "reason"), [(Failed("rank 1: boom"), "rank 1: boom"), (Abstain(), "timed on no rank")])
def test_a_candidate_that_failed_or_was_not_timed_cannot_win(measured: Measurement, reason: str) -> None:
    race = Race([DEFAULT, A], DEFAULT)
    race.feed(times(plain=2.0, a=1.0))
    race.feed(times(plain=2.0, a=measured))
    assert race.rejected == {A: reason}
    winner = race.winner()
    assert winner is not None
    assert winner.tactic == DEFAULT


def test_when_all_fail_nothing_wins() -> None:
    race = Race([DEFAULT, A], DEFAULT)
    race.feed({})
    assert (race.winner(), race.alive) == (None, [])
    race.feed(times(a=1.0))
    assert race.winner() is None, "a later time does not bring back what is out"


def test_an_incomplete_race_has_no_winner() -> None:
    race = Race([DEFAULT, A, B], DEFAULT)
    race.feed(times(plain=100.0, a=80.0))
    race.stop("the time budget ended before it was timed to the end")
    assert race.winner() is None
    assert race.rejected == {B: "timed on no rank"} | dict.fromkeys((DEFAULT, A), "the time budget ended before it was timed to the end")
    assert race.tried == {DEFAULT, A}, "all that counts as measured"


def run(costs: Mapping[str, float], noise: float, seed: int, default: Tactic = DEFAULT) -> str:
    rng = random.Random(seed)
    race = Race([tactic(name) for name in costs], default)
    for _ in range(4):
        race.feed(times(**{name: cost * (1 + rng.uniform(-noise, noise)) for name, cost in costs.items()}))
    winner = race.winner()
    assert winner is not None
    return str(winner.tactic["name"])


@pytest.mark.parametrize(
    ("costs", "winner"),
    [
        ({"plain": 100.0, "a": 100.0, "b": 100.0}, "plain"),  # all equal: the default
        ({"plain": 100.0, "a": 99.5, "b": 100.2}, "plain"),  # ahead by less than the noise: still the default
        ({"plain": 130.0, "c": 100.0, "a": 100.0, "b": 100.0}, "a"),  # equals that beat the default: the first by name
        ({"plain": 100.0, "b": 90.0, "a": 96.0}, "b"),  # clear of the noise: the fastest, whatever its name
    ],
)
def test_one_per_cent_of_noise_never_changes_the_winner(costs: Mapping[str, float], winner: str) -> None:
    assert {run(costs, 0.01, seed) for seed in range(20)} == {winner}


def test_a_gain_above_the_tie_ratio_is_taken_and_one_below_is_not() -> None:
    assert run({"plain": 100.0, "a": 100.0 / (TIE_RATIO + 0.001)}, 0.0, 0) == "a"
    assert run({"plain": 100.0, "a": 100.0 / (TIE_RATIO - 0.001)}, 0.0, 0) == "plain"


def test_a_wide_spread_widens_the_tie() -> None:
    race = Race([DEFAULT, A], DEFAULT)
    for plain, a in ((100.0, 95.0), (112.0, 108.0), (104.0, 101.0)):  # medians 104 and 101, spreads 6 and 6.5
        race.feed(times(plain=plain, a=a))
    winner = race.winner()
    assert winner is not None
    assert winner.tactic == DEFAULT, "3% apart, but rounds of one candidate differ by more"


def test_what_ties_with_a_noisy_best_does_not_win_if_it_is_slower_than_a_steady_default() -> None:
    race = Race([DEFAULT, A, B], DEFAULT)
    # Medians 103, 108 and 100: a and b tie within their spread of 10, and a comes first by name; the default is 3% behind b.
    for plain, a, b in ((103.0, 108.0, 100.0), (103.0, 118.0, 110.0), (103.0, 98.0, 90.0)):
        race.feed(times(plain=plain, a=a, b=b))
    winner = race.winner()
    assert winner is not None
    assert winner.tactic == B


def test_finalists_are_the_default_and_the_best_few_in_a_fixed_order() -> None:
    ratios = {tactic(name): ratio for name, ratio in {"e": 0.5, "d": 0.7, "c": 0.6, "b": 0.9, "a": 0.7}.items()}
    assert finalists(ratios, DEFAULT, count=3) == [DEFAULT, tactic("a"), tactic("c"), tactic("e")], "of equals the first by name"
    assert finalists({}, DEFAULT) == [DEFAULT]
    assert finalists({DEFAULT: 1.0, A: 2.0}, DEFAULT) == [DEFAULT, A]
