"""All local experts on all tokens in batched products, then each token picks its slots: no sort, no gather of weights. For few experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moe_dist.backends.base import TORCH_DTYPES, Backend, BoundLayer, MoEProblem, Runner
from moe_dist.backends.routing import select
from moe_dist.backends.torch_ops import activate, compute_dtypes, element_size, finalize, torch_why_not
from moe_dist.config import BackendConfig
from moe_dist.errors import ConfigError
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.problem import Bucket, Tactic, Workspace

FORMS = ("wide", "batched")
SCRATCH_BYTES = 64 << 20  # tokens are cut so that the intermediate of all experts stays below this


@dataclasses.dataclass(frozen=True)
class TorchDenseConfig(BackendConfig):
    """max_experts: the most experts of one rank that this backend accepts, since its work grows with their number."""

    name = "torch_dense"
    max_experts: int = 64

    def __post_init__(self) -> None:
        if type(self.max_experts) is not int or self.max_experts < 1:
            raise ConfigError(f"TorchDenseConfig.max_experts is {self.max_experts!r}; it must be an integer of at least 1")


class TorchDenseBackend(Backend):
    name = "torch_dense"
    config_type = TorchDenseConfig

    def why_not(self, problem: MoEProblem, device: torch.device, params: BackendConfig) -> str | None:
        assert isinstance(params, TorchDenseConfig)
        experts = _most_local_experts(problem)
        if experts > params.max_experts:
            return f"torch_dense runs every token through all {experts} experts of a rank; its limit is {params.max_experts}: use torch_grouped"
        if problem.config.quant.weight is not None:
            return f"torch_dense has no batched product for {problem.config.quant.weight} weights"
        return torch_why_not(problem, device, self.name)

    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: BackendConfig) -> Sequence[Tactic]:
        if bucket.low > 1 and bucket.high * problem.config.routing.slots > 4 * _most_local_experts(problem):
            return ()  # most experts have several rows by now: computing all rows of all experts can't win
        return [Tactic.of(self.name, compute=compute_dtypes(problem, device)[0], form=form) for form in FORMS]

    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        return Tactic.of(self.name, compute=compute_dtypes(problem, device)[0], form=FORMS[0])

    def why_not_tactic(self, problem: MoEProblem, tactic: Tactic, bucket: Bucket | None, device: torch.device) -> str | None:
        params = dict(tactic.params)
        if params.keys() != {"compute", "form"} or params["form"] not in FORMS or params["compute"] not in compute_dtypes(problem, device):
            return f"torch_dense has no tactic {tactic} for {problem.config.quant.dtype} on {device.type}"
        return None

    def workspace(self, problem: MoEProblem, tactic: Tactic, num_tokens: int) -> Workspace:
        config, compute = problem.config, str(tactic["compute"])
        tokens, size = min(num_tokens, _chunk_tokens(problem, compute)), element_size(compute)
        rows = tokens * _most_local_experts(problem)
        kept = (
            0
            if compute == config.quant.dtype
            else _most_local_experts(problem) * 3 * problem.local_intermediate * config.experts.hidden_size
        )
        return Workspace(rows * (3 * problem.local_intermediate + config.experts.hidden_size) * size + kept * size)

    def bind(self, layer: BoundLayer, tactic: Tactic) -> Runner:
        weights, config = layer.weights, layer.problem.config
        compute, wide = TORCH_DTYPES[str(tactic["compute"])], tactic["form"] == "wide"
        chunk, on_input = _chunk_tokens(layer.problem, str(tactic["compute"])), config.routing.weight_on_input

        def all_experts(x_TH: torch.Tensor) -> torch.Tensor:
            """[E, T, H]: every expert's result for every token."""
            w13, w2 = weights.w13.to(compute), weights.w2.to(compute)
            experts, width, hidden = w13.shape
            if wide:
                h = F.linear(x_TH, w13.view(experts * width, hidden)).view(-1, experts, width).transpose(0, 1)
            else:
                h = torch.bmm(x_TH.expand(experts, -1, -1), w13.transpose(1, 2))
            if weights.w13_bias is not None:
                h = h + weights.w13_bias.to(compute)[:, None]
            y = torch.bmm(activate(h, config.activation).to(compute), w2.transpose(1, 2))
            return y if weights.w2_bias is None else y + weights.w2_bias.to(compute)[:, None]

        def run(acts: MoEActivationPack, out: torch.Tensor) -> Tactic:
            rows_TK, weights_TK = select(layer, acts)
            for start in range(0, rows_TK.shape[0], chunk):
                part = slice(start, start + chunk)
                rows, scores = rows_TK[part], weights_TK[part]
                x = acts.hidden_states[part]
                if on_input:
                    x = x * scores  # top_k is 1: a token has one weight for all experts
                tokens = torch.arange(rows.shape[0], device=rows.device)[:, None]
                y_TKH = all_experts(x.to(compute))[rows.clamp_min(0), tokens]
                finalize(y_TKH, rows, None if on_input else scores, out[part])
            return tactic

        return run


def _most_local_experts(problem: MoEProblem) -> int:
    """Experts of the fullest rank: the same number on every rank, so all decide alike."""
    return len(problem.local_experts(0))


def _chunk_tokens(problem: MoEProblem, compute: str) -> int:
    config = problem.config
    row = (3 * problem.local_intermediate + config.experts.hidden_size) * element_size(compute)
    return max(1, SCRATCH_BYTES // (row * _most_local_experts(problem)))
