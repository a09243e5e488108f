"""What ranks say: words and verdicts as they are sent."""

from __future__ import annotations

import pytest

from moe_dist.distributed.words import Verdict, bundle, unbundle
from moe_dist.errors import (
    CallsDiffer,
    NothingRunnable,
    PassAborted,
    RankLost,
    RankWithdrawn,
    SettingsDiffer,
)


def test_equal_words_are_published_once() -> None:
    words = [b"x" * 1000, b"", b"x" * 1000, b"y"] * 100
    assert unbundle(bundle(words)) == words
    assert len(bundle(words)) < 1000 + 2 * len(words)


@pytest.mark.parametrize(
    "verdict", [Verdict(committed="d"), Verdict(error="RankLost", message="rank 3 lost", ranks=(3, 5)), Verdict(error="PassAborted")]
)
def test_a_verdict_survives_its_text(verdict: Verdict) -> None:
    assert Verdict.from_text(verdict.to_text()) == verdict


@pytest.mark.parametrize("kind", [RankLost, RankWithdrawn, PassAborted, SettingsDiffer, CallsDiffer, NothingRunnable])
def test_every_error_that_a_verdict_can_carry_comes_back_with_its_ranks(kind: type[Exception]) -> None:
    error = Verdict(error=kind.__name__, message="why", ranks=(2,)).exception
    assert type(error) is kind
    assert str(error) == "why"
    assert getattr(error, "ranks", (2,)) == (2,)
    assert Verdict(committed="table").exception is None
