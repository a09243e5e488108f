"""vLLM's own experts as a backend of ours: the choice of `auto` is the default tactic, so that moe_dist serves nothing slower untuned.

The rule of memory: only experts that read the checkpoint's weights as they lie join, beside ours and beside each other. Where `auto`'s
choice wants them laid out anew, a second copy of all experts would be needed: it is left out, and the log says what the copy would be.
Scales are shared too, so that weights which vLLM reloads in place are what these experts read: Triton's and CUTLASS's take them as they
lie, and so does DeepGEMM with fp32 scales of 128 x 128 blocks, unless it rounds scales to powers of two (E8M0), which it does to the weights
as well.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

import moe_dist as md
from moe_dist_vllm.patch import say_once


@dataclasses.dataclass(frozen=True)
class VllmConfig(md.BackendConfig):
    """vLLM's own experts; nothing to set."""

    name = "vllm"


class VllmBackend(md.Backend):
    """The experts classes of vLLM that can run one layer beside ours, `auto`'s choice first."""

    name = "vllm"
    config_type = VllmConfig

    def __init__(self, classes: Sequence[type], moe_config: Any, quant_config: Any) -> None:
        self._classes = {cls.__name__: cls for cls in classes}
        self._moe_config, self._quant_config = moe_config, quant_config

    def why_not(self, problem: md.MoEProblem, device: torch.device, params: md.BackendConfig) -> str | None:
        return None if self._classes else "vLLM has no experts for this layer that share the checkpoint's weight layout"

    def tactics(self, problem: md.MoEProblem, bucket: md.Bucket, device: torch.device, params: md.BackendConfig) -> list[md.Tactic]:
        return [md.Tactic.of(self.name, experts=name) for name in self._classes]

    def default(self, problem: md.MoEProblem, bucket: md.Bucket | None, device: torch.device) -> md.Tactic:
        return md.Tactic.of(self.name, experts=next(iter(self._classes)))

    def workspace(self, problem: md.MoEProblem, tactic: md.Tactic, num_tokens: int) -> md.Workspace:
        config = problem.config
        rows = problem.local_intermediate * (2 if config.activation.gated else 1)
        hidden, total = config.experts.hidden_size, config.routing.total_experts
        local = len(problem.local_experts(0))  # rank 0 holds the most
        experts: Any = self._classes[str(tactic["experts"])](self._moe_config, self._quant_config)
        shapes = experts.workspace_shapes(num_tokens, rows, hidden, config.routing.slots, total, local, None, self._moe_config.activation)
        size13, size2, out = (math.prod(shape) for shape in shapes)
        return md.Workspace((max(size13, out) + size2) * experts.workspace_dtype(problem.dtype).itemsize)

    def bind(self, layer: md.BoundLayer, tactic: md.Tactic) -> Callable[[md.MoEActivationPack, torch.Tensor], md.Tactic]:
        """Calls the experts as vLLM's modular kernel does without data parallelism: quantise, workspaces, apply."""
        cls, quant = self._classes[str(tactic["experts"])], self._quant_config
        experts: Any = cls(self._moe_config, quant)
        if not isinstance(experts.finalize_weight_and_reduce_impl(), TopKWeightAndReduceNoOP):
            raise TypeError(f"{cls.__name__} leaves the sum over experts to its caller")
        w1, w2, activation = layer.weights.w13, layer.weights.w2, self._moe_config.activation
        total, local = layer.problem.config.routing.total_experts, layer.num_local_experts

        def run(acts: md.MoEActivationPack, out: torch.Tensor) -> md.Tactic:
            a1, scale = acts.hidden_states, None
            if not experts.expects_unquantized_inputs:
                a1, scale = moe_kernel_quantize_input(a1, quant.a1_scale, quant.quant_dtype, quant.per_act_token_quant, quant.block_shape)
            _, M, N, K, topk = experts.moe_problem_size(a1, w1, w2, acts.topk_ids)
            shape13, shape2, _ = experts.workspace_shapes(M, N, K, topk, total, local, None, activation)
            dtype = experts.workspace_dtype(out.dtype)
            workspace13 = torch.empty(max(math.prod(shape13), out.numel()), dtype=dtype, device=out.device)[: math.prod(shape13)].view(
                shape13
            )
            experts.apply(
                output=out, hidden_states=a1, w1=w1, w2=w2, topk_weights=acts.topk_weights, topk_ids=acts.topk_ids, activation=activation,
                global_num_experts=total, expert_map=layer.expert_map, a1q_scale=scale, a2_scale=experts.a2_scale, workspace13=workspace13,
                workspace2=torch.empty(shape2, dtype=dtype, device=out.device), expert_tokens_meta=None, apply_router_weight_on_input=False,
            )  # fmt: skip
            return tactic

        return run


def sharing(
    oracle: ModuleType, enum: Any, select: Callable[..., Any], config: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[type]:
    """The classes of vLLM for the layer that `select(*args, **kwargs)` is about, `auto`'s choice first, that can share its weights.

    config: the `FusedMoEConfig` among the arguments; it is not changed.
    """
    auto = copy.copy(config)
    auto.moe_backend = "auto"
    quiet, oracle.logger.disabled = oracle.logger.disabled, True  # it would say that it uses what it only would use
    try:
        chosen = select(
            *(auto if value is config else value for value in args), **{k: auto if v is config else v for k, v in kwargs.items()}
        )
    except (NotImplementedError, ValueError):
        chosen = (None, None)
    finally:
        oracle.logger.disabled = quiet
    keys = [
        *(value for value in args if value is not config),
        *(kwargs.get(name) for name in ("weight_key", "activation_key") if name in kwargs),
    ]
    weight_key, activation_key = (*keys, None, None)[:2]
    reads = ["TRITON", *([] if _rewrites_weights() else ["DEEPGEMM"]), *(["VLLM_CUTLASS"] if kwargs.get("allow_vllm_cutlass") else [])]
    shareable = [getattr(enum, name) for name in reads if hasattr(enum, name)]
    found = list[type]()
    if chosen[0] in shareable:
        found += [chosen[1]]
    elif chosen[1] is not None:
        say_once(
            f"vLLM's auto would run {chosen[1].__name__} here, which lays the experts' weights out anew: beside ours that would be a "
            f"second copy of {_weight_bytes(config, weight_key) / 2**20:.1f} MiB a layer, so it is no candidate"
        )
    for backend in shareable:
        for cls in oracle.backend_to_kernel_cls(backend):
            supported = cls.is_supported_config(cls, auto, weight_key, activation_key, cls.activation_format())[0]
            if supported and not cls.is_monolithic() and cls not in found:
                found.append(cls)
    return found


def versions() -> dict[str, str]:
    """What the results of these experts depend on."""
    return {"vllm": vllm.__version__}


def _rewrites_weights() -> bool:
    """With E8M0 scales DeepGEMM quantises the weights anew, in place: then nobody else may read them."""
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used, is_deep_gemm_supported

    return not is_deep_gemm_supported() or bool(is_deep_gemm_e8m0_used())


def _weight_bytes(config: Any, weight_key: Any) -> float:
    width = (2 if config.is_act_and_mul else 1) + 1
    size = config.in_dtype.itemsize if weight_key is None else weight_key.dtype.itemsize
    return float(config.num_local_experts * config.hidden_dim * config.intermediate_size_per_partition * width * size)
