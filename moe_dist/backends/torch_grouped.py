"""Tokens sorted by expert, then grouped products over the sorted rows: one call of `grouped_mm`, or one product a segment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moe_dist.backends.base import TORCH_DTYPES, Backend, BoundLayer, MoEProblem, Runner
from moe_dist.backends.routing import select
from moe_dist.backends.torch_ops import activate, compute_dtypes, element_size, expert_product, finalize, torch_why_not
from moe_dist.config import BackendConfig
from moe_dist.errors import ConfigError
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.problem import Bucket, Tactic, Workspace

METHODS = ("grouped_mm", "segments")
ROW_ALIGNMENT = 16  # bytes; `grouped_mm` refuses other strides


@dataclasses.dataclass(frozen=True)
class TorchGroupedConfig(BackendConfig):
    """methods: which products to try: "grouped_mm" (torch's own), "segments" (one product an expert; waits for the host on a GPU)."""

    name = "torch_grouped"
    methods: tuple[str, ...] = METHODS

    def __post_init__(self) -> None:
        if not self.methods or not set(self.methods) <= set(METHODS):
            raise ConfigError(f"TorchGroupedConfig.methods is {self.methods!r}; choose some of {METHODS}")


class TorchGroupedBackend(Backend):
    name = "torch_grouped"
    config_type = TorchGroupedConfig

    def why_not(self, problem: MoEProblem, device: torch.device, params: BackendConfig) -> str | None:
        assert isinstance(params, TorchGroupedConfig)
        common = torch_why_not(problem, device, self.name)
        if common is not None or "segments" in params.methods:
            return common
        return _why_not_grouped_mm(problem, device)

    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: BackendConfig) -> Sequence[Tactic]:
        assert isinstance(params, TorchGroupedConfig)
        tactics = [
            Tactic.of(self.name, compute=compute, method=method) for method in params.methods for compute in compute_dtypes(problem, device)
        ]
        return [tactic for tactic in tactics if self.why_not_tactic(problem, tactic, bucket, device) is None]

    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        # grouped_mm never waits for the host, so a GPU can capture it; on a CPU it is a loop too and has no lead.
        method = "grouped_mm" if device.type != "cpu" and _why_not_grouped_mm(problem, device) is None else "segments"
        return Tactic.of(self.name, compute=compute_dtypes(problem, device)[0], method=method)

    def why_not_tactic(self, problem: MoEProblem, tactic: Tactic, bucket: Bucket | None, device: torch.device) -> str | None:
        params = dict(tactic.params)
        if params.keys() != {"compute", "method"} or params["method"] not in METHODS:
            return f"torch_grouped has no tactic {tactic}"
        if params["compute"] not in compute_dtypes(problem, device):
            return f"torch_grouped doesn't compute {problem.config.quant.dtype} in {params['compute']} on {device.type}"
        if params["method"] == "segments":
            return None
        if params["compute"] != problem.config.quant.dtype:
            return f"grouped_mm multiplies the weights as they are stored, in {problem.config.quant.dtype}, not in {params['compute']}"
        return _why_not_grouped_mm(problem, device)

    def waits_for_host(self, tactic: Tactic) -> bool:
        return tactic["method"] == "segments"

    def workspace(self, problem: MoEProblem, tactic: Tactic, num_tokens: int) -> Workspace:
        config = problem.config
        rows, size = num_tokens * config.routing.slots, element_size(str(tactic["compute"]))
        first = rows * (config.experts.hidden_size + 3 * problem.local_intermediate) * size
        return Workspace(first + 3 * rows * config.experts.hidden_size * size)

    def bind(self, layer: BoundLayer, tactic: Tactic) -> Runner:
        config = layer.problem.config
        product = _grouped_mm if tactic["method"] == "grouped_mm" else _segments
        compute, on_input = TORCH_DTYPES[str(tactic["compute"])], config.routing.weight_on_input
        experts = torch.arange(layer.num_local_experts, device=layer.weights.w13.device)

        def run(acts: MoEActivationPack, out: torch.Tensor) -> Tactic:
            rows_TK, weights_TK = select(layer, acts)
            tokens, slots = rows_TK.shape
            order, ends = sort_slots(rows_TK, experts)
            x = acts.hidden_states[order // slots]
            if on_input:
                x = x * weights_TK.flatten()[order, None]
            y_sorted = product(layer, x.to(compute), ends)
            finalize(unsorted(y_sorted, order).view(tokens, slots, y_sorted.shape[1]), rows_TK, None if on_input else weights_TK, out)
            return tactic

        return run


def sort_slots(rows_TK: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, ends) of `rows_TK`'s slots by expert, `experts` being 0, 1, ... E - 1: `order` int64 [T * K], expert e's slots lie from
    ends[e - 1] to ends[e] (int32 [E]). Remote slots come behind the last expert, where no product reads them."""
    rows = rows_TK.flatten()
    sorted_rows, order = rows.masked_fill(rows < 0, experts.shape[0]).sort(stable=True)
    return order, torch.searchsorted(sorted_rows, experts, right=True).int()


def unsorted(y_sorted: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The rows of `y_sorted` back in the order of the slots."""
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return y_sorted[place]


def _why_not_grouped_mm(problem: MoEProblem, device: torch.device) -> str | None:
    config = problem.config
    if config.quant.weight is not None:
        return f"grouped_mm has no product for {config.quant.weight} weights"
    if config.quant.dtype == "fp16":
        return "grouped_mm gives fp16 results, which overflow where the layer's result doesn't"
    if device.type == "cuda" and (config.quant.dtype != "bf16" or torch.cuda.get_device_capability(device) < (8, 0)):
        return (
            f"grouped_mm on a GPU needs bf16 and compute capability 8.0, not {config.quant.dtype} on {torch.cuda.get_device_name(device)}"
        )
    size = element_size(config.quant.dtype)
    for name, columns in (("hidden_size", config.experts.hidden_size), ("intermediate_size / tp_size", problem.local_intermediate)):
        if columns * size % ROW_ALIGNMENT:
            return f"grouped_mm needs rows of a multiple of {ROW_ALIGNMENT} bytes; {name} {columns} gives {columns * size}"
    return None


def _grouped_mm(layer: BoundLayer, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[rows, H] sorted by expert -> the same shape; rows behind the last end hold anything."""
    weights = layer.weights
    h = grouped_product(x, weights.w13, weights.w13_bias, ends)
    return grouped_product(activate(h, layer.problem.config.activation).to(x.dtype), weights.w2, weights.w2_bias, ends)


def grouped_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] sorted by expert times that expert's weight [E, out, columns], its bias [E, out] added: [rows, out]."""
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    if bias is None:
        return y
    place = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
    return y + bias[torch.searchsorted(ends, place, right=True).clamp_max(ends.shape[0] - 1)]


def _segments(layer: BoundLayer, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As `_grouped_mm`, one expert after the other; dequantises only the experts that have rows."""
    y = torch.zeros(x.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            y[start:end] = expert_product(layer, expert, x.dtype)(x[start:end])
        start = end
    return y
