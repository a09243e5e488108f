"""The real vLLM on a GPU with --moe-backend=moe_dist: each kind of CUDA graph, sleeping, reloaded weights, vLLM's own experts as the default.

One process, one engine after the other. In float32, so that greedy tokens of eager calls and of every kind of graph agree far. About three
minutes; `VLLM_ATTENTION_BACKEND` and the like are the caller's.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import vllm_tiny
from vllm_engines import Run, driver

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
GRAPHS = ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("gpu")
    other = vllm_tiny.save_plain(folder / "other", seed=1)
    common: dict[str, Any] = {
        "model": vllm_tiny.save_plain(folder / "plain"), "backend": "moe_dist", "gpu_memory_utilization": 0.1, "attention_backend": "TRITON_ATTN",
        "enforce_eager": False,
    }  # fmt: skip
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    untuned = {"enforce_eager": True, "environ": {"MOE_DIST_TUNE": "off"}}
    # vLLM runs CUTLASS for it on this card.
    channel = {"model": vllm_tiny.save_fp8(folder / "fp8", ["channel"])["channel"], "dtype": "bfloat16", "enforce_eager": True}
    engines = [
        {**common, "backend": "auto", "enforce_eager": True},
        {**common, "backend": "auto", "enforce_eager": True, "model": other},
        {**common, "enforce_eager": True},
        *({**common, "compilation_config": {**sizes, "cudagraph_mode": mode}} for mode in GRAPHS),
        {**common, "compilation_config": sizes, "reload": other},
        {**common, "compilation_config": sizes, "enable_sleep_mode": True, "sleep": 1},
        {**common, **untuned},
        {**common, "backend": "auto", **channel},
        {**common, **channel, **untuned},
    ]
    return driver(lambda: tmp_path_factory.mktemp("engine"))(*engines, deadline=500, MOE_DIST_STORE=str(folder / "store"))


def engine(run: Run, index: int) -> dict[str, Any]:
    assert index < len(run.engines), run.log[-8000:]
    return run.engines[index]


def tokens(run: Run, index: int) -> Any:
    return engine(run, index)["tokens"]


def alike(found: Any, truth: Any) -> bool:
    """Whether every answer begins as it should, and most of them go on so: fp32 products on matrix units round to TF32, which parts greedy
    tokens of kernels with other tiles sooner or later; a wrong layer does so at the first."""
    prefixes = [
        next((i for i, (a, b) in enumerate(zip(*rows, strict=True)) if a != b), len(rows[0])) for rows in zip(found, truth, strict=True)
    ]
    return min(prefixes) >= 1 and sum(prefixes) >= 0.6 * sum(map(len, truth))


def test_eager_calls_give_the_stock_tokens(run: Run) -> None:
    assert alike(tokens(run, 2), tokens(run, 0))
    assert not alike(tokens(run, 1), tokens(run, 0))
    assert len({str(row) for row in tokens(run, 0)}) > 1


@pytest.mark.parametrize("mode", GRAPHS)
def test_graphs_give_the_stock_tokens(mode: str, run: Run) -> None:
    index = 3 + GRAPHS.index(mode)
    assert alike(tokens(run, index), tokens(run, 0))
    # Our experts ran between the last engine's answer and this one's: they were captured. A replay calls nothing anew.
    assert sum(engine(run, index)["before"].values()) > sum(engine(run, index - 1)["after"].values())


def test_graphs_have_cells_of_their_own(run: Run) -> None:
    engine(run, 8)  # the last with graphs was there
    lines = re.findall(r"2 x \(8 experts top-2, .*", run.log)
    assert sum("cuda_graph 1" in line for line in lines) == len(GRAPHS) + 2
    (decode_only,) = [line for line in lines if "cuda_graph 1" in line and re.search(r"eager 1\b", line)]
    assert decode_only  # whole decode steps alone are graphs there: a prefill of any length is eager, and has its cell


def test_captured_graphs_serve_reloaded_weights(run: Run) -> None:
    assert alike(tokens(run, 7), tokens(run, 0))
    assert alike(engine(run, 7)["reloaded"], tokens(run, 1))


def test_captured_graphs_serve_after_sleep(run: Run) -> None:
    assert engine(run, 8)["woken"] == tokens(run, 8)  # the very kernels
    assert alike(tokens(run, 8), tokens(run, 0))


@pytest.mark.parametrize(("untuned", "stock"), [(9, 0), (11, 10)], ids=["unquantised", "fp8 by channel"])
def test_untuned_the_very_kernels_of_stock_run(untuned: int, stock: int, run: Run) -> None:
    """vLLM's own choice is the default tactic: not a token differs, though the call goes through our layer."""
    assert tokens(run, untuned) == tokens(run, stock)
    assert sum(engine(run, untuned)["after"].values()) > sum(engine(run, untuned)["before"].values())
    (serving,) = re.findall(r"eager 1-64: vllm\(experts=\w+\) \[default\]", engine(run, untuned)["log"])
    (chosen,) = re.findall(r"experts=(\w+)", serving)
    assert chosen == ("TritonOrCutlassExperts" if stock == 10 else "TritonExperts")
