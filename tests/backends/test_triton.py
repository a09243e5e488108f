"""The triton backend's tactics: bounded, self-consistent, refused with a reason. What they compute: tests/kernels/interpreted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from moe_dist_kernels import Limits

from moe_dist.backends.base import MoEProblem
from moe_dist.backends.triton import TritonBackend, TritonConfig
from moe_dist.config import ActivationConfig, ExecutionConfig, ExpertConfig, MoEConfig, QuantConfig, RoutingConfig
from moe_dist.tuning.problem import Bucket, BucketLadder, Tactic

BACKEND = TritonBackend()
CPU = torch.device("cpu")  # tactics are judged by Hopper's limits where there is no GPU
SHAPES = {  # experts, top-k, hidden, intermediate
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b-tp2": (8, 2, 4096, 7168),
    "deepseek-v3": (256, 8, 7168, 256),
    "odd": (60, 4, 511, 33),  # nothing is a power of two
    "one expert": (1, 1, 64, 64),
}


def problem_of(name: str, **parts: object) -> MoEProblem:
    experts, top_k, hidden, inter = SHAPES[name]
    config = MoEConfig(routing=RoutingConfig(experts, top_k), experts=ExpertConfig(hidden_size=hidden, intermediate_size=inter))
    return MoEProblem.of(dataclasses.replace(config, **parts), routed=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])  # fp32 doubles the shared memory of every stage
def test_every_bucket_has_a_default_and_a_bounded_list(name: str, dtype: str) -> None:
    problem = problem_of(name, quant=QuantConfig(dtype=dtype))
    for bucket in BucketLadder.powers_of_two(16384).buckets():
        tactics = BACKEND.tactics(problem, bucket, CPU, TritonConfig())
        assert 1 <= len(tactics) <= 24
        assert len(set(tactics)) == len(tactics)
        default = BACKEND.default(problem, bucket, CPU)
        assert default in tactics
        for tactic in tactics:
            assert BACKEND.why_not_tactic(problem, tactic, bucket, CPU) is None
            assert BACKEND.workspace(problem, tactic, bucket.high).nbytes > 0
    assert BACKEND.why_not_tactic(problem, BACKEND.default(problem, None, CPU), None, CPU) is None


def test_a_card_with_99_kb_gets_a_smaller_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill default needs 196,608 bytes of shared memory; such a card has 101,376 for a block."""
    problem, bucket = problem_of("qwen3-30b-a3b"), Bucket(4097, 8192)
    wide = BACKEND.default(problem, bucket, CPU)
    monkeypatch.setattr(Limits, "of", lambda device: Limits(shared_bytes=101376, has_tma=False, has_wgmma=False, processors=84))
    reason = BACKEND.why_not_tactic(problem, wide, bucket, CPU)
    assert reason is not None
    assert "196608 bytes of shared memory, a block has 101376" in reason
    for high in (1, 64, 8192):
        default = BACKEND.default(problem, Bucket(high, high), CPU)
        assert BACKEND.why_not_tactic(problem, default, Bucket(high, high), CPU) is None
    assert BACKEND.default(problem, bucket, CPU) != wide


def test_batch_invariance_has_one_tactic_for_all_buckets() -> None:
    problem = problem_of("qwen3-30b-a3b", execution=ExecutionConfig(batch_invariant=True))
    ladder = BucketLadder.powers_of_two(16384).buckets()
    (only,) = {tactic for bucket in ladder for tactic in BACKEND.tactics(problem, bucket, CPU, TritonConfig())}
    assert {BACKEND.default(problem, bucket, CPU) for bucket in (*ladder, None)} == {only}
    other = BACKEND.default(problem_of("qwen3-30b-a3b"), ladder[-1], CPU)
    assert "batch invariance has one family" in str(BACKEND.why_not_tactic(problem, other, ladder[-1], CPU))


def _changed(tactic: Tactic, **params: object) -> Tactic:
    return Tactic.of("triton", **(dict(tactic.params) | params))  # type: ignore[arg-type]


MANY, ONE = Bucket(4097, 8192), Bucket(1, 1)  # the sorted path, and the small one


@pytest.mark.parametrize(
    ("bucket", "params", "reason"),
    [
        (MANY, {"up_n": 48}, "block_n 48 must be a power of two of at least 16"),
        (MANY, {"up_warps": 3}, "warps 3 must be 4 or 8"),
        (MANY, {"down_stages": 9}, "stages 9 must be 1 to 8"),
        (MANY, {"up_n": 256}, "of shared memory, a block has 232448"),
        (MANY, {"block_m": "128"}, "block_m of .* is '128'; it must be an integer"),
        (MANY, {"path": "scattered"}, "is 'scattered'; it must be 'decode', 'sorted' or 'specialised'"),
        (MANY, {"colour": 1}, "has parameters .*colour"),
        (ONE, {"down_early": 9}, "early 9 must be 0 to 8: steps of 2 x 512 that 2 warps can hold"),
        (ONE, {"down_early": -1}, "early -1 must be 0 to 8"),
        (ONE, {"down_early": True}, "down_early of .* is True; it must be an integer"),
        (ONE, {"down_warps": 3}, "warps 3 must be 1, 2, 4 or 8"),
    ],
)
def test_stored_tactics_that_can_not_run_are_refused_with_the_reason(bucket: Bucket, params: dict[str, object], reason: str) -> None:
    problem = problem_of("qwen3-30b-a3b")
    tactic = _changed(BACKEND.default(problem, bucket, CPU), **params)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(BACKEND.why_not_tactic(problem, tactic, bucket, CPU))


def test_16_bit_weights_have_warp_specialised_products_among_their_many_row_tactics() -> None:
    problem = problem_of("qwen3-30b-a3b")
    found = {
        tokens: [
            tactic for tactic in BACKEND.tactics(problem, Bucket(tokens, tokens), CPU, TritonConfig()) if tactic["path"] == "specialised"
        ]
        for tokens in (64, 4096)
    }
    assert found[64] == []
    assert [(tactic["gather"], tactic["group_m"]) for tactic in found[4096]] == [(True, 8), (True, 16)]
    rows_of_whole_16_bytes = problem_of("qwen3-30b-a3b", experts=ExpertConfig(hidden_size=2048, intermediate_size=764))
    reason = BACKEND.why_not_tactic(rows_of_whole_16_bytes, found[4096][0], Bucket(4096, 4096), CPU)
    assert "a multiple of 8, not 764, local intermediate columns" in str(reason)


@pytest.mark.parametrize(("intermediate", "timed"), [(192, True), (128, False), (256, False), (232, False)])
def test_where_a_tile_of_128_columns_hangs_over_by_half_tiles_of_64_are_timed(intermediate: int, timed: bool) -> None:
    problem = problem_of("qwen3-30b-a3b", experts=ExpertConfig(hidden_size=4096, intermediate_size=intermediate))
    for tokens, many_rows in ((16384, True), (1024, False)):
        found = BACKEND.tactics(problem, Bucket(tokens, tokens), CPU, TritonConfig())
        tiles = [(tactic["block_m"], tactic["up_n"]) for tactic in found if tactic["path"] == "sorted"]
        assert ((128, 64) in tiles) == (timed and many_rows)


FP8 = QuantConfig(weight="fp8", granularity="block", block_shape=(128, 128))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_fp8_blocks_have_a_default_and_a_bounded_list_too(name: str) -> None:
    problem = problem_of(name, quant=FP8)
    for bucket in BucketLadder.powers_of_two(16384).buckets():
        tactics = BACKEND.tactics(problem, bucket, CPU, TritonConfig())
        assert 1 <= len(tactics) <= 24
        assert BACKEND.default(problem, bucket, CPU) in tactics
        assert all(BACKEND.workspace(problem, tactic, bucket.high).nbytes > 0 for tactic in tactics)


@pytest.mark.parametrize(
    ("inter", "tokens", "path", "gather"),
    [
        (2048, 1, "decode", None),  # one token, experts of any width
        (2048, 4, "sorted", None),  # wide experts hit twice
        (2048, 2048, "specialised", True),  # 64 rows an expert: fetched
        (2048, 16384, "specialised", False),  # 512 rows, read 16 times: copied in order
        (256, 16384, "specialised", True),  # read twice: fetched
    ],
)
def test_fp8_default_by_rows_and_width(inter: int, tokens: int, path: str, gather: bool | None) -> None:
    config = MoEConfig(routing=RoutingConfig(256, 8), experts=ExpertConfig(hidden_size=7168, intermediate_size=inter), quant=FP8)
    default = BACKEND.default(MoEProblem.of(config, routed=True), Bucket(tokens, tokens), CPU)
    assert (default["path"], dict(default.params).get("gather")) == (path, gather)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"activation": ActivationConfig("relu2")}, "know fp8 and 16-bit weights, SwiGLU"),
        ({"quant": QuantConfig()}, "copy fp8 rows alone into sorted order; 16-bit ones are fetched by token (gather)"),
        ({"quant": QuantConfig(dtype="fp32")}, "know fp8 and 16-bit weights, SwiGLU"),
        ({"experts": ExpertConfig(hidden_size=2080, intermediate_size=768)}, "multiple of 128, not 2080"),
    ],
)
def test_warp_specialised_products_say_what_they_do_not_know(parts: dict[str, object], reason: str) -> None:
    bucket = Bucket(16384, 16384)
    tactic = BACKEND.default(problem_of("qwen3-30b-a3b", quant=FP8), bucket, CPU)
    assert tactic["path"] == "specialised"
    problem = problem_of("qwen3-30b-a3b", **({"quant": FP8} | parts))
    assert reason in str(BACKEND.why_not_tactic(problem, tactic, bucket, CPU))
    assert BACKEND.default(problem, bucket, CPU)["path"] == "sorted"


def test_another_backends_tactic_is_refused() -> None:
    problem = problem_of("odd")
    assert "not a tactic of backend 'triton'" in str(BACKEND.why_not_tactic(problem, Tactic("torch_loop"), Bucket(1, 1), CPU))


def test_a_machine_without_gpu_is_told_so() -> None:
    assert BACKEND.why_not(problem_of("odd"), CPU, TritonConfig()) == ("it needs a CUDA GPU, not 'cpu' (tests may set TRITON_INTERPRET=1)")


def test_workspace_grows_with_tokens_as_the_kernels_lay_it_out() -> None:
    """Sorted, 1,024 tokens: rows of both products (8,192 x 768 and x 2,048 in bf16), 8,192 slots, and what the sort keeps."""
    problem = problem_of("qwen3-30b-a3b")
    tactic = BACKEND.default(problem, Bucket(1024, 1024), CPU)
    rows = 8192 * (768 + 2048) * 2 + 8192 * 4
    assert rows <= BACKEND.workspace(problem, tactic, 1024).nbytes <= rows + 16384
    assert BACKEND.workspace(problem, tactic, 2048).nbytes > 1.9 * BACKEND.workspace(problem, tactic, 1024).nbytes
