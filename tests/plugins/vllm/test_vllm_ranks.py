"""The real vLLM on CPU with --moe-backend=moe_dist, on two ranks: the tokens of one, one epoch on both, and a rank that fails in tuning.

In float32, where greedy tokens of all layouts agree.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import LEAST_CALLS, Drive, driver, executed, passed, summaries

from moe_dist.serving import stored_epochs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]  # of a machine where ten others work too; see the durations for a free one
STARTUP_S = 100  # of the engines that fail: their passes may take half of it


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    return driver(lambda: tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engines(drive: Drive, model: Path, store: Path) -> dict[str, Any]:
    """What each came to, by name, in the order in which they ran: one process starts them all, and each has workers of its own."""
    ours: dict[str, Any] = {"model": model, "backend": "moe_dist"}
    two = {**ours, "tensor_parallel_size": 2}
    failing = {"VLLM_ENGINE_READY_TIMEOUT_S": str(STARTUP_S), "MOE_DIST_STORE": "memory:"}
    asked: dict[str, dict[str, Any]] = {
        "stock": {"model": model, "backend": "auto"},
        "tp": two,
        "ep": {**two, "enable_expert_parallel": True},
        "pp": {**ours, "pipeline_parallel_size": 2, "environ": {"WITNESS_STAGES": "1", "MOE_DIST_STORE": f"{store}-of-stages"}},
        "eplb": {**two, "enable_expert_parallel": True, "enable_eplb": True, "fails": True, "environ": {"WITNESS_EPLB": "1"}},
        "raise": {**two, "fails": True, "environ": {**failing, "WITNESS_FAULT": "1:raise"}},
        "exit": {**two, "fails": True, "environ": {**failing, "WITNESS_FAULT": "1:exit"}},
    }
    run = passed(drive(*asked.values(), MOE_DIST_STORE=str(store)))
    return dict(zip(asked, run.engines, strict=True))


@pytest.mark.parametrize("layout", ["tp", "ep"])
def test_two_ranks_give_the_tokens_of_one_and_serve_one_epoch(layout: str, engines: dict[str, Any]) -> None:
    engine = engines[layout]
    assert engine["tokens"] == engines["stock"]["tokens"]
    assert [calls >= LEAST_CALLS for calls in executed(engine)] == [True, True]
    (epoch, timed), (other_epoch, other_timed) = summaries(engine["log"])
    assert epoch == other_epoch
    assert timed == other_timed > 0  # cut or shared out, it is another problem than one rank's
    assert {"tp": "tp 2 ep 1", "ep": "tp 1 ep 2"}[layout] in engine["log"]


def test_each_stage_of_a_pipeline_serves_its_own_layers(engines: dict[str, Any], store: Path) -> None:
    engine = engines["pp"]
    assert engine["tokens"] == engines["stock"]["tokens"]
    assert [calls >= LEAST_CALLS // 2 for calls in executed(engine)] == [True, True]
    assert sorted(re.findall(r"1 x \(8 experts .* first model\.layers\.(\d)\.", engine["log"])) == ["0", "1"]
    assert len(summaries(engine["log"])) == 2
    assert {epoch.deployment[-7:] for epoch in stored_epochs(f"{store}-of-stages")} == {":stage0", ":stage1"}


def test_eplb_ends_start_up_with_the_reason(engines: dict[str, Any]) -> None:
    engine = engines["eplb"]
    assert "moe_dist keeps each expert where it was loaded, so it can't run with EPLB (--enable-eplb)" in engine["log"], engine["log"][
        -6000:
    ]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        # Its peer is told why, at once, and its own error ends start-up too.
        ("raise", r"RankWithdrawn: rank 1 left the pass: RuntimeError: a fault made by the test"),
        # It says nothing: either vLLM sees the process end, or its peer the silence, a tenth of the start-up timeout.
        ("exit", r"RankLost: rank 1 lost in pass 1|RendezvousLost|died unexpectedly"),
    ],
)
def test_a_rank_that_fails_in_tuning_ends_start_up_with_the_reason(fault: str, reason: str, engines: dict[str, Any]) -> None:
    engine = engines[fault]
    assert re.search(reason, engine["log"]), engine["log"][-6000:]
    (struck,) = re.findall(r"a fault at ([\d.]+)", engine["log"])
    assert 0 < engine["ended"] - float(struck) < STARTUP_S / 2  # what a pass may take


def test_expert_parallel_over_data_parallel_gathers_all_rows(drive: Drive, model: Path, store: Path, engines: dict[str, Any]) -> None:
    """Two replicas with unlike batches: each rank's experts see the rows of both, and the sum is scattered back."""
    engine = {"model": model, "backend": "moe_dist", "enable_expert_parallel": True}
    run = passed(drive(engine, replicas=2, MOE_DIST_STORE=str(store), WITNESS_GATHER="1"))
    assert [replica["tokens"] for replica in run.engines] == [engines["stock"]["tokens"][rank:] for rank in range(2)]
    assert all(calls >= LEAST_CALLS for calls in executed(run.engines[0]))
    (epoch, timed), (other_epoch, other_timed) = summaries(run.log)
    assert epoch == other_epoch
    assert timed == other_timed
    (line,) = re.findall(r"2 x \(8 experts .*, tp 1 ep 2\), .*", run.log)
    assert re.search(r"[ -]128: ", line)  # of 64 tokens a step and rank
