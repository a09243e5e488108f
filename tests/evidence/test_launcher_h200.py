"""The launcher's rows on two H200s: no cell is missing, and these bars hold: no key differs, no winner loses to its default, a second run measures nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/evidence/launcher-h200x2"
BUCKETS = [1 << power for power in range(13)]  # 1 to 4096
RUNS = [(policy, strategy) for policy in ("cuda_graph", "eager") for strategy in ("reduce", "shard")]


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return document


@pytest.mark.parametrize(("policy", "strategy"), RUNS)
def test_every_bucket_was_tuned_by_two_ranks_that_agree(policy: str, strategy: str) -> None:
    run = load(f"{strategy}-{policy}")
    assert (run["policy"], run["strategy"], run["ranks"], run["device"], run["model"]) == (policy, strategy, 2, "cuda", "qwen3-30b-a3b")
    assert [key["bucket"][1] for key in run["keys"]] == BUCKETS
    assert {key["mode"] for key in run["keys"]} == {policy}
    assert {key["source"] for key in run["keys"]} == {"tuned"}
    assert run["measured"] >= 16 * len(BUCKETS)
    assert run["diverged"] == 0
    assert run["error"] is None
    assert all(key["winner_us"] <= key["default_us"] for key in run["keys"]), "a winner never loses to the default"


@pytest.mark.parametrize(("policy", "strategy"), RUNS)
def test_a_candidate_is_out_for_its_speed_alone(policy: str, strategy: str) -> None:
    """What can't run is no candidate, so that a failure here is a fault to look at."""
    reasons = {row["reason"] for row in load(f"{strategy}-{policy}")["rejected"]}
    assert all(re.match(r"\d+\.\d\dx (the best after round \d|.*no finalist)", reason) for reason in reasons), reasons


def test_the_second_run_measured_nothing() -> None:
    again = load("again")
    assert (again["measured"], again["hits"], again["diverged"]) == (0, len(BUCKETS), 0)
    assert [key["winner"] for key in again["keys"]] == [key["winner"] for key in load("reduce-cuda_graph")["keys"]]


def test_the_tables_of_the_document_are_these_rows() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    graph, eager = (load(f"reduce-{policy}")["keys"] for policy in ("cuda_graph", "eager"))
    for bucket, captured, direct in zip(BUCKETS, graph, eager, strict=True):
        cells = [str(bucket)]
        for key in (captured, direct):
            cells += [f"{key['default_us']:.1f}", f"{key['winner_us']:.1f}", f"{key['default_us'] / key['winner_us']:.2f}"]
        assert "| " + " | ".join(cells) + " |" in text, cells
    for policy, strategy in RUNS:
        assert f"| {policy} | {strategy} | {load(f'{strategy}-{policy}')['seconds']:.1f} |" in text
