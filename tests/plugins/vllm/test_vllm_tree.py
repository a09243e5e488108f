"""A later vLLM than the one that has a build for CPUs: its Python over that one's extensions, on one rank and on two that share the experts out.

A small part of the suite, for each run of it; `make test-vllm-tree` runs all of it so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from make_env import LATER
from moe_dist_vllm.compat import NEEDS
from vllm_engines import LEAST_CALLS, driver, executed, passed, summaries

from moe_dist.interop.source import problems

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]  # of a machine where ten others work too; see the durations for a free one
TREE = Path(sys.prefix) / f"tree-{LATER}"


@pytest.fixture(scope="module", autouse=True)
def tree() -> None:
    assert TREE.is_dir(), f"there is no {TREE}; make_env.py {sys.prefix} --tree {LATER} makes it"


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each came to, by name; one process starts them all."""
    ours = {"model": model, "backend": "moe_dist"}
    asked: dict[str, dict[str, Any]] = {
        "stock": {"model": model, "backend": "auto"},
        "one": ours,
        "ep": {**ours, "tensor_parallel_size": 2, "enable_expert_parallel": True},
    }
    path = os.pathsep.join([str(TREE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        drive = driver(lambda: tmp_path_factory.mktemp("engine"))
        run = passed(drive(*asked.values(), MOE_DIST_STORE=str(tmp_path_factory.mktemp("store")), VLLM_TARGET_DEVICE="cpu"))
    return dict(zip(asked, run.engines, strict=True))


def test_it_has_every_name_that_we_rely_on() -> None:
    assert problems(TREE / "vllm", NEEDS, "vllm") == []


@pytest.mark.parametrize(("name", "ranks"), [("one", 1), ("ep", 2)])
def test_it_gives_its_own_tokens_with_our_experts(name: str, ranks: int, engines: dict[str, Any]) -> None:
    engine = engines[name]
    assert f"V1 LLM engine (v{LATER})" in engine["log"]
    assert engine["tokens"] == engines["stock"]["tokens"]
    assert len({str(row) for row in engine["tokens"]}) > 1
    assert [calls >= LEAST_CALLS for calls in executed(engine)] == [True] * ranks
    epochs = summaries(engine["log"])
    assert [timed > 0 for _, timed in epochs] == [True] * ranks
    assert len({epoch for epoch, _ in epochs}) == 1  # both ranks serve one
