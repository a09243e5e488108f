"""vLLM's view of our experts: one `MoEDistExperts` a MoE layer, which turns vLLM's words into a config and a weight pack.

Loaded by vLLM's worker alone, through `patch.py`. Shapes: T tokens, K slots, E local experts, H hidden, I local intermediate.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

import moe_dist as md
from moe_dist.serving import DTYPES, ServedModel, mode_of, untuned_layer
from moe_dist_vllm.native import VllmBackend

FP8 = torch.float8_e4m3fn
# Ways to bring a token to its expert's rank that hand us whole rows with global ids and want whole rows back.
ALL2ALL = ("allgather_reducescatter", "naive")

# torch.compile can't trace through data-dependent Python: it sees one opaque op, which finds its experts by number. They
# are numbered in the order of their layers, so that a compiled graph that was cached by another process still fits.
_NUMBERS = itertools.count()
_EARLIER = "_moe_dist_experts"
_EXPERTS: weakref.WeakValueDictionary[int, MoEDistExperts] = weakref.WeakValueDictionary()


_SCRATCH = list[int]()


@contextlib.contextmanager
def scratch_in_each_call(nbytes: int) -> Iterator[None]:
    """While it lasts every call of our experts takes `nbytes` of device memory for a moment, so that who measures the peak counts them."""
    _SCRATCH.append(nbytes)
    try:
        yield
    finally:
        _SCRATCH.pop()


class MoEDistExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """The experts of one layer. Runs the defaults on its own until `serve` gives it a place in a tuned model.

    natives: vLLM's own classes for this kind of layer that may run beside ours; set by `with_natives`, on a class of its own.
    """

    natives: ClassVar[tuple[type, ...]] = ()

    @classmethod
    def with_natives(cls, natives: Sequence[type]) -> type[MoEDistExperts]:
        return type(cls.__name__, (cls,), {"natives": tuple(natives)}) if natives else cls

    def __init__(self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None) -> None:
        super().__init__(moe_config, quant_config)
        self._weights: md.MoEWeightPack | None = None
        # Some methods of vLLM make new experts when weights are reloaded. The layer's config stays: what was tuned for it goes on serving,
        # and what was compiled for it finds them by the number of those before.
        before: MoEDistExperts | None = getattr(moe_config, _EARLIER, None)
        self._number: int = next(_NUMBERS) if before is None else before._number
        _EXPERTS[self._number] = self
        self._layer: md.MoELayer | None = None
        if before is not None and before._layer is not None:
            self._layer = md.MoELayer(tuner=before._layer.tuner, extra_backends=self.native(), **before._layer.config)
        setattr(moe_config, _EARLIER, self)

    # -- what vLLM asks before it chooses us --------------------------------------------------------------------------------

    @staticmethod
    def is_supported_config(
        cls: type, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        """Ours first: vLLM's own reasons name less."""
        reason = why_not(moe_config, weight_key, activation_key)
        if reason is not None:
            return False, f"moe_dist {reason}"
        supported: tuple[bool, str | None] = mk.FusedMoEExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        return supported

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True  # `why_not` asks our backends

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return _why_not_scheme(weight_key, activation_key) is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in _KINDS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return _why_not_parallel(moe_parallel_config) is None

    # -- one call ----------------------------------------------------------------------------------------------------------

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        if apply_router_weight_on_input:  # vLLM's prepare step has applied it to hidden_states
            topk_weights = torch.ones_like(topk_weights)
        call = (output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map)
        if torch.compiler.is_compiling():
            torch.ops.moe_dist_vllm.experts(*call, self._number)
        else:
            self.run(*call)

    def run(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        """Fill `output` [T, H] with the sum over this rank's experts. Weights that are new tensors (a reload) are bound anew."""
        weights = self._weights
        if weights is None or weights.w13.data_ptr() != w1.data_ptr() or weights.w2.data_ptr() != w2.data_ptr():
            weights = self._bind(w1, w2, expert_map)
        assert self._layer is not None
        acts = md.MoEActivationPack(
            hidden_states=hidden_states.contiguous(), topk_ids=topk_ids.contiguous(), topk_weights=topk_weights.float().contiguous()
        )
        self._layer((acts, weights), mode=mode_of(hidden_states), out=output)
        if _SCRATCH:
            torch.empty(_SCRATCH[-1], dtype=torch.uint8, device=output.device)

    def serve(
        self, model: ServedModel, name: str, w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None, max_num_tokens: int
    ) -> None:
        """Take this layer's place in `model`, which tunes it."""
        self._weights = self._pack(w1, w2, expert_map)
        self._layer = model.add(name, self.config(w1, max_num_tokens), self._weights, self.native())

    def native(self) -> tuple[md.Backend, ...]:
        """vLLM's own experts for this layer, where they can share its weights."""
        return (VllmBackend(self.natives, self.moe_config, self.quant_config),) if self.natives else ()

    # -- vLLM's words in ours ------------------------------------------------------------------------------------------------

    def config(self, w1: torch.Tensor, max_num_tokens: int) -> md.MoEConfig:
        quant_config = self.quant_config
        block = tuple(quant_config.block_shape) if quant_config.block_shape else None
        granularity = None
        if w1.dtype == FP8:
            granularity = "block" if block else "channel" if quant_config.w1_scale.numel() > w1.shape[0] else "tensor"
        quant = md.QuantConfig(
            dtype=DTYPES[self.moe_config.in_dtype],
            weight="fp8" if granularity else None,
            granularity=granularity,
            block_shape=block if granularity == "block" else None,
        )
        return _config(self.moe_config, quant, limit=quant_config.gemm1_clamp_limit, max_num_tokens=max_num_tokens)

    def _bind(self, w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None) -> md.MoEWeightPack:
        self._weights = self._pack(w1, w2, expert_map)
        if self._layer is None:
            self._layer = untuned_layer(self.config(w1, self.moe_config.max_num_tokens), w1.device, self.native())
        return self._weights

    def _pack(self, w1: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None) -> md.MoEWeightPack:
        quant = self.quant_config

        def scale(given: torch.Tensor | None) -> torch.Tensor | None:
            if given is None or w1.dtype != FP8:
                return None
            # vLLM keeps a channel's scale as [E, rows, 1] and a tensor's as [E, 1] or [E].
            return given if quant.block_shape else given.reshape(given.shape[0], -1).squeeze(1).contiguous()

        parallel = self.moe_config.moe_parallel_config
        return md.MoEWeightPack(
            w13=w1.detach(),
            w2=w2.detach(),
            w13_bias=quant.w1_bias,
            w2_bias=quant.w2_bias,
            w13_scale=scale(quant.w1_scale),
            w2_scale=scale(quant.w2_scale),
            ep_rank=parallel.ep_rank,
            tp_rank=parallel.tp_rank,
            expert_map=expert_map,
        )


def why_not(moe_config: Any, weight_key: Any, activation_key: Any) -> str | None:
    """Why no backend of ours can run this layer of vLLM's, to stand after "moe_dist"; None: one can."""
    reasons = (
        _why_not_parallel(moe_config.moe_parallel_config),
        None if moe_config.activation in _KINDS else f"has no activation {moe_config.activation.value!r}",
        None if moe_config.in_dtype in DTYPES else f"runs {', '.join(DTYPES.values())}, not {moe_config.in_dtype}",
        _why_not_scheme(weight_key, activation_key),
        "can't share out an expert's bias over TP ranks" if moe_config.has_bias and moe_config.moe_parallel_config.tp_size > 1 else None,
    )
    if (reason := next(filter(None, reasons), None)) is not None:
        return reason
    try:
        quant = md.QuantConfig(dtype=DTYPES[moe_config.in_dtype], **_weight_format(weight_key))
        config = _config(moe_config, quant, max_num_tokens=moe_config.max_num_tokens)
        explained = md.explain_backends(config, moe_config.device)
    except md.ConfigError as error:
        return f"can't describe this layer: {error}"
    if all(explained.values()):
        return "has no backend for this layer: " + "; ".join(f"{name}: {why}" for name, why in explained.items())
    return None


_KINDS = {
    MoEActivation.SILU: "swiglu",
    MoEActivation.GELU_TANH: "geglu",
    MoEActivation.SILU_NO_MUL: "silu",
    MoEActivation.GELU_TANH_NO_MUL: "gelu",
    MoEActivation.RELU2_NO_MUL: "relu2",
}


def _why_not_parallel(parallel: Any) -> str | None:
    if parallel.enable_eplb:
        return "keeps each expert where it was loaded, so it can't run with EPLB (--enable-eplb)"
    if parallel.use_all2all_kernels and parallel.all2all_backend not in ALL2ALL:
        return f"does not take the rows of --all2all-backend {parallel.all2all_backend}; choose {ALL2ALL[0]}"
    return None


def _why_not_scheme(weight_key: Any, activation_key: Any) -> str | None:
    if weight_key is None and activation_key is None:
        return None
    if weight_key is None or weight_key.dtype != FP8 or not weight_key.symmetric or weight_key.scale.dtype != torch.float32:
        return f"has no experts for {weight_key} weights"
    if activation_key is None or activation_key.scale.static:
        return "scales activations anew in each call, so it can't use a checkpoint's static activation scales"
    return None


def _weight_format(weight_key: Any) -> dict[str, Any]:
    if weight_key is None:
        return {}
    group = weight_key.scale.group_shape
    if group.row > 0 and group.col > 0:
        return {"weight": "fp8", "granularity": "block", "block_shape": (group.row, group.col)}
    return {"weight": "fp8", "granularity": "tensor" if group.row < 0 and group.col < 0 else "channel"}


def _config(moe_config: Any, quant: md.QuantConfig, *, limit: float | None = None, max_num_tokens: int) -> md.MoEConfig:
    """`FusedMoEConfig` as a `MoEConfig`: sizes as they were allocated, padding included; routing is vLLM's, so only its size counts."""
    parallel = moe_config.moe_parallel_config
    kind = _KINDS[moe_config.activation]
    limit = limit if limit is not None else moe_config.swiglu_limit
    activation = md.ActivationConfig(kind, limit=limit if kind == "swiglu" else None)
    return md.MoEConfig(
        routing=md.RoutingConfig(moe_config.num_experts, moe_config.experts_per_token),
        experts=md.ExpertConfig(
            hidden_size=moe_config.hidden_dim,
            intermediate_size=moe_config.intermediate_size_per_partition * parallel.tp_size,
            bias=moe_config.has_bias,
        ),
        quant=quant,
        activation=activation,
        parallel=md.ParallelConfig(tp_size=parallel.tp_size, ep_size=parallel.ep_size, uneven=bool(moe_config.num_experts % parallel.ep_size)),
        execution=md.ExecutionConfig(tune_max_num_tokens=max_num_tokens),
    )  # fmt: skip


@torch.library.custom_op(
    "moe_dist_vllm::experts",
    mutates_args=("output",),
    schema="(Tensor(a!) output, Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, int number) -> ()",
)
def _experts(*call: Any) -> None:
    """`MoEDistExperts.run` of the experts that have this number."""
    *tensors, number = call
    _EXPERTS[number].run(*tensors)


@_experts.register_fake
def _(*arguments: object) -> None:
    return None
