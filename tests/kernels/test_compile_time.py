"""What kernels work out while they are compiled is ours alone: another package of the process can't spoil it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import triton
from moe_dist_kernels import is_interpreted
from moe_dist_kernels.compile_time import power_of_2


def test_the_least_power_of_two() -> None:
    # At a power, just below and just above one; 257 and 1025 experts exist.
    assert [power_of_2(least) for least in (1, 2, 3, 4, 5, 128, 257, 1025)] == [1, 2, 4, 4, 8, 128, 512, 2048]


# Every kernel of ours, small: names are looked up where the source is hashed, so that nothing is built but what calls `power_of_2`.
REPLACED = """
import triton
def plain(*numbers):
    raise AssertionError("never called: it can't be compiled")
for name in {names}:
    assert callable(getattr(triton, name))
    setattr(triton, name, plain)
import torch
from moe_dist_kernels import DecodePlan, DecodeTile, ExpertsShape, SortedPlan, SpecialisedPlan, all_launches
from moe_dist_kernels.grouped import ProductTile
from moe_dist_kernels.routing import route_launch
from triton.backends.compiler import GPUTarget

def shape(fp8):
    return ExpertsShape(dtype=torch.bfloat16, hidden=128, inter=128, slots=2, num_local=6, map_size=None, kind="swiglu", fp8=fp8)

tile = ProductTile(block_n=32, block_k=64, warps=4, stages=2)
small = DecodeTile(block_n=1, block_k=32, warps=1)
plans = (
    (shape(False), DecodePlan(up=small, down=small)),
    (shape(True), SortedPlan(block_m=16, group_m=1, swap_ab=False, up=tile, down=tile)),
    (shape(True), SpecialisedPlan(group_m=8, gather=False)),
)
launches = {{launch.kernel: launch for of, plan in plans for launch in all_launches(of, plan).values()}}
router = route_launch(
    logits_dtype=torch.float32, num_experts=6, top_k=2, n_group=None, topk_group=None, num_shared=0, scoring="softmax", renormalize=True,
    scale=1.0, bias=False, pdl=False,
)
launches[router.kernel] = router
for kernel, launch in launches.items():
    assert kernel.cache_key
    if "power_of_2" in kernel.src:
        launch.compile_for(GPUTarget("cuda", 90, 32))
        print(kernel.__name__, "compiled")
    else:
        print(kernel.__name__)
"""


@pytest.mark.skipif(is_interpreted(), reason="interpreted kernels can't be compiled")
@pytest.mark.timeout(300)
def test_kernels_compile_whatever_has_become_of_triton_s_own_helpers() -> None:
    """SGLang replaces `next_power_of_2` by a plain function when it is imported; then no tactic that sorts could run in its processes."""
    names = [name for name in ("cdiv", "next_power_of_2") if name in triton.__all__]
    assert names == ["cdiv", "next_power_of_2"]
    ended = subprocess.run([sys.executable, "-c", REPLACED.format(names=names)], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = ended.stdout.split("\n")
    for kernel in ("align_one_kernel", "align_count_kernel", "align_place_kernel", "route_kernel"):
        assert f"{kernel} compiled" in said
    for kernel in (
        "decode_up_kernel",
        "decode_down_kernel",
        "up_kernel",
        "down_kernel",
        "product_kernel",
        "scatter_kernel",
        "finalize_kernel",
    ):
        assert kernel in said
