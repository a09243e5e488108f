"""One layer at a time, with SGLang's own types and no engine: what is refused and why, and what the runner core makes of a call."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_dist as md

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 2, 32, 16, 5
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _published(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine publishes to its processes before it builds a layer."""
    from moe_dist_sglang import layers, runner

    monkeypatch.setattr(layers, "get_lora", lambda: SimpleNamespace(enable_lora=False, lora_paths=None))
    monkeypatch.setattr(layers, "get_exec", lambda: settings_of())
    monkeypatch.setattr(runner, "get_parallel", lambda: SimpleNamespace(tp_group=None))
    monkeypatch.setattr(runner, "is_allocation_symmetric", lambda: False)
    monkeypatch.setattr(runner, "use_symmetric_memory", lambda group, disabled: contextlib.nullcontext())


def settings_of(eplb: bool = False, deterministic: bool = False, compiled: bool = False) -> Any:
    return SimpleNamespace(
        moe=SimpleNamespace(enable_eplb=eplb),
        deterministic=SimpleNamespace(enable_deterministic_inference=deterministic),
        graph=SimpleNamespace(enable_torch_compile=compiled),
    )


def method_of(kind: str = "unquantised", **changes: Any) -> Any:
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    if kind == "unquantised":
        return UnquantizedFusedMoEMethod()
    return Fp8MoEMethod(Fp8Config(**({"is_checkpoint_fp8_serialized": True, "weight_block_size": [16, 16]} | changes)))


def layer_of(ep_size: int = 1, ep_rank: int = 0, **changes: Any) -> Any:
    """A stand-in for `FusedMoE`: its attributes that the plugin reads, and its runner config. changes: of that config."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    local = EXPERTS // ep_size
    torch.manual_seed(0)
    w13, w2 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)
    held = slice(ep_rank * local, (ep_rank + 1) * local)
    fields = {
        "num_experts": EXPERTS, "num_local_experts": local, "hidden_size": HIDDEN, "intermediate_size_per_partition": INTERMEDIATE,
        "layer_id": 3, "top_k": TOP_K, "num_fused_shared_experts": 0, "params_dtype": torch.float32, "inplace": False,
    }  # fmt: skip
    return SimpleNamespace(
        moe_runner_config=MoeRunnerConfig(**(fields | changes)),
        num_experts=EXPERTS,
        moe_ep_size=ep_size,
        moe_ep_rank=ep_rank,
        moe_tp_size=1,
        moe_tp_rank=0,
        with_bias=False,
        w13_weight=torch.nn.Parameter(w13[held].clone(), requires_grad=False),
        w2_weight=torch.nn.Parameter(w2[held].clone(), requires_grad=False),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"top_k": None}, "how many experts a token takes"),
        ({"params_dtype": torch.float64}, "activations are torch.float64; moe_dist runs bf16, fp16, fp32"),
        ({"apply_router_weight_on_input": True}, "no one meaning for top-k 2"),
        ({"activation": "gelu"}, "activation 'gelu', gated, is not one"),  # exact, where ours is the tanh form
        ({"activation": "situ"}, "activation 'situ'"),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "interleaved"),
        ({"gemm1_clamp_limit": 7.0}, "clamps the gate after its sigmoid"),
        ({"activation": "gelu_tanh", "swiglu_limit": 10.0}, "'gelu_tanh' with swiglu_limit 10"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], reason: str) -> None:
    from moe_dist_sglang.layers import layer_config

    with pytest.raises(md.UnsupportedBackend, match=reason):
        layer_config(layer_of(**changes), method_of())


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, md.ActivationConfig("swiglu")),
        ({"swiglu_limit": 10.0}, md.ActivationConfig("swiglu", limit=10.0)),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
            md.ActivationConfig("swiglu", alpha=1.702, beta=1.0, limit=7.0),
        ),
        ({"activation": "gelu_tanh"}, md.ActivationConfig("geglu")),
        ({"activation": "relu2", "is_gated": False}, md.ActivationConfig("relu2")),
        ({"activation": "silu", "is_gated": False}, md.ActivationConfig("silu")),
    ],
)
def test_activations_are_those_of_the_triton_runner(changes: dict[str, Any], activation: md.ActivationConfig) -> None:
    from moe_dist_sglang.layers import layer_config

    assert layer_config(layer_of(**changes), method_of()).activation == activation


def test_fused_shared_experts_are_counted_apart_and_stay_on_one_rank() -> None:
    from moe_dist_sglang.layers import layer_config

    routing = layer_config(layer_of(num_fused_shared_experts=1), method_of()).routing
    assert (routing.num_experts, routing.top_k, routing.num_fused_shared_experts) == (EXPERTS - 1, TOP_K - 1, 1)
    with pytest.raises(md.UnsupportedBackend, match="--disable-shared-experts-fusion"):
        layer_config(layer_of(ep_size=2, num_fused_shared_experts=1), method_of())


def test_fp8_is_served_with_block_scales_alone() -> None:
    from moe_dist_sglang.layers import why_not

    assert why_not(layer_of(), method_of("fp8")) is None
    assert "one scale a tensor" in str(why_not(layer_of(), method_of("fp8", weight_block_size=None)))
    assert "mxfp8" in str(why_not(layer_of(), method_of("fp8", weight_block_size=None, use_mxfp8=True)))
    assert "of object; moe_dist serves UnquantizedFusedMoEMethod, Fp8MoEMethod" in str(why_not(layer_of(), object()))


@pytest.mark.parametrize(
    ("owner", "value", "reason"),
    [
        ("get_lora", SimpleNamespace(enable_lora=True, lora_paths=None), "LoRA"),
        ("get_exec", settings_of(eplb=True), "--enable-eplb"),
        ("get_exec", settings_of(compiled=True), "--enable-torch-compile"),
    ],
)
def test_engine_options_that_need_more_are_refused(monkeypatch: pytest.MonkeyPatch, owner: str, value: Any, reason: str) -> None:
    from moe_dist_sglang import layers

    monkeypatch.setattr(layers, owner, lambda: value)
    assert reason in str(layers.why_not(layer_of(), method_of()))


def test_deterministic_inference_is_a_demand_on_every_tactic(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_dist_sglang import layers
    from moe_dist_sglang.native import SGLangBackend

    assert not layers.layer_config(layer_of(), method_of()).execution.batch_invariant
    monkeypatch.setattr(layers, "get_exec", lambda: settings_of(deterministic=True))
    layer, method = layer_of(), method_of()
    reasons = md.explain_backends(layers.layer_config(layer, method), CPU, extra_backends=[SGLangBackend(layer, method)])
    assert "equal bits" in str(reasons["sglang"])
    assert "batch_invariant" in str(reasons["torch_grouped"])


# -- one call ----------------------------------------------------------------------------------------------------------------


def core_of(layer: Any) -> Any:
    from moe_dist_sglang.layers import layer_config, layer_weights, routed_scale
    from moe_dist_sglang.runner import MoEDistRunnerCore

    core, method = MoEDistRunnerCore(layer.moe_runner_config), method_of()
    core.bind(md.MoELayer(**layer_config(layer, method)), layer_weights(layer, method), routed_scale(layer))
    return core


def call(layer: Any, core: Any, x: torch.Tensor, topk_output: Any) -> torch.Tensor:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    info = method_of().get_triton_quant_info(layer)
    result: torch.Tensor = core.run_from_dispatch(StandardDispatchOutput(x, None, topk_output), info, layer.moe_runner_config).hidden_states
    return result


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights and global ids; the second row has an empty slot, the last is padding, the third names an expert twice."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[0, 7], [3, -1], [5, 5], [4, 1], [-1, -1]], dtype=torch.int32)
    return torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, TOP_K, generator=generator) + 0.1, ids


def rows(layer: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What each slot's expert says, unweighted [T, K, H], in plain words; zeros for empty slots."""
    out = torch.zeros(*ids.shape, HIDDEN)
    for token in range(ids.shape[0]):
        for slot, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                gate, up = (layer.w13_weight[expert] @ x[token]).chunk(2)
                out[token, slot] = layer.w2_weight[expert] @ (torch.nn.functional.silu(gate) * up)
    return out


def standard(weights: torch.Tensor, ids: torch.Tensor) -> Any:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(weights, ids, weights)


@pytest.mark.parametrize("inplace", [False, True])  # permission to overwrite the input, which is not taken
def test_empty_slots_add_nothing_and_the_input_stays(inplace: bool) -> None:
    layer = layer_of(inplace=inplace)
    x, weights, ids = inputs()
    before = x.clone()
    out = call(layer, core_of(layer), x, standard(weights, ids))
    torch.testing.assert_close(out, (rows(layer, x, ids) * weights[..., None]).sum(1), rtol=1e-4, atol=1e-4)
    assert not out[-1].any()
    assert torch.equal(x, before)


def test_partial_sums_of_ranks_add_up() -> None:
    whole = layer_of()
    x, weights, ids = inputs()
    parts = []
    for rank in (1, 0):
        layer = layer_of(ep_size=2, ep_rank=rank)
        parts.append(call(layer, core_of(layer), x, standard(weights, ids)))
    assert all(part.any() for part in parts)
    torch.testing.assert_close(sum(parts), (rows(whole, x, ids) * weights[..., None]).sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", [False, True])  # whether rows carry the router's weight
def test_without_combining_each_slot_has_its_row(keep: bool) -> None:
    layer = layer_of(no_combine=True, no_combine_keep_router_weight=keep, routed_scaling_factor=2.5)
    x, weights, ids = inputs()
    out = call(layer, core_of(layer), x, standard(weights, ids))
    torch.testing.assert_close(out, rows(layer, x, ids) * (weights[..., None] if keep else 1.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("on_cuda", "fused", "scale"),
    [(True, False, 2.5), (True, True, 1.0), (False, False, 1.0)],  # the runner's, the router's, the model's own
)
def test_routed_scaling_is_applied_once(monkeypatch: pytest.MonkeyPatch, on_cuda: bool, fused: bool, scale: float) -> None:
    from moe_dist_sglang import layers

    monkeypatch.setattr(layers, "is_cuda", lambda: on_cuda)
    layer = layer_of(routed_scaling_factor=2.5)
    layer.should_fuse_routed_scaling_factor_in_topk = fused
    x, weights, ids = inputs()
    out = call(layer, core_of(layer), x, standard(weights, ids))
    torch.testing.assert_close(out, scale * (rows(layer, x, ids) * weights[..., None]).sum(1), rtol=1e-4, atol=1e-4)


def test_router_weight_on_the_input_for_top_1() -> None:
    layer = layer_of(apply_router_weight_on_input=True, top_k=1)
    x, weights, ids = inputs()
    weights, ids = weights[:, :1].contiguous(), ids[:, :1].contiguous()
    out = call(layer, core_of(layer), x, standard(weights, ids))
    torch.testing.assert_close(out, rows(layer, x * weights, ids).sum(1), rtol=1e-4, atol=1e-4)


def test_packed_and_bypassed_router_outputs_are_read() -> None:
    from moe_dist_sglang.runner import routing
    from sglang.srt.layers.moe.topk import BypassedTopKOutput, PackedTopKOutput, TopKConfig

    ids = torch.tensor([[300, 2], [-1, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25], [0.0, 1.0]])
    packed = (ids << 16) | (weights.bfloat16().view(torch.int16).int() & 0xFFFF)
    read_weights, read_ids = routing(PackedTopKOutput(packed, weights))
    assert torch.equal(read_ids, ids)
    assert torch.equal(read_weights, weights)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    bypassed = BypassedTopKOutput(torch.zeros(1, HIDDEN), logits, TopKConfig(top_k=2, torch_native=True))
    read_weights, read_ids = routing(bypassed)
    assert read_ids.tolist() == [[1, 3]]
    torch.testing.assert_close(read_weights, logits[0, [1, 3]].softmax(0)[None])
    with pytest.raises(TypeError, match="not object"):
        routing(object())


def test_calls_that_start_up_should_have_refused_are_errors() -> None:
    from moe_dist_sglang.runner import MoEDistRunnerCore
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    layer = layer_of()
    x, weights, ids = inputs()
    with pytest.raises(RuntimeError, match="layer 3 is called before moe_dist has bound"):
        call(layer, MoEDistRunnerCore(layer.moe_runner_config), x, standard(weights, ids))
    core, info = core_of(layer), method_of().get_triton_quant_info(layer)
    with pytest.raises(RuntimeError, match="quantised hidden states"):
        core.run_from_dispatch(StandardDispatchOutput(x, torch.ones(1), standard(weights, ids)), info, layer.moe_runner_config)
    layer.w13_weight = torch.nn.Parameter(layer.w13_weight.clone(), requires_grad=False)
    with pytest.raises(RuntimeError, match="SGLang replaced the weights of MoE layer 3"):
        call(layer, core, x, standard(weights, ids))


# -- SGLang's own experts in the pool -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ep_size", "ep_rank"), [(1, 0), (2, 1)])  # all experts here; half of them, not the first
def test_native_experts_are_the_default_and_pass_the_tuners_check(ep_size: int, ep_rank: int) -> None:
    from moe_dist_sglang.layers import layer_config, layer_weights
    from moe_dist_sglang.native import SGLangBackend
    from moe_dist_sglang.serve import _native_first

    layer, method = layer_of(ep_size, ep_rank), method_of()
    native = SGLangBackend(layer, method)
    config = _native_first(layer_config(layer, method), native, CPU)
    operation = md.MoEOperation(
        md.MoEProblem.of(config, routed=True), layer_weights(layer, method), CPU, config.options, extra_backends=[native]
    )
    bucket = md.Bucket(1, TOKENS)
    default = operation.default(bucket, "eager")
    assert str(default) == "sglang(runner=torch)"
    assert {tactic.backend for tactic in operation.candidates(bucket, "eager")} >= {"sglang", "torch_grouped", "torch_loop"}
    probe = operation.probe(TOKENS, md.ProbeSpec())
    assert probe.check(probe.bind(default)) is None


def test_native_experts_leave_empty_slots_out() -> None:
    from moe_dist_sglang.layers import layer_config, layer_weights
    from moe_dist_sglang.native import SGLangBackend
    from moe_dist_sglang.serve import _native_first

    layer, method = layer_of(), method_of()
    native = SGLangBackend(layer, method)
    served = md.MoELayer(extra_backends=[native], **_native_first(layer_config(layer, method), native, CPU))
    x, weights, ids = inputs()
    acts = md.MoEActivationPack(hidden_states=x, topk_ids=ids, topk_weights=weights)
    out = served((acts, layer_weights(layer, method)))
    assert served.lookup(TOKENS).backend == "sglang"
    torch.testing.assert_close(out, (rows(layer, x, ids) * weights[..., None]).sum(1), rtol=1e-4, atol=1e-4)


def test_triton_experts_run_in_place_on_a_copy_with_local_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own output would lie in SGLang's symmetric pool: a collective, which one rank must not enter alone while tuning."""
    from moe_dist_sglang import native
    from moe_dist_sglang.layers import layer_config, layer_weights

    seen = []

    def kernels(dispatched: Any, info: Any, config: Any) -> None:
        seen.append(
            (dispatched.topk_output.topk_ids.tolist(), dispatched.hidden_states.clone(), config.inplace, config.routed_scaling_factor)
        )
        dispatched.hidden_states.mul_(2)

    monkeypatch.setattr(native, "fused_experts_none_to_triton", kernels)
    layer, method = layer_of(ep_size=2, ep_rank=1, routed_scaling_factor=2.5), method_of()
    backend = native.SGLangBackend(layer, method)
    problem = md.MoEProblem.of(layer_config(layer, method), routed=True)
    expert_map = torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3], dtype=torch.int32)
    bound = md.BoundLayer(problem, layer_weights(layer, method), expert_map)
    x, weights, ids = inputs()
    before, out = x.clone(), torch.full_like(x, torch.nan)
    tactic = md.Tactic.of("sglang", runner="triton")
    acts = md.MoEActivationPack(hidden_states=x, topk_ids=ids, topk_weights=weights)
    assert backend.bind(bound, tactic)(acts, out) == tactic
    ((local, given, inplace, scaling),) = seen
    assert local == [[-1, 3], [-1, -1], [1, 1], [0, -1], [-1, -1]]
    assert torch.equal(given, x)
    assert (inplace, scaling) == (True, None)
    assert torch.equal(out, 2 * before)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"no_combine": True}, "summed results"),
        ({"apply_router_weight_on_input": True, "top_k": 1}, "router's weight to the input"),
        ({"swiglu_limit": 10.0}, "limit=10.0"),
    ],
)
def test_native_experts_say_what_they_cannot_do(changes: dict[str, Any], reason: str) -> None:
    from moe_dist_sglang.layers import layer_config
    from moe_dist_sglang.native import SGLangBackend
    from moe_dist_sglang.serve import _native_first

    layer, method = layer_of(**changes), method_of()
    native = SGLangBackend(layer, method)
    config = layer_config(layer, method)
    assert reason in str(md.explain_backends(config, CPU, extra_backends=[native])["sglang"])
    assert "sglang" not in [option.name for option in _native_first(config, native, CPU).options or ()]


# -- the choice, where SGLang's quantisation methods make their runners --------------------------------------------------------


def make_runner(monkeypatch: pytest.MonkeyPatch, layer: Any, method: Any) -> list[str]:
    """Create the runner as SGLang does, with `moe_dist` chosen; which runners were chosen when SGLang's own code was called."""
    from moe_dist_sglang import hooks
    from sglang.srt.layers.moe.utils import get_moe_runner_backend, register_moe_runner_backend_name, resolve_moe_runner_backend
    from sglang.srt.runtime_context import get_flags

    register_moe_runner_backend_name("moe_dist")
    monkeypatch.setattr(get_flags().moe, "runner_backend", resolve_moe_runner_backend("moe_dist"))
    layer.layer_name, seen = "model.layers.3.mlp.experts", []

    def original(method: Any, layer: Any, config: Any) -> None:
        seen.append(get_moe_runner_backend().value)

    hooks.create_moe_runner(original, method, layer, layer.moe_runner_config)
    assert get_moe_runner_backend().value == "moe_dist"
    return seen


def test_a_layer_that_is_not_served_ends_start_up_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_DIST_UNSERVED", raising=False)
    with pytest.raises(md.UnsupportedBackend, match=r"model\.layers\.3\.mlp\.experts: activation 'situ'"):
        make_runner(monkeypatch, layer_of(activation="situ"), method_of())
    with pytest.raises(md.UnsupportedBackend, match=r"model\.layers\.3\.mlp\.experts: num_experts 8 is not divisible by ep_size 3"):
        make_runner(monkeypatch, layer_of(ep_size=3), method_of())


def test_a_layer_that_is_not_served_may_be_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_DIST_UNSERVED", "native")
    assert make_runner(monkeypatch, layer_of(activation="situ"), method_of()) == ["auto"]
