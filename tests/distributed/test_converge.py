"""From words to one conclusion: drops, abstentions, objectives, ratios and the check that all concluded alike."""

from __future__ import annotations

import pytest

from moe_dist.distributed.converge import (
    RoundWord,
    SharesWord,
    combine_rounds,
    combine_shares,
    reduce_ratios,
    reduce_round,
    require_one_digest,
)
from moe_dist.errors import PassAborted
from moe_dist.tuning.problem import Abstain, Failed, Tactic, Timed

A, B, C = (Tactic.of("fake", name=name) for name in "abc")


def timed(median_us: float, spread_us: float = 1.0, samples: int = 3) -> Timed:
    return Timed(median_us, spread_us, samples)


@pytest.mark.parametrize(("objective", "expected"), [("max", 30.0), ("mean", 20.0)])
def test_the_objective_is_taken_over_the_ranks_that_timed(objective: str, expected: float) -> None:
    words = [RoundWord({A: timed(10.0, 2.0, 5)}), RoundWord({A: timed(30.0, 1.0, 3)}), RoundWord({}), RoundWord({A: Abstain()})]
    # An abstaining rank counts neither as 0 nor as one more rank of the mean; spread is the widest, samples the fewest.
    assert reduce_round(words, [A], objective, range(4)) == {A: Timed(expected, 2.0, 3)}


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_failure_on_any_one_rank_drops_the_candidate_for_all(position: int) -> None:
    words = [RoundWord({A: timed(1.0), B: timed(5.0)}) for _ in range(3)]
    words[position] = RoundWord({A: Failed("out of memory in preparation"), B: timed(5.0)})
    reduced = reduce_round(words, [A, B], "max", [10, 11, 12])
    assert reduced[A] == Failed(f"rank {10 + position}: out of memory in preparation")
    assert isinstance(reduced[B], Timed)


def test_the_leader_publishes_what_every_rank_would_conclude() -> None:
    """To the last bit of the mean, however many ranks there are: their words are one of the group's size."""
    words = [RoundWord({A: timed(10.0 + rank / 3), B: timed(7.0)}, elapsed_s=0.1 * rank) for rank in range(50)]
    words[7] = RoundWord({B: Failed("no room")}, elapsed_s=9.5)
    combined = combine_rounds([word.to_bytes([A, B, C]) for word in words], [A, B, C], "mean", range(50))
    heard = RoundWord.from_bytes(combined, [A, B, C])
    assert heard.elapsed_s == 9.5, "the slowest rank's clock"
    assert heard.measured == {tactic: row for tactic, row in reduce_round(words, [A, B, C], "mean", range(50)).items() if tactic != C}
    assert len(combined) < 100


def test_shares_are_combined_to_ratios_and_to_what_failed_anywhere() -> None:
    words = [
        RoundWord({C: timed(20.0), A: timed(10.0)}, 1.0),
        RoundWord({C: timed(40.0), B: timed(30.0)}, 3.0),
        RoundWord({C: timed(10.0), A: Failed("too old a driver")}, 2.0),
    ]
    combined = combine_shares([word.to_bytes([C, A, B]) for word in words], [C, A, B], C)
    assert SharesWord.from_bytes(combined, [C, A, B]) == SharesWord({B: 0.75}, {A: "too old a driver"}, 3.0)


def test_a_candidate_that_nobody_timed_is_an_abstention() -> None:
    assert reduce_round([RoundWord({}), RoundWord({})], [A], "mean", range(2)) == {A: Abstain()}


def test_ratios_are_taken_on_the_rank_that_timed_both() -> None:
    # Rank 1 is twice as slow throughout: B's 30 us there is better than A's 20 us on rank 0.
    words = [RoundWord({C: timed(20.0), A: timed(20.0)}), RoundWord({C: timed(40.0), B: timed(30.0)})]
    assert reduce_ratios(words, [C, A, B], C) == {A: 1.0, B: 0.75}


def test_no_ratio_where_the_default_or_the_candidate_failed() -> None:
    words = [RoundWord({C: Failed("no"), A: timed(1.0)}), RoundWord({C: timed(2.0), B: Failed("no")})]
    assert reduce_ratios(words, [C, A, B], C) == {}


def test_a_round_survives_its_bytes_and_an_abstention_is_not_sent() -> None:
    tactics = [A, B, C]
    word = RoundWord({A: timed(1.5, 0.25, 7), B: Failed("ValueError: tile"), C: Abstain()}, 12.5)
    got = RoundWord.from_bytes(word.to_bytes(tactics), tactics)
    assert (got.elapsed_s, got.measured) == (12.5, {A: timed(1.5, 0.25, 7), B: Failed("ValueError: tile")})


def test_digests_that_differ_abort_and_name_the_odd_ranks() -> None:
    require_one_digest(["x", "x"], [0, 1], "winner tables")
    with pytest.raises(PassAborted, match="winner tables differ: rank 6 holds another than the rest; the pass is aborted") as told:
        require_one_digest(["x", "y", "x"], [5, 6, 7], "winner tables")
    assert told.value.ranks == (6,)


def test_an_even_split_of_digests_names_the_same_ranks_everywhere() -> None:
    with pytest.raises(PassAborted) as first:
        require_one_digest(["y", "x"], [0, 1], "tables")
    with pytest.raises(PassAborted) as second:
        require_one_digest(["y", "x"], [0, 1], "tables")
    assert first.value.ranks == second.value.ranks == (0,)
