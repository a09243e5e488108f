"""What the runner core makes of one call: sums, scaling, empty slots, every format of the router's output, and where its output lies."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from sglang_stand_ins import CPU, HIDDEN, TOKENS, call, core_of, inputs, layer_of, method_of, rows, standard
from torch.utils._python_dispatch import TorchDispatchMode

import moe_dist as md

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("published")]


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
    layer = layer_of(no_combine=True, routed_scaling_factor=2.5)
    layer.moe_runner_config.no_combine_keep_router_weight = keep  # a field of its own from 0.5.23 on
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


@pytest.mark.parametrize("ep_size", [1, 2])  # ids stay the model's in every format: half of the experts are another rank's
def test_a_call_with_a_packed_or_a_bypassed_router_output(ep_size: int) -> None:
    from sglang.srt.layers.moe.topk import BypassedTopKOutput, PackedTopKOutput, TopKConfig

    whole = layer_of()
    x, weights, ids = inputs()
    weights = weights.bfloat16().float()  # what a packed slot holds
    logits = torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(2))
    chosen = logits.softmax(1).topk(2)
    asked = {
        "packed": (PackedTopKOutput((ids << 16) | (weights.bfloat16().view(torch.int16).int() & 0xFFFF), weights), weights, ids),
        "bypassed": (
            BypassedTopKOutput(x, logits, TopKConfig(top_k=2, renormalize=False, torch_native=True)), chosen.values, chosen.indices
        ),
    }  # fmt: skip
    for given, weights_TK, ids_TK in asked.values():
        out = torch.zeros(TOKENS, HIDDEN)
        for rank in range(ep_size):
            layer = layer_of(ep_size, rank)
            out += call(layer, core_of(layer), x, given)
        truth = (rows(whole, x, ids_TK) * weights_TK[..., None]).sum(1)
        torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-4)


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
    with pytest.raises(RuntimeError, match="or LoRA hooks"):
        core.run_from_dispatch(StandardDispatchOutput(x, None, standard(weights, ids)), info, layer.moe_runner_config, hooks=object())
    layer.w13_weight = torch.nn.Parameter(layer.w13_weight.clone(), requires_grad=False)
    with pytest.raises(RuntimeError, match="SGLang replaced the weights of MoE layer 3"):
        call(layer, core, x, standard(weights, ids))


@pytest.mark.parametrize("replaced", ["w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"])
def test_one_tensor_that_sglang_replaced_is_an_error(replaced: str) -> None:
    """With a scale an expert, SGLang writes new weights into the tensor that it has, and makes a new one for their scales."""
    from moe_dist_sglang.layers import layer_config, layer_weights
    from moe_dist_sglang.runner import MoEDistRunnerCore

    layer, method = layer_of(), method_of("fp8", weight_block_size=None)
    for name in ("w13", "w2"):
        held = torch.nn.Parameter(getattr(layer, f"{name}_weight").data.to(torch.float8_e4m3fn), requires_grad=False)
        setattr(layer, f"{name}_weight", held)
        setattr(layer, f"{name}_weight_scale", torch.nn.Parameter(torch.ones(8), requires_grad=False))
        setattr(layer, f"{name}_input_scale", None)
    core = MoEDistRunnerCore(layer.moe_runner_config)
    core.bind(md.MoELayer(**layer_config(layer, method)), layer_weights(layer, method), 1.0)
    x, weights, ids = inputs()
    call(layer, core, x, standard(weights, ids), method)
    setattr(layer, replaced, torch.nn.Parameter(getattr(layer, replaced).data.clone(), requires_grad=False))
    with pytest.raises(RuntimeError, match="SGLang replaced the weights of MoE layer 3"):
        call(layer, core, x, standard(weights, ids), method)


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
