"""What the benchmark's engine says of itself: what a step costs the host."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_what_a_process_spends_on_the_host_is_counted_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_dist_vllm.bench import HostWatch

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        until = time.process_time() + 0.01
        while time.process_time() < until:
            pass

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    callbacks = list(gc.callbacks)
    watch = HostWatch()
    graph: Any = object()  # this machine may have no CUDA to make one with
    for _ in range(3):
        torch.cuda.CUDAGraph.replay(graph)
    gc.collect()
    found = watch.end()
    assert found["replays"] == 3
    assert found["replay_us"] >= 30_000
    assert found["cpu_us"] >= 30_000
    assert found["collections"] >= 1
    assert found["collect_us"] > 0
    assert found["switches"] >= 0
    assert found["threads"] >= 1
    assert torch.cuda.CUDAGraph.replay is replay
    assert gc.callbacks == callbacks
