"""Other implementations of a MoE layer's experts, called as their own users call them: what our kernels are compared with.

Owns which peers there are, which can be imported here, and how each is called: ids and router weights in, output out, quantising
included. Runs and judges nothing. `kernels.py` times what this opens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from moe_dist.backends.base import BoundLayer, MoEProblem
from moe_dist.backends.torch_grouped import TorchGroupedBackend
from moe_dist.errors import ConfigError, first_line
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.problem import Tactic

Call = Callable[[MoEActivationPack], torch.Tensor]  # a routed call: [T, H] in the problem's dtype, in memory of its own

FAMILIES = ("vllm", "sglang", "sonicmoe", "torch")
DEEP_GEMM_TOKENS, SONICMOE_TOKENS = 64, 4096


@dataclasses.dataclass(frozen=True)
class Peer:
    """name: as rows have it. why_not(problem, num_tokens): the reason why it is not timed there, or None. bind(layer): its call on these weights.

    route: the routing that it really uses for an activation pack, where it chooses experts itself; None: the ids and weights that it is given.
    """

    name: str
    version: str
    why_not: Callable[[MoEProblem, int], str | None]
    bind: Callable[[BoundLayer], Call]
    route: Callable[[MoEActivationPack, MoEProblem], MoEActivationPack] | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """The peers of the families asked for. missing: {family: why it can't be had here}."""

    peers: tuple[Peer, ...]
    missing: dict[str, str]


@contextlib.contextmanager
def open_peers(families: Sequence[str], device: torch.device, max_num_tokens: int) -> Iterator[Found]:
    """The importable peers, ready to be bound while the block lasts. max_num_tokens: the most that a call will bring.

    ConfigError: no such family.
    """
    if unknown := [family for family in families if family not in FAMILIES]:
        raise ConfigError(f"peer {unknown[0]!r} is not known; choose some of {', '.join(FAMILIES)}")
    with contextlib.ExitStack() as open_until:
        peers: list[Peer] = []
        missing: dict[str, str] = {}
        for family in dict.fromkeys(families):
            try:
                peers += _OPEN[family](device, max_num_tokens, open_until)
            except Exception as error:  # a foreign package may fail to load in any way; the table says which
                missing[family] = f"{type(error).__name__}: {first_line(error)}"
        yield Found(tuple(peers), missing)


def _open_torch(device: torch.device, max_num_tokens: int, open_until: contextlib.ExitStack) -> list[Peer]:
    """torch's own grouped products, sorted and summed by plain torch operations."""
    backend = TorchGroupedBackend()

    def tactic(problem: MoEProblem) -> Tactic:
        return Tactic.of(backend.name, compute=problem.config.quant.dtype, method="grouped_mm")

    def why_not(problem: MoEProblem, num_tokens: int) -> str | None:
        reason = backend.why_not(problem, device, backend.config_type())
        return reason or backend.why_not_tactic(problem, tactic(problem), None, device)

    def bind(layer: BoundLayer) -> Call:
        run = backend.bind(layer, tactic(layer.problem))

        def call(acts: MoEActivationPack) -> torch.Tensor:
            out = torch.empty_like(acts.hidden_states)
            run(acts, out)
            return out

        return call

    return [Peer("torch_grouped_mm", str(torch.__version__), why_not, bind)]


def _swiglu_alone(problem: MoEProblem) -> str | None:
    config = problem.config
    if config.activation.kind != "swiglu" or config.activation.limit is not None or config.experts.bias:
        return "it is called for plain SwiGLU without biases alone"
    return None


def _plain_or_blocks(problem: MoEProblem, num_tokens: int) -> str | None:
    quant = problem.config.quant
    if quant.weight is not None and (quant.weight, quant.granularity) != ("fp8", "block"):
        return f"it is called for {quant.dtype} weights and for fp8 in blocks alone"
    return _swiglu_alone(problem)


def _require_installed(package: str) -> None:
    """Said before anything about the device: what is lacking first."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{package} is not installed here", name=package)


def _open_vllm(device: torch.device, max_num_tokens: int, open_until: contextlib.ExitStack) -> list[Peer]:
    """vLLM's Triton experts with its tuned json for the card where it ships one, and its DeepGEMM experts."""
    _require_installed("vllm")
    if device.type != "cuda":
        raise ConfigError(f"vLLM's experts need a CUDA device, not {device.type!r}")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
        fp8_w8a8_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, make_fp8_moe_kernel
    from vllm.v1.worker.workspace import init_workspace_manager

    open_until.enter_context(set_current_vllm_config(VllmConfig()))
    init_workspace_manager(device)
    version = importlib.metadata.version("vllm")

    def quant_of(layer: BoundLayer) -> Any:
        weights, quant = layer.weights, layer.problem.config.quant
        if quant.weight is None:
            return FUSED_MOE_UNQUANTIZED_CONFIG
        assert quant.block_shape is not None
        return fp8_w8a8_moe_quant_config(w1_scale=weights.w13_scale, w2_scale=weights.w2_scale, block_shape=list(quant.block_shape))

    def bind_triton(layer: BoundLayer) -> Call:
        weights, quant = layer.weights, quant_of(layer)

        def call(acts: MoEActivationPack) -> torch.Tensor:
            out: torch.Tensor = fused_experts(
                acts.hidden_states, weights.w13, weights.w2, acts.topk_weights, acts.topk_ids, quant_config=quant
            )
            return out

        return call

    def deep_gemm_blocks(problem: MoEProblem, num_tokens: int) -> str | None:
        if problem.config.quant.weight != "fp8":
            return "DeepGEMM's experts are fp8 in blocks"
        if num_tokens < DEEP_GEMM_TOKENS:
            return f"it fills up every expert's rows to 128 and is timed from {DEEP_GEMM_TOKENS} tokens on"
        return _plain_or_blocks(problem, num_tokens)

    def bind_deep_gemm(layer: BoundLayer) -> Call:
        weights, config = layer.weights, layer.problem.config
        moe = FusedMoEConfig(
            num_experts=layer.num_local_experts,
            experts_per_token=config.routing.top_k,
            hidden_dim=config.experts.hidden_size,
            intermediate_size=layer.problem.local_intermediate,
            num_local_experts=layer.num_local_experts,
            num_logical_experts=layer.num_local_experts,
            activation=MoEActivation.SILU,
            device=device.type,
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=layer.problem.dtype,
            max_num_tokens=max_num_tokens,
        )
        kernel = make_fp8_moe_kernel(quant_of(layer), moe, DeepGemmExperts, Fp8MoeBackend.DEEPGEMM)

        def call(acts: MoEActivationPack) -> torch.Tensor:
            out: torch.Tensor = kernel.apply(
                hidden_states=acts.hidden_states,
                w1=weights.w13,
                w2=weights.w2,
                topk_weights=acts.topk_weights,
                topk_ids=acts.topk_ids,
                activation=MoEActivation.SILU,
                global_num_experts=layer.num_local_experts,
                expert_map=None,
                apply_router_weight_on_input=False,
            )
            return out

        return call

    return [
        Peer("vllm_triton", version, _plain_or_blocks, bind_triton),
        Peer("vllm_deepgemm", version, deep_gemm_blocks, bind_deep_gemm),
    ]


def _open_sglang(device: torch.device, max_num_tokens: int, open_until: contextlib.ExitStack) -> list[Peer]:
    """SGLang's Triton experts with its tuned json for the card where it ships one, as its runner calls them for one rank."""
    _require_installed("sglang")
    _require_installed("sgl_kernel")  # the distribution sglang-kernel, which SGLang itself imports at a first call
    if device.type != "cuda":
        raise ConfigError(f"SGLang's experts need a CUDA device, not {device.type!r}")
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo, fused_experts_none_to_triton
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.runtime_context import get_context, get_parallel

    open_until.enter_context(get_context().override_server_args(device=device.type))
    open_until.enter_context(get_parallel().override(tp_group=SimpleNamespace(world_size=1)))  # asked for its size alone

    def bind(layer: BoundLayer) -> Call:
        weights, config, quant = layer.weights, layer.problem.config, layer.problem.config.quant
        runner = MoeRunnerConfig(
            num_experts=config.routing.num_experts,
            num_local_experts=layer.num_local_experts,
            hidden_size=config.experts.hidden_size,
            intermediate_size_per_partition=layer.problem.local_intermediate,
            top_k=config.routing.top_k,
            params_dtype=layer.problem.dtype,
            activation="silu",
            inplace=False,
        )
        info = TritonMoeQuantInfo(
            weights.w13,
            weights.w2,
            use_fp8_w8a8=quant.weight is not None,
            w13_scale=weights.w13_scale,
            w2_scale=weights.w2_scale,
            block_shape=None if quant.block_shape is None else list(quant.block_shape),
        )

        def call(acts: MoEActivationPack) -> torch.Tensor:
            topk = StandardTopKOutput(acts.topk_weights, acts.topk_ids, acts.topk_weights)
            out: torch.Tensor = fused_experts_none_to_triton(
                StandardDispatchOutput(acts.hidden_states, None, topk), info, runner
            ).hidden_states
            return out

        return call

    return [Peer("sglang_triton", importlib.metadata.version("sglang"), _plain_or_blocks, bind)]


def _open_sonicmoe(device: torch.device, max_num_tokens: int, open_until: contextlib.ExitStack) -> list[Peer]:
    """SonicMoE's inference call. It takes no ids: its own router product and top-k are part of its time, over a router of random weights."""
    _require_installed("sonicmoe")
    if device.type != "cuda":
        raise ConfigError(f"SonicMoE needs a CUDA device, not {device.type!r}")
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    def router(problem: MoEProblem) -> torch.Tensor:
        config = problem.config
        drawn = torch.randn(config.routing.num_experts, config.experts.hidden_size, generator=torch.Generator().manual_seed(0))
        weight: torch.Tensor = (drawn * config.experts.hidden_size**-0.5).to(problem.dtype).to(device)
        return weight

    def why_not(problem: MoEProblem, num_tokens: int) -> str | None:
        if problem.config.quant.weight is not None or problem.config.quant.dtype != "bf16":
            return "it is called for bf16 weights alone"
        if num_tokens < SONICMOE_TOKENS:
            return f"it is made for training and prefill, and is timed from {SONICMOE_TOKENS} tokens on"
        return _swiglu_alone(problem)

    def bind(layer: BoundLayer) -> Call:
        config, router_weight = layer.problem.config, router(layer.problem)
        gate, up = layer.weights.w13.chunk(2, dim=1)
        w13 = torch.stack([gate, up], dim=2).flatten(1, 2).permute(1, 2, 0)  # its rows: one of gate, one of up
        w2 = layer.weights.w2.permute(1, 2, 0)

        def call(acts: MoEActivationPack) -> torch.Tensor:
            stream = torch.cuda.current_stream(device).cuda_stream
            out: torch.Tensor = moe_TC_softmax_topk_layer(
                acts.hidden_states, router_weight, w13, None, w2, None, config.routing.top_k, stream, ActivationType.SWIGLU, True
            )[0]
            return out

        return call

    def route(acts: MoEActivationPack, problem: MoEProblem) -> MoEActivationPack:
        logits = F.linear(acts.hidden_states, router(problem))
        chosen = logits.float().topk(problem.config.routing.top_k, dim=1)
        return dataclasses.replace(acts, topk_ids=chosen.indices.int(), topk_weights=chosen.values.softmax(1))

    return [Peer("sonicmoe", importlib.metadata.version("sonic-moe"), why_not, bind, route)]


_OPEN: dict[str, Callable[[torch.device, int, contextlib.ExitStack], list[Peer]]] = {
    "torch": _open_torch,
    "vllm": _open_vllm,
    "sglang": _open_sglang,
    "sonicmoe": _open_sonicmoe,
}
