"""The MoE operation: what it offers, how it probes, and what its check lets pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

import moe_dist as md
from moe_dist.backends.base import Runner
from moe_dist.backends.routing import route
from moe_dist.backends.torch_loop import TorchLoopBackend
from moe_dist.operation import probe_inputs
from tests.backends.native import NATIVE, NativeBackend

CPU = torch.device("cpu")
CONFIG = md.MoEConfig(
    routing=md.RoutingConfig(8, 2), experts=md.ExpertConfig(hidden_size=64, intermediate_size=48), parallel=md.ParallelConfig(ep_size=2)
)
LOOP = md.Tactic.of("torch_loop", chunk_rows=0, compute="bf16")
BUCKET = md.Bucket(9, 16)
SPEC = md.ProbeSpec(copies=2)


def operation(
    config: md.MoEConfig = CONFIG, *, routed: bool = True, ep_rank: int = 1, options: md.BackendOptions | None = None,
    extra: Sequence[md.Backend] = (),
) -> md.MoEOperation:  # fmt: skip
    problem = md.MoEProblem.of(config, routed=routed)
    return md.MoEOperation(problem, md.make_random_weights(problem, ep_rank, 0, CPU), CPU, options, extra)


FORMATS = {
    "bf16": md.QuantConfig(),
    "fp16": md.QuantConfig(dtype="fp16"),
    "fp32": md.QuantConfig(dtype="fp32"),
    "fp8 blocks": md.QuantConfig(weight="fp8", block_shape=(32, 32)),
    "fp8 channels": md.QuantConfig(weight="fp8", granularity="channel"),
}


@pytest.mark.parametrize("ep_rank", [1, 0])  # ranks above 0 first: on rank 0 a global id passes for a local one
@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("quant", FORMATS)
def test_every_candidate_passes_its_check(quant: str, routed: bool, ep_rank: int) -> None:
    op = operation(dataclasses.replace(CONFIG, quant=FORMATS[quant]), routed=routed, ep_rank=ep_rank)
    for bucket in md.BucketLadder((1, 16, 128)).buckets():
        probe = op.probe(bucket.high, SPEC)
        candidates = list(op.candidates(bucket, "eager"))
        assert op.default(bucket, "eager") in candidates
        for tactic in candidates:
            assert probe.check(probe.bind(tactic)) is None, tactic


def test_calls_that_no_cache_outlives_are_probed_with_one_input_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 local experts of 3 x 64 x 48 bf16: a call of one token reads at most 2 of them, one of 16 tokens all."""
    op = operation()
    expert_bytes = 3 * 64 * 48 * 2
    monkeypatch.setattr("moe_dist.operation.STREAMED_BYTES", 3 * expert_bytes)
    assert [op.probe(tokens, SPEC).copies for tokens in (1, 2, 16)] == [2, 1, 1]
    probe = op.probe(16, SPEC)
    assert probe.check(probe.bind(LOOP)) is None
    assert len(probe.inputs) == 1


@pytest.mark.parametrize("finalize", [True, False])
def test_biases_and_unsummed_slots_pass(finalize: bool) -> None:
    config = dataclasses.replace(
        CONFIG,
        experts=dataclasses.replace(CONFIG.experts, bias=True),
        activation=md.ActivationConfig(limit=7.0, alpha=1.702, beta=1.0),
        execution=md.ExecutionConfig(do_finalize=finalize),
    )
    op = operation(config)
    probe = op.probe(16, SPEC)
    for tactic in op.candidates(BUCKET, "eager"):
        assert probe.check(probe.bind(tactic)) is None, tactic


# --- candidates


def test_a_problem_key_forgets_what_only_says_what_to_try() -> None:
    other = dataclasses.replace(
        CONFIG, backends=md.TorchLoopConfig(), execution=md.ExecutionConfig(tune_max_num_tokens=16, output="in_place")
    )
    assert operation(other).problem == operation().problem
    assert operation(routed=False).problem != operation().problem


def test_ranks_of_one_group_share_the_problem() -> None:
    assert operation(ep_rank=0).problem == operation(ep_rank=1).problem


@pytest.mark.parametrize("tokens", [1, 16, 128, 4096])
def test_candidates_are_distinct_valid_and_never_the_reference(tokens: int) -> None:
    op, bucket = operation(), md.Bucket(tokens // 2 + 1, tokens)
    candidates = list(op.candidates(bucket, "eager"))
    assert len(set(candidates)) == len(candidates) >= 4
    assert {tactic.backend for tactic in candidates} <= {"torch_grouped", "torch_loop", "torch_dense", "triton"}
    assert all(op.why_not(tactic, bucket) is None for tactic in candidates)
    assert op.default(bucket, "eager") in candidates


def test_options_choose_candidates_and_the_default() -> None:
    op = operation(options=md.TorchLoopConfig(chunk_rows=(0, 2, 4)) | md.TorchDenseConfig())
    assert op.default(BUCKET, "eager") == LOOP
    assert {str(tactic) for tactic in op.candidates(BUCKET, "eager") if tactic.backend == "torch_loop"} == {
        f"torch_loop(chunk_rows={rows},compute={compute})" for rows in (0, 2, 4) for compute in ("bf16", "fp32")
    }
    assert op.why_not(md.Tactic.of("torch_grouped", compute="bf16", method="segments"), BUCKET) == (
        "backend 'torch_grouped' is not among those that run here: torch_loop, torch_dense"
    )


def test_the_reference_may_be_asked_for() -> None:
    op = operation(options=md.BackendOptions((md.ReferenceConfig(),)))
    assert list(op.candidates(BUCKET, "eager")) == [op.default(BUCKET, "eager")] == [md.Tactic.of("reference")]


def test_nothing_runnable_names_every_reason() -> None:
    with pytest.raises(md.UnsupportedBackend, match="torch_loop: torch_loop's products choose their summation order"):
        operation(
            dataclasses.replace(CONFIG, execution=md.ExecutionConfig(batch_invariant=True)),
            options=md.BackendOptions((md.TorchLoopConfig(),)),
        )


@pytest.mark.parametrize(
    ("tactic", "reason"),
    [  # what a store of another release may hold
        (md.Tactic.of("flash"), "backend 'flash' is not among those that run here"),
        (md.Tactic.of("torch_loop"), "torch_loop has no tactic torch_loop"),
        (md.Tactic.of("torch_loop", chunk_rows=-1, compute="bf16"), "torch_loop has no tactic"),
        (md.Tactic.of("torch_loop", chunk_rows=0, compute="fp16"), "torch_loop doesn't compute bf16 in fp16 on cpu"),
        (md.Tactic.of("torch_grouped", compute="bf16", method="cutlass"), "torch_grouped has no tactic"),
        (
            md.Tactic.of("torch_grouped", compute="fp32", method="grouped_mm"),
            "grouped_mm multiplies the weights as they are stored, in bf16, not in fp32",
        ),
        (md.Tactic.of("torch_dense", compute="bf16", form="tall"), "torch_dense has no tactic"),
    ],
    ids=lambda value: str(value) if isinstance(value, md.Tactic) else "",
)
def test_tactics_that_cannot_serve(tactic: md.Tactic, reason: str) -> None:
    assert str(operation().why_not(tactic, BUCKET)).startswith(reason)


def test_grouped_mm_needs_aligned_rows() -> None:
    # 68 bf16 values are 136 bytes, no multiple of 16.
    op = operation(dataclasses.replace(CONFIG, experts=md.ExpertConfig(hidden_size=68, intermediate_size=48)))
    tactic = md.Tactic.of("torch_grouped", compute="bf16", method="grouped_mm")
    assert op.why_not(tactic, BUCKET) == "grouped_mm needs rows of a multiple of 16 bytes; hidden_size 68 gives 136"
    assert tactic not in op.candidates(BUCKET, "eager")


def test_workspace_grows_with_tokens_and_falls_with_chunks() -> None:
    op = operation()
    sizes = [op.workspace(LOOP, tokens).nbytes for tokens in (1, 16, 1024)]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    assert op.workspace(md.Tactic.of("torch_loop", chunk_rows=64, compute="bf16"), 1024).nbytes < sizes[2]
    assert all(op.workspace(tactic, 16).nbytes > 0 for tactic in op.candidates(BUCKET, "eager"))


# --- probes


@pytest.mark.parametrize("spec", [SPEC, md.ProbeSpec(routing="zipf")], ids=lambda spec: spec.routing)
def test_probe_ids_are_global_and_unique_in_a_row(spec: md.ProbeSpec) -> None:
    # 2 local experts of 128 and top-k 4: most slots are remote, and no row is filled up by a repeated local id.
    config = md.MoEConfig(
        routing=md.RoutingConfig(128, 4),
        experts=md.ExpertConfig(hidden_size=16, intermediate_size=8),
        parallel=md.ParallelConfig(ep_size=64),
    )
    acts = probe_inputs(md.MoEProblem.of(config, routed=True), 512, spec, 0, CPU)
    assert acts.topk_ids is not None
    assert acts.topk_ids.max() > 64
    assert all(len(set(row)) == 4 for row in acts.topk_ids.tolist())


def test_every_rank_probes_with_the_same_tokens() -> None:
    first, second = (operation(ep_rank=rank).probe(16, SPEC) for rank in (0, 1))
    for ours, theirs in zip(first.inputs, second.inputs, strict=True):
        assert torch.equal(ours.hidden_states, theirs.hidden_states)
        assert ours.topk_ids is not None
        assert theirs.topk_ids is not None
        assert torch.equal(ours.topk_ids, theirs.topk_ids)
    assert not torch.equal(first.inputs[0].hidden_states, first.inputs[1].hidden_states)


@pytest.mark.parametrize(
    "routing",
    [
        md.RoutingConfig(32, 4),
        md.RoutingConfig(32, 4, scoring="sigmoid", renormalize=False),
        md.RoutingConfig(32, 4, n_group=8, topk_group=2),
        md.RoutingConfig.deepseek_v3(32, 4),
    ],
    ids=str,
)
def test_probe_logits_lead_to_the_routing_that_was_drawn(routing: md.RoutingConfig) -> None:
    config = dataclasses.replace(CONFIG, routing=routing)
    logits = probe_inputs(md.MoEProblem.of(config, routed=False), 200, SPEC, 1, CPU).router_logits
    ids = probe_inputs(md.MoEProblem.of(config, routed=True), 200, SPEC, 1, CPU).topk_ids
    assert logits is not None
    assert ids is not None
    bias = 0.1 * torch.randn(32, generator=torch.Generator().manual_seed(0)) if routing.correction_bias else None
    assert torch.equal(route(logits, routing, bias)[1].sort(1).values, ids.sort(1).values)


def test_shared_experts_take_their_slots_in_a_probe() -> None:
    config = dataclasses.replace(
        CONFIG, routing=md.RoutingConfig(6, 2, num_fused_shared_experts=1, routed_scaling_factor=2.5), parallel=md.ParallelConfig()
    )
    acts = probe_inputs(md.MoEProblem.of(config, routed=True), 10, SPEC, 0, CPU)
    assert acts.topk_ids is not None
    assert acts.topk_weights is not None
    assert acts.topk_ids[:, 2].tolist() == [6] * 10
    assert acts.topk_weights[:, 2].tolist() == [1.0] * 10
    torch.testing.assert_close(acts.topk_weights[:, :2].sum(1), torch.full((10,), 2.5))


def test_out_of_memory_has_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    import moe_dist.operation as module

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(module, "GuardedOutputs", full)
    with pytest.raises(MemoryError, match="can't allocate memory"):
        operation().probe(16, SPEC)


# --- the check


class SpoiledBackend(NativeBackend):
    """Right, and then `spoil(acts, weights, out)` has its way; `claims` is what it says it executed."""

    def __init__(self, spoil: Callable[[md.MoEActivationPack, md.MoEWeightPack, torch.Tensor], object], claims: str = "native") -> None:
        super().__init__()
        self.spoil, self.claims = spoil, claims

    def bind(self, layer: md.BoundLayer, tactic: md.Tactic) -> Runner:
        right = TorchLoopBackend().bind(layer, LOOP)

        def run(acts: md.MoEActivationPack, out: torch.Tensor) -> md.Tactic:
            right(acts, out)
            self.spoil(acts, layer.weights, out)
            return md.Tactic.of(self.claims)

        return run


def verdict(spoil: Callable[[md.MoEActivationPack, md.MoEWeightPack, torch.Tensor], object], claims: str = "native") -> str:
    """What the check says of a spoiled tactic; afterwards a sound one still passes on the same probe."""
    op = operation(extra=[SpoiledBackend(spoil, claims)])
    probe = op.probe(16, SPEC)
    said = probe.check(probe.bind(NATIVE))
    assert probe.check(probe.bind(LOOP)) is None
    return str(said)


def beyond(out: torch.Tensor) -> None:
    storage = out.untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(storage, len(storage) - 1, (1,)).zero_()


def test_a_sound_tactic_passes() -> None:
    assert verdict(lambda acts, weights, out: None) == "None"


def test_rounding_passes() -> None:
    assert verdict(lambda acts, weights, out: out.mul_(1 + 2**-9)) == "None"


def test_half_of_the_rows_unwritten() -> None:
    said = verdict(lambda acts, weights, out: out[8:].fill_(torch.nan))
    assert said == "8 of 16 rows of input set 0 were not written or are NaN, row 8 first"


def test_a_byte_behind_the_output() -> None:
    assert verdict(lambda acts, weights, out: beyond(out)) == "it wrote behind the output of input set 0"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda acts, weights, out: out.mul_(1.05),
        lambda acts, weights, out: out.zero_(),
        lambda acts, weights, out: out.copy_(out.roll(1, 0)),  # rows in the wrong place
        lambda acts, weights, out: out[-1].zero_(),  # the last row alone, as a kernel without its ragged tile
        lambda acts, weights, out: out.fill_(torch.inf),
    ],
    ids=["scaled", "zero", "rolled", "last row", "inf"],
)
def test_a_wrong_result_is_rejected_with_its_error(spoil: Callable[..., object]) -> None:
    assert " of the result, above 0.0" in verdict(spoil)
    assert verdict(spoil).startswith("its error is ")


def test_inputs_that_changed() -> None:
    assert verdict(lambda acts, weights, out: acts.hidden_states.zero_()) == "it changed hidden_states of input set 0"
    assert verdict(lambda acts, weights, out: acts.topk_ids.zero_()) == "it changed topk_ids of input set 0"  # type: ignore[union-attr]


def test_weights_that_changed() -> None:
    op = operation(extra=[SpoiledBackend(lambda acts, weights, out: weights.w13.view(torch.int16)[-1, -1, -1:].add_(1))])
    probe = op.probe(16, SPEC)
    said = probe.check(probe.bind(NATIVE))
    assert said == "the weights differ from what they were: it, or a tactic before it, wrote to them"


def test_another_tactic_was_executed() -> None:
    assert verdict(lambda acts, weights, out: None, claims="fallback") == "it executed fallback instead of native"


def test_global_ids_used_as_rows_are_rejected() -> None:
    class Naive(SpoiledBackend):
        def bind(self, layer: md.BoundLayer, tactic: md.Tactic) -> Runner:
            return super().bind(dataclasses.replace(layer, expert_map=None), tactic)

    for ep_rank, caught in ((1, True), (0, False)):  # on rank 0 the ids are the rows
        op = operation(ep_rank=ep_rank, extra=[Naive(lambda acts, weights, out: None)])
        probe = op.probe(16, SPEC)
        said = probe.check(probe.bind(NATIVE))
        assert (said is not None) == caught, said


def test_fp8_weights_allow_for_rounded_activations_and_no_more() -> None:
    # A kernel that quantises each row errs by about 3%; one that is off by 20% is wrong.
    config = dataclasses.replace(CONFIG, quant=FORMATS["fp8 blocks"])
    for factor, passes in ((1.03, True), (1.2, False)):
        op = operation(config, extra=[SpoiledBackend(lambda acts, weights, out, factor=factor: out.mul_(factor))])
        probe = op.probe(16, SPEC)
        assert (probe.check(probe.bind(NATIVE)) is None) == passes


# --- weights for the launcher


@pytest.mark.parametrize("quant", FORMATS)
def test_random_weights_fit_their_problem_and_differ_by_expert(quant: str) -> None:
    config = dataclasses.replace(CONFIG, quant=FORMATS[quant], parallel=md.ParallelConfig(ep_size=2, tp_size=1))
    problem = md.MoEProblem.of(config, routed=True)
    weights = md.make_random_weights(problem, 1, 0, CPU, seed=3)
    layer = md.MoEOperation(problem, weights, CPU).layer  # checks every shape and format
    for tensor in (weights.w13, weights.w2):
        experts = tensor.float()
        assert experts.isfinite().all()
        for other in range(1, 4):
            assert (experts[0] == experts[other]).float().mean() < 0.2
    assert layer.num_local_experts == 4
    again = md.make_random_weights(problem, 1, 0, CPU, seed=3)
    assert torch.equal(weights.w13.view(torch.uint8), again.w13.view(torch.uint8))
    assert not torch.equal(weights.w13.view(torch.uint8), md.make_random_weights(problem, 0, 0, CPU, seed=3).w13.view(torch.uint8))


@pytest.mark.parametrize("quant", FORMATS)
def test_random_weights_give_results_as_large_as_inputs(quant: str) -> None:
    config = dataclasses.replace(CONFIG, quant=FORMATS[quant], parallel=md.ParallelConfig())
    problem = md.MoEProblem.of(config, routed=True)
    weights = md.make_random_weights(problem, 0, 0, CPU)
    acts = probe_inputs(problem, 64, SPEC, 0, CPU)
    out = md.moe_layer((acts, weights), **config)
    assert 0.05 < float(out.float().std() / acts.hidden_states.float().std()) < 5


def test_random_weights_of_ungated_biased_routed_layers() -> None:
    config = md.MoEConfig(
        routing=md.RoutingConfig.deepseek_v3(8, 2, n_group=2, topk_group=1),
        experts=md.ExpertConfig(hidden_size=32, intermediate_size=48, bias=True),
        activation=md.ActivationConfig("relu2"),
        parallel=md.ParallelConfig(tp_size=2),
    )
    problem = md.MoEProblem.of(config, routed=False)
    for tp_rank in (1, 0):
        weights = md.make_random_weights(problem, 0, tp_rank, CPU)
        assert weights.w13.shape == (8, 24, 32)
        assert (weights.w2_bias is None) == (tp_rank == 1)
        op = md.MoEOperation(problem, weights, CPU)
        probe = op.probe(8, SPEC)
        assert probe.check(probe.bind(op.default(md.Bucket(5, 8), "eager"))) is None


def test_random_weights_in_four_bits() -> None:
    problem = md.MoEProblem.of(dataclasses.replace(CONFIG, quant=md.QuantConfig(weight="mxfp4")), routed=True)
    with pytest.raises(md.ConfigError, match="random weights come in bf16, fp16, fp32, fp8 and int8, not mxfp4; load a checkpoint"):
        md.make_random_weights(problem, 0, 0, CPU)
