"""One layer at a time, with SGLang's own types and no engine: what is refused and why, and what the runner core makes of a call."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize(
    ("changes", "quant"),
    [
        ({}, {"granularity": "block", "block_shape": (16, 16)}),
        ({"weight_block_size": None}, {"granularity": "tensor"}),
        ({"weight_block_size": None, "is_checkpoint_fp8_serialized": False}, {"granularity": "tensor"}),  # quantised while loading
    ],
)
def test_fp8_formats(changes: dict[str, Any], quant: dict[str, Any]) -> None:
    from moe_dist_sglang.layers import layer_config, why_not

    method = method_of("fp8", **changes)
    assert why_not(layer_of(), method) is None
    assert layer_config(layer_of(), method).quant == md.QuantConfig(dtype="fp32", weight="fp8", **quant)


def test_weights_that_are_not_served() -> None:
    from moe_dist_sglang.layers import why_not

    static = method_of("fp8", weight_block_size=None, activation_scheme="static")
    assert "static activation scales" in str(why_not(layer_of(), static))
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


def call(layer: Any, core: Any, x: torch.Tensor, topk_output: Any, method: Any = None) -> torch.Tensor:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    info = (method or method_of()).get_triton_quant_info(layer)
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


def test_fp8_weights_with_a_scale_an_expert() -> None:
    from moe_dist_sglang.layers import layer_config, layer_weights, routed_scale
    from moe_dist_sglang.runner import MoEDistRunnerCore

    layer, method = layer_of(), method_of("fp8", weight_block_size=None)
    plain = layer_of()
    for name in ("w13", "w2"):
        weight = getattr(layer, f"{name}_weight").data
        scale = weight.abs().amax((1, 2)) / 448
        held = (weight / scale[:, None, None]).to(torch.float8_e4m3fn)
        getattr(plain, f"{name}_weight").data = held.float() * scale[:, None, None]
        setattr(layer, f"{name}_weight", torch.nn.Parameter(held, requires_grad=False))
        setattr(layer, f"{name}_weight_scale", torch.nn.Parameter(scale, requires_grad=False))
        setattr(layer, f"{name}_input_scale", None)
    core = MoEDistRunnerCore(layer.moe_runner_config)
    core.bind(md.MoELayer(**layer_config(layer, method)), layer_weights(layer, method), routed_scale(layer))
    x, weights, ids = inputs()
    out = call(layer, core, x, standard(weights, ids), method)
    truth = (rows(plain, x, ids) * weights[..., None]).sum(1)
    assert float((out - truth).norm() / truth.norm()) < 0.06  # rows of activations are fp8 too
    assert float((out - (rows(layer_of(), x, ids) * weights[..., None]).sum(1)).norm() / truth.norm()) > 1e-3  # fp8 shows


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


def test_fused_shared_experts_count_once_beside_the_scaled_routed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's router gives the last ids to them, with a weight that the factor makes 1."""
    from moe_dist_sglang import layers

    monkeypatch.setattr(layers, "is_cuda", lambda: True)
    layer = layer_of(routed_scaling_factor=2.5, num_fused_shared_experts=1)
    x, weights, ids = inputs()
    ids = torch.stack([ids[:, 0].clamp(-1, 6), torch.full((TOKENS,), 7, dtype=torch.int32)], 1)
    weights = torch.stack([weights[:, 0], torch.full((TOKENS,), 1 / 2.5)], 1)
    out = call(layer, core_of(layer), x, standard(weights, ids))
    each = rows(layer, x, ids)
    torch.testing.assert_close(out, 2.5 * weights[:, :1] * each[:, 0] + each[:, 1], rtol=1e-4, atol=1e-4)


def test_router_weight_on_the_input_for_top_1() -> None:
    layer = layer_of(apply_router_weight_on_input=True, top_k=1)
    x, weights, ids = inputs()
    weights, ids = weights[:, :1].contiguous(), ids[:, :1].contiguous()
    out = call(layer, core_of(layer), x, standard(weights, ids))
    torch.testing.assert_close(out, rows(layer, x * weights, ids).sum(1), rtol=1e-4, atol=1e-4)


def test_packed_and_bypassed_router_outputs_are_read() -> None:
    from moe_dist_sglang.native import routing
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

    from moe_dist.serving import untuned_layer

    layer, method = layer_of(ep_size, ep_rank), method_of()
    native = SGLangBackend(layer, method)
    config = untuned_layer(layer_config(layer, method), CPU, [native]).config
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

    from moe_dist.serving import untuned_layer

    layer, method = layer_of(), method_of()
    native = SGLangBackend(layer, method)
    served = untuned_layer(layer_config(layer, method), CPU, [native])
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


@pytest.mark.parametrize(("ep_size", "ep_rank"), [(1, 0), (2, 1)])
def test_a_call_that_sglang_s_experts_serve_has_nothing_around_it(monkeypatch: pytest.MonkeyPatch, ep_size: int, ep_rank: int) -> None:
    """Its own config, so that scaling, allocation and in-place output are as without us; ids are local, as its dispatcher would make them."""
    from moe_dist_sglang import native as natives
    from moe_dist_sglang import runner
    from moe_dist_sglang.layers import layer_config, layer_weights
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    seen: list[Any] = []
    monkeypatch.setattr(natives, "fused_experts_none_to_triton", lambda *given: seen.append(given) or "combined")
    layer, method = layer_of(ep_size, ep_rank, routed_scaling_factor=2.5, inplace=True), method_of()
    native = natives.SGLangBackend(layer, method)
    served = untuned(layer_config(layer, method), native)
    core, info = runner.MoEDistRunnerCore(layer.moe_runner_config), method.get_triton_quant_info(layer)
    weights_of_layer = layer_weights(layer, method)
    x, weights, ids = inputs()
    served((md.MoEActivationPack(hidden_states=x, topk_ids=ids, topk_weights=weights), weights_of_layer))  # binds, as start-up does
    core.bind(served, weights_of_layer, 2.5, native)
    given = StandardDispatchOutput(x, None, standard(weights, ids))
    assert core.run_from_dispatch(given, info, layer.moe_runner_config) == "combined"
    ((dispatched, quant_info, config),) = seen
    assert quant_info is info
    assert config is layer.moe_runner_config
    assert dispatched.hidden_states is x
    if ep_size == 1:
        assert dispatched is given
    else:
        assert dispatched.topk_output.topk_ids.tolist() == [[-1, 3], [-1, -1], [1, 1], [0, -1], [-1, -1]]
    empty = StandardDispatchOutput(x[:0], None, standard(weights[:0], ids[:0]))  # which its kernels don't take
    assert core.run_from_dispatch(empty, info, layer.moe_runner_config).hidden_states.shape == (0, HIDDEN)
    assert len(seen) == 1


def untuned(config: md.MoEConfig, native: Any) -> md.MoELayer:
    from moe_dist.serving import untuned_layer

    return untuned_layer(config, CPU, [native])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"no_combine": True}, "summed results"),
        ({"apply_router_weight_on_input": True, "top_k": 1}, "router's weight to the input"),
        ({"swiglu_limit": 10.0}, "limit=10.0"),
    ],
)
def test_native_experts_say_what_they_cannot_do(changes: dict[str, Any], reason: str) -> None:
    from moe_dist_sglang.layers import layer_config, layer_weights
    from moe_dist_sglang.native import SGLangBackend

    from moe_dist.serving import untuned_layer

    layer, method = layer_of(**changes), method_of()
    native = SGLangBackend(layer, method)
    config = layer_config(layer, method)
    assert reason in str(md.explain_backends(config, CPU, extra_backends=[native])["sglang"])
    served = untuned_layer(config, CPU, [native])
    served(
        (
            md.MoEActivationPack(
                hidden_states=(x := inputs()[0]),
                topk_ids=inputs()[2][:, : served.config.routing.slots].contiguous(),
                topk_weights=inputs()[1][:, : served.config.routing.slots].contiguous(),
            ),
            layer_weights(layer, method),
        )
    )
    assert served.lookup(len(x)).backend != "sglang"


# -- memory that ranks must agree about ---------------------------------------------------------------------------------------


class SymmetricPool(TorchDispatchMode):
    """In SGLang's pool's place: bytes of every tensor that is allocated inside, in order."""

    def __init__(self, allocated: list[int]) -> None:
        super().__init__()
        self._allocated = allocated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._allocated.append(result.nbytes)
        return result


@pytest.mark.parametrize("default", ["sglang", "torch_loop", "torch_grouped", "torch_dense"])
def test_symmetric_pool_holds_the_output_alone_of_one_size_on_every_rank(monkeypatch: pytest.MonkeyPatch, default: str) -> None:
    """An allocation there is a collective: its sizes must not follow from what a rank was routed, here everything to rank 0."""
    from moe_dist_sglang import runner
    from moe_dist_sglang.layers import layer_config, layer_weights
    from moe_dist_sglang.native import SGLangBackend

    monkeypatch.setattr(runner, "is_allocation_symmetric", lambda: True)
    x, weights, ids = inputs()
    ids = ids % 4
    sizes = []
    for rank in (0, 1):
        allocated: list[int] = []

        def pool(group: Any, disabled: bool, allocated: list[int] = allocated) -> Any:
            assert not disabled
            return SymmetricPool(allocated)

        monkeypatch.setattr(runner, "use_symmetric_memory", pool)
        layer, method = layer_of(2, rank), method_of()
        native = SGLangBackend(layer, method)
        options = {native.name: native.config_type()} | {
            option.name: option for option in md.find_backends(layer_config(layer, method), CPU)
        }
        config = dataclasses.replace(layer_config(layer, method), backends=md.BackendOptions((options[default],)))
        served = md.MoELayer(extra_backends=[native], **config)
        core = runner.MoEDistRunnerCore(layer.moe_runner_config)
        core.bind(served, layer_weights(layer, method), 1.0)
        out = call(layer, core, x, standard(weights, ids))
        assert out.any() == (rank == 0)
        assert served.lookup(TOKENS).backend == default
        sizes.append(allocated)
    assert sizes[0] == sizes[1] == [TOKENS * HIDDEN * 4]


def test_pool_is_left_alone_where_rows_differ_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention data parallelism whose ranks SGLang did not pad alike."""
    from moe_dist_sglang import runner

    asked = []
    monkeypatch.setattr(runner, "is_allocation_symmetric", lambda: False)
    monkeypatch.setattr(runner, "use_symmetric_memory", lambda group, disabled: asked.append(disabled) or contextlib.nullcontext())
    layer = layer_of()
    x, weights, ids = inputs()
    call(layer, core_of(layer), x, standard(weights, ids))
    assert asked == [True]


def engine_of(layer: Any, method: Any, **fields: Any) -> Any:
    """A stand-in for the model runner of a model of this one layer."""
    holder = torch.nn.Module()
    holder.experts = FakeExperts(layer, method)
    return SimpleNamespace(
        model=holder, device="cuda", decode_num_tokens_per_req=lambda: 1, is_draft_worker=False, draft_model_idx=None,
        server_args=SimpleNamespace(served_model_name="m", model_path="m"), **fields,
    )  # fmt: skip


class FakeExperts(torch.nn.Module):
    """A `FusedMoE` in name, by `monkeypatch`: what `serve.attach` reads of one."""

    def __init__(self, layer: Any, method: Any) -> None:
        from moe_dist_sglang.runner import MoEDistRunnerCore

        super().__init__()
        for name, value in vars(layer).items():
            setattr(self, name, value)
        self.quant_method = method
        method.runner = self.runner = SimpleNamespace(runner_core=MoEDistRunnerCore(layer.moe_runner_config))
        self.runner_backend = "moe_dist"


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The widths that `serve` reads: one rank, until a test says otherwise."""
    from moe_dist_sglang import serve

    widths = SimpleNamespace(
        tp_size=1, moe_ep_size=1, attn_dp_size=1, pp_size=1, pp_rank=0, attn_cp_size=1, moe_dp_size=1, dist_timeout=None
    )
    monkeypatch.setattr(serve, "FusedMoE", FakeExperts)
    monkeypatch.setattr(serve, "get_parallel", lambda: widths)
    monkeypatch.setattr(
        serve,
        "get_schedule",
        lambda: SimpleNamespace(chunked_prefill_size=16, max_prefill_tokens=64, max_running_requests=4, enable_mixed_chunk=False),
    )
    monkeypatch.setenv("MOE_DIST_STORE", "memory:")
    return widths


@pytest.mark.parametrize("gathered", [1, 4])  # attention data parallelism: a layer sees the rows of all its ranks
def test_scratch_is_kept_free_while_the_kv_cache_is_sized_as_much_on_every_rank(parallel: Any, gathered: int) -> None:
    from moe_dist_sglang import serve

    from moe_dist.serving import TokenCounts

    parallel.attn_dp_size = gathered
    kept = []
    for rank in (0, 1):
        engine = engine_of(layer_of(2, rank, no_combine=True), method_of())  # not one for SGLang's own experts
        serve.attach(engine)
        kept.append(getattr(engine, serve.KEPT).nbytes)
        assert kept[-1] == getattr(engine, serve.SERVED).workspace_bytes(TokenCounts(16 * gathered))
    assert kept[0] == kept[1] > 0
    assert kept[0] > 16 * gathered * TOP_K * HIDDEN * 4  # at least each slot's result: it grows with the rows


def test_nothing_is_kept_where_sglang_s_own_experts_are_the_default(parallel: Any) -> None:
    from moe_dist_sglang import serve

    engine = engine_of(layer_of(), method_of())
    serve.attach(engine)
    assert getattr(engine, serve.KEPT) is None
    assert getattr(engine, serve.SERVED).default_backends() == {"sglang"}


def test_kept_memory_is_given_back_and_the_whole_tensor_parallel_group_tunes(parallel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That group spans attention data parallelism and expert parallelism; narrower groups run a layer in step with ranks outside them."""
    from moe_dist_sglang import serve

    from moe_dist.serving import TokenCounts

    engine = engine_of(layer_of(), method_of())
    engine.device = "cpu"
    serve.attach(engine)
    tuned = []
    model = SimpleNamespace(tune=lambda counts, group, timeout: tuned.append((counts, group, timeout.total_seconds())))
    setattr(engine, serve.SERVED, model)
    setattr(engine, serve.KEPT, torch.empty(8))
    monkeypatch.setattr(serve, "token_counts", lambda runner: TokenCounts(16))
    parallel.tp_size, parallel.tp_group, parallel.dist_timeout = 4, SimpleNamespace(cpu_group="all four"), 77
    for name in ("moe_ep_group", "moe_tp_group", "attn_tp_group"):
        setattr(parallel, name, SimpleNamespace(cpu_group=f"some of {name}"))
    serve.tune(engine)
    serve.tune(engine)  # SGLang warms up once more
    assert tuned == [(TokenCounts(16), "all four", 77.0)]
    assert getattr(engine, serve.KEPT) is None


def test_draft_models_and_other_layouts_share_no_epoch(parallel: Any) -> None:
    from moe_dist_sglang import serve

    def named(**fields: Any) -> str:
        engine = engine_of(layer_of(), method_of())
        for name, value in fields.items():
            setattr(engine, name, value)
        return serve.deployment(engine)

    target, draft, second = named(), named(is_draft_worker=True), named(is_draft_worker=True, draft_model_idx=1)
    assert target == "sglang:m:tp1-ep1-dp1-pp1:stage0"
    assert draft == f"{target}:draft0"
    assert second == f"{target}:draft1"
    parallel.attn_cp_size = 2
    assert named() == "sglang:m:tp1-ep1-dp1-pp1-cp2-moedp1:stage0"


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
