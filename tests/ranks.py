"""Ranks as real processes, for tests."""

from moe_dist.bench.ranks import Outcome, Rank, RankHangs, Ranks, run_ranks, wait_for

__all__ = ["Outcome", "Rank", "RankHangs", "Ranks", "run_ranks", "wait_for"]
