"""Our kernels inside SGLang's process: the same problems as in the kernel benchmark, and nothing that SGLang did to Triton keeps one from compiling.

The first run on a GPU served SGLang's own experts wherever rows are sorted: importing SGLang had made the sort uncompilable.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang_stand_ins import layer_of, method_of

import moe_dist as md
from moe_dist.bench.kernel_inputs import SHAPES, Shape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("published")]


@pytest.mark.parametrize(
    ("shape", "dtype"), [(shape, dtype) for shape in SHAPES for dtype in shape.dtypes], ids=lambda part: getattr(part, "name", part)
)
def test_a_layer_is_the_problem_that_the_benchmark_times_with_the_same_candidates(shape: Shape, dtype: str) -> None:
    from moe_dist_sglang.layers import layer_config

    from moe_dist.backends.triton import TritonBackend, TritonConfig

    layer = layer_of(
        num_experts=shape.experts, num_local_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden,
        intermediate_size_per_partition=shape.inter, params_dtype=torch.bfloat16,
    )  # fmt: skip
    method = method_of() if dtype == "bf16" else method_of("fp8", weight_block_size=[128, 128])
    here = md.MoEProblem.of(layer_config(layer, method), routed=True)
    there = shape.problem(dtype, max_num_tokens=4096)
    assert here.key() == there.key()
    for bucket in there.ladder.buckets():
        tactics = [list(TritonBackend().tactics(problem, bucket, torch.device("cpu"), TritonConfig())) for problem in (here, there)]
        assert tactics[0] == tactics[1]
        assert tactics[0]


def test_every_kernel_compiles_after_sglang_s_imports() -> None:
    from moe_dist_kernels import DecodePlan, DecodeTile, ExpertsShape, SortedPlan, SpecialisedPlan, all_launches
    from moe_dist_kernels.grouped import ProductTile
    from triton.backends.compiler import GPUTarget

    def shape(fp8: bool) -> Any:
        return ExpertsShape(dtype=torch.bfloat16, hidden=128, inter=128, slots=2, num_local=6, map_size=None, kind="swiglu", fp8=fp8)

    small, tile = DecodeTile(block_n=1, block_k=32, warps=1), ProductTile(block_n=32, block_k=64, warps=4, stages=2)
    plans: list[tuple[Any, Any]] = [
        (shape(False), DecodePlan(up=small, down=small)),
        (shape(True), SortedPlan(block_m=16, group_m=1, swap_ab=False, up=tile, down=tile)),
        (shape(True), SpecialisedPlan(group_m=8, gather=False)),
    ]
    launches = {launch.kernel.__name__: launch for of, plan in plans for launch in all_launches(of, plan).values()}
    assert len(launches) >= 11
    for launch in launches.values():
        assert launch.compile_for(GPUTarget("cuda", 90, 32)).asm["cubin"]
