"""What the tensors of a call must be like. Every rule that `MoEActivationPack` and `MoEWeightPack` document is enforced here, once.

`layer.py` and `operation.py` call this before anything is launched: weights when they are bound, activations at each call.
Nothing here waits for a GPU but `check_ids` and `check_expert_map`.
"""

from __future__ import annotations

import torch

from moe_dist.backends.base import BoundLayer, MoEProblem
from moe_dist.config import QuantConfig
from moe_dist.errors import InputError
from moe_dist.tensors import MoEActivationPack, MoEWeightPack

# Storage of a weight format: its dtypes, and how many values one element holds.
STORAGE: dict[str, tuple[tuple[torch.dtype, ...], int]] = {
    "fp8": ((torch.float8_e4m3fn,), 1),
    "int8": ((torch.int8,), 1),
    "mxfp4": ((torch.uint8,), 2),
    "nvfp4": ((torch.uint8,), 2),
}


def bind_weights(problem: MoEProblem, weights: MoEWeightPack) -> BoundLayer:
    """Check `weights` against `problem` and settle which row holds which expert. InputError: they don't fit."""
    config = problem.config
    parallel, routing, hidden = config.parallel, config.routing, config.experts.hidden_size
    for name, rank, size in (("ep_rank", weights.ep_rank, parallel.ep_size), ("tp_rank", weights.tp_rank, parallel.tp_size)):
        if not 0 <= rank < size:
            raise InputError(f"MoEWeightPack.{name} is {rank}, but ParallelConfig has {size} such ranks; give 0 to {size - 1}")
    device = weights.w13.device
    if weights.expert_map is None:
        experts = len(problem.local_experts(weights.ep_rank))
    else:
        if weights.w13.dim() != 3:
            raise InputError(f"w13 has shape {list(weights.w13.shape)}; it must be [experts, rows, columns]")
        experts = weights.w13.shape[0]
    width = problem.local_intermediate * (2 if config.activation.gated else 1)
    dtypes, packing = ((problem.dtype,), 1) if config.quant.weight is None else STORAGE[config.quant.weight]
    for name, weight, rows, columns in (
        ("w13", weights.w13, width, hidden),
        ("w2", weights.w2, hidden, problem.local_intermediate),
    ):
        if columns % packing:
            raise InputError(f"{name} has {columns} columns, which {config.quant.weight} can't pack by {packing}; pad them")
        _tensor(name, weight, (experts, rows, columns // packing), dtypes, device)
        _scale(f"{name}_scale", getattr(weights, f"{name}_scale"), config.quant, (experts, rows, columns), device)
        bias = getattr(weights, f"{name}_bias")
        if bias is not None and not config.experts.bias:
            raise InputError(f"{name}_bias is given, but ExpertConfig.bias is False; set it, or leave the bias away")
        if bias is not None:
            _tensor(f"{name}_bias", bias, (experts, rows), (problem.dtype, torch.float32), device)
        elif config.experts.bias and (name == "w13" or weights.tp_rank == 0):  # w2's bias is added once, by TP rank 0 or in shares
            raise InputError(f"{name}_bias is missing, but ExpertConfig.bias is True; give [{experts}, {rows}] in {config.quant.dtype}")
    if not problem.routed and routing.correction_bias is not None:
        if weights.correction_bias is None:
            raise InputError(
                f"correction_bias is missing, but RoutingConfig.correction_bias is {routing.correction_bias!r}; "
                f"give fp32 [{routing.num_experts}], or routed topk_ids"
            )
        _tensor("correction_bias", weights.correction_bias, (routing.num_experts,), (torch.float32,), device)
    if weights.correction_bias is not None and routing.correction_bias is None:
        raise InputError(
            "correction_bias is given, but RoutingConfig.correction_bias is None; set it to 'selection', or leave the bias away"
        )
    return BoundLayer(problem, weights, _expert_map(problem, weights, experts, device))


def _tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}; this config and rank need {list(shape)}")
    if tensor.dtype not in dtypes:
        raise InputError(f"{name} is {tensor.dtype}; this config needs {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise InputError(f"{name} is on {tensor.device}, the weights are on {device}; move them to one device")
    if not tensor.is_contiguous():
        raise InputError(f"{name} has strides {list(tensor.stride())}; it must be contiguous: call .contiguous() once, before serving")


def _scale(name: str, scale: torch.Tensor | None, quant: QuantConfig, weight: tuple[int, int, int], device: torch.device) -> None:
    if quant.weight is None:
        if scale is not None:
            raise InputError(f"{name} is given, but QuantConfig.weight is None; name the weights' format, or leave the scale away")
        return
    shape = scale_shape(quant, *weight)
    if scale is None:
        raise InputError(f"{name} is missing, but QuantConfig.weight is {quant.weight!r} by {quant.granularity}; give {list(shape)}")
    # The 4-bit formats bring scales of their own formats; their backends check those.
    _tensor(name, scale, shape, (torch.float32,) if quant.weight in ("fp8", "int8") else (scale.dtype,), device)


def scale_shape(quant: QuantConfig, experts: int, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of the scales of a weight [experts, rows, columns]; a partial last block has a scale of its own."""
    if quant.granularity == "tensor":
        return (experts,)
    if quant.granularity == "channel":
        return (experts, rows)
    assert quant.block_shape is not None
    return (experts, -(-rows // quant.block_shape[0]), -(-columns // quant.block_shape[1]))


def output_shape(problem: MoEProblem, num_tokens: int) -> tuple[int, ...]:
    """[T, H], or [T, K, H] without finalize."""
    hidden = problem.config.experts.hidden_size
    return (num_tokens, hidden) if problem.config.execution.do_finalize else (num_tokens, problem.config.routing.slots, hidden)


def _expert_map(problem: MoEProblem, weights: MoEWeightPack, experts: int, device: torch.device) -> torch.Tensor | None:
    total = problem.config.routing.total_experts
    given = weights.expert_map
    if given is not None:
        _tensor("expert_map", given, (total,), (torch.int32,), device)
        return given
    parallel = problem.config.parallel
    if parallel.ep_size == 1:
        return None

    def derive(pack: MoEWeightPack) -> torch.Tensor:
        expert_map = torch.full((total,), -1, dtype=torch.int32)
        expert_map[list(problem.local_experts(pack.ep_rank))] = torch.arange(experts, dtype=torch.int32)
        return expert_map.to(device)

    # Kept with the pack: a copy to the GPU at each call would wait for it, and fail under graph capture.
    kept: torch.Tensor = weights.prepare_for(f"expert_map {parallel.placement} {weights.ep_rank}/{parallel.ep_size} {total}", derive)
    return kept


def check_expert_map(layer: BoundLayer) -> None:
    """InputError: the map names a row that the weights lack. Waits for the device."""
    if layer.expert_map is None:
        return
    low, high, experts = int(layer.expert_map.min()), int(layer.expert_map.max()), layer.num_local_experts
    if low < -1 or high >= experts:
        raise InputError(f"expert_map holds rows {low} to {high}; this rank has rows 0 to {experts - 1}, and -1 for remote experts")


def check_activations(problem: MoEProblem, acts: MoEActivationPack, device: torch.device) -> int:
    """The number of tokens of `acts`. InputError: they don't fit `problem`, or lie on another device than the weights."""
    config = problem.config
    hidden_states = acts.hidden_states
    shape = hidden_states.shape
    if len(shape) != 2 or shape[1] != config.experts.hidden_size:
        raise InputError(f"hidden_states has shape {list(shape)}; this config needs [tokens, {config.experts.hidden_size}]")
    tokens = shape[0]
    _activation("hidden_states", hidden_states, shape, (problem.dtype,), device)
    if not problem.routed:
        logits = acts.router_logits
        assert logits is not None
        if acts.topk_ids is not None or acts.topk_weights is not None:
            raise InputError("router_logits and topk_ids or topk_weights are given; give the logits, or both of the others")
        _activation("router_logits", logits, (tokens, config.routing.num_experts), (torch.float32, torch.bfloat16, torch.float16), device)
    else:
        if acts.topk_ids is None or acts.topk_weights is None:
            missing = "topk_ids" if acts.topk_ids is None else "topk_weights"
            raise InputError(f"{missing} is missing; give router_logits, or both topk_ids and topk_weights")
        slots = (tokens, config.routing.slots)
        _activation("topk_ids", acts.topk_ids, slots, (torch.int32, torch.int64), device)
        _activation("topk_weights", acts.topk_weights, slots, (torch.float32,), device)
    return tokens


def _activation(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    # One cheap condition on the path of every call; the slow one below only finds the words.
    if tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device and tensor.is_contiguous():
        return
    _tensor(name, tensor, tuple(shape), dtypes, device)


def check_ids(problem: MoEProblem, acts: MoEActivationPack) -> None:
    """InputError: a topk_id is neither -1 nor an expert of the model. Waits for the device."""
    ids, total = acts.topk_ids, problem.config.routing.total_experts
    if ids is None or not ids.numel():
        return
    low, high = ids.min().item(), ids.max().item()
    if low < -1 or high >= total:
        bad = low if low < -1 else high
        raise InputError(f"topk_ids holds {bad}; ids are global, 0 to {total - 1}, and -1 for an empty slot")


def check_out(problem: MoEProblem, out: torch.Tensor, acts: MoEActivationPack) -> None:
    """InputError: `out` can't take the result of `acts`."""
    tokens = acts.hidden_states.shape[0]
    _activation("out", out, output_shape(problem, tokens), (problem.dtype,), acts.hidden_states.device)
    if out.data_ptr() == acts.hidden_states.data_ptr() and tokens:
        raise InputError("out is hidden_states; to overwrite them set ExecutionConfig.output='in_place' and leave out= away")
