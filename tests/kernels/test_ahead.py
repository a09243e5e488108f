"""Kernels compiled by other processes: a launch of this one finds them, asking again starts no process, and what fails is left to the launch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from moe_dist_kernels import DecodePlan, DecodeTile, ExpertsShape, RouterShape, ahead, is_interpreted
from moe_dist_kernels.ahead import Variant, compile_ahead
from triton.backends.compiler import GPUTarget

import moe_dist as md
from moe_dist.backends.base import MoEProblem
from moe_dist.backends.triton_tactics import decode_tiles, sorted_tiles
from moe_dist.operation import probe_inputs
from moe_dist.tuning.problem import CompileAhead

pytestmark = pytest.mark.skipif(is_interpreted(), reason="interpreted kernels can't be compiled")
HOPPER = GPUTarget("cuda", 90, 32)
SHAPE = ExpertsShape(dtype=torch.bfloat16, hidden=64, inter=32, slots=2, num_local=4, map_size=None, kind="swiglu")
ROUTER = RouterShape(
    logits_dtype=torch.float32, num_experts=4, top_k=2, n_group=None, topk_group=None, num_shared=0, scoring="softmax", renormalize=True, scale=1.0,
    bias=False,
)  # fmt: skip


def variant(block_k: int = 32, router: RouterShape | None = None) -> Variant:
    """Two small kernels, up and down; with a router three."""
    plan = DecodePlan(up=DecodeTile(block_n=1, block_k=block_k, warps=1), down=DecodeTile(block_n=2, block_k=block_k, warps=1))
    return Variant(shape=SHAPE, plan=plan, pdl=True, router=router)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(ahead, "FEWEST", 1)
    return tmp_path


FINDS = """
import sys, triton
from triton.backends.compiler import GPUTarget
sys.path[:0] = [{here!r}]
from moe_dist_kernels import ahead
from test_ahead import HOPPER, ROUTER, variant
found = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **rest: found.append((src.name, cache_hit))
triton.runtime.driver.set_active(ahead._Stub(HOPPER))
for launch in variant(router=ROUTER).launches().values():
    launch.compile_for_cache()
print(sorted(found))
"""


@pytest.mark.timeout(300)
def test_a_launch_finds_what_other_processes_compiled_and_asking_again_starts_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile_for_cache` takes the way of `Launch.compile`, without the card that would load the result."""
    moves: list[None] = []
    done = compile_ahead([variant(router=ROUTER), variant(router=ROUTER)], HOPPER, processes=2, progress=lambda: moves.append(None))
    assert (done.kernels, done.compiled, done.failed) == (3, 3, ())
    assert len(moves) >= 3, "peers see each kernel as progress"
    code = FINDS.format(here=str(Path(__file__).parent))
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert out.stdout.splitlines()[-1] == str([("decode_down_kernel", True), ("decode_up_kernel", True), ("route_kernel", True)]), (
        out.stderr
    )

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ahead.subprocess, "Popen", refuse)
    assert compile_ahead([variant(router=ROUTER)], HOPPER, processes=2).compiled == 0
    with pytest.raises(AssertionError, match="a process was started"):  # another card, another kernel
        compile_ahead([variant()], GPUTarget("cuda", 100, 32), processes=2)


@pytest.mark.timeout(300)
def test_what_does_not_compile_is_told_and_not_taken_for_done(cache: Path) -> None:
    done = compile_ahead([variant(block_k=24), variant()], HOPPER, processes=2)  # 24 is no power of two
    assert (done.kernels, done.compiled) == (4, 2)
    assert len(done.failed) == 2
    assert done.failed[0].startswith(("up: ", "down: "))
    assert len(list((cache / "moe_dist_ahead").iterdir())) == 2


def test_at_its_deadline_the_processes_are_gone_and_nothing_is_taken_for_done(cache: Path) -> None:
    started = time.monotonic()
    done = compile_ahead([variant()], HOPPER, processes=1, deadline=started - 1)
    assert done == ahead.Ahead(2, 0, ())
    assert time.monotonic() - started < 30


def test_kernels_are_told_apart_by_all_that_the_compiler_sees() -> None:
    launch = variant().launches()["up"]
    same = variant().launches()["up"]
    assert ahead._identity(launch, HOPPER) == ahead._identity(same, HOPPER)
    others = [
        dataclasses.replace(launch, num_warps=2),
        dataclasses.replace(launch, num_stages=2),
        dataclasses.replace(launch, pdl=False),
        dataclasses.replace(launch, max_registers=64),
        dataclasses.replace(launch, constants={**launch.constants, "HIDDEN": 128}),
        dataclasses.replace(launch, params=(torch.float16, *launch.params[1:])),
        variant().launches()["down"],
    ]
    names = {ahead._identity(other, HOPPER) for other in (launch, *others)} | {ahead._identity(launch, GPUTarget("cuda", 100, 32))}
    assert len(names) == len(others) + 2


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_a_card_nothing_is_compiled_after_it_was_compiled_ahead(cache: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    config = md.MoEConfig(routing=md.RoutingConfig(8, 2), experts=md.ExpertConfig(hidden_size=320, intermediate_size=192))
    problem = MoEProblem.of(config, routed=True)
    operation = md.MoEOperation(problem, md.make_random_weights(problem, 0, 0, device), device, md.BackendOptions((md.TritonConfig(),)))
    tactics = [decode_tiles((1, 256, 1), (4, 128, 1)), sorted_tiles(16, (64, 64, 4, 3, ""), (64, 64, 4, 3, ""), swap_ab=True), sorted_tiles(64, (64, 64, 4, 3, "t"), (64, 64, 4, 3, "tp"), group_m=8)]  # fmt: skip
    assert operation.compile_ahead(tactics, CompileAhead()) >= 7
    late: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **rest: None if cache_hit else late.append(src.name)
    try:
        acts = probe_inputs(problem, 40, md.ProbeSpec(), 0, device)
        for tactic in tactics:
            operation.bind(tactic)(acts, torch.empty_like(acts.hidden_states))
    finally:
        triton.knobs.compilation.listener = None
    torch.cuda.synchronize()
    assert late == []
