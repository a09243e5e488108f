"""Expert by expert: gather its tokens, multiply, add into the result. Least memory, and the only torch backend that never sorts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from moe_dist.backends.base import TORCH_DTYPES, Backend, BoundLayer, MoEProblem, Runner
from moe_dist.backends.routing import select
from moe_dist.backends.torch_ops import compute_dtypes, element_size, expert_product, torch_why_not
from moe_dist.config import BackendConfig
from moe_dist.errors import ConfigError
from moe_dist.tensors import MoEActivationPack
from moe_dist.tuning.problem import Bucket, Tactic, Workspace


@dataclasses.dataclass(frozen=True)
class TorchLoopConfig(BackendConfig):
    """chunk_rows: the bounds to try on the rows of one product; a chunk's intermediate then stays in cache. 0: no bound."""

    name = "torch_loop"
    chunk_rows: tuple[int, ...] = (0, 64)

    def __post_init__(self) -> None:
        if not self.chunk_rows or any(type(rows) is not int or rows < 0 for rows in self.chunk_rows):
            raise ConfigError(f"TorchLoopConfig.chunk_rows is {self.chunk_rows!r}; give row counts of at least 1, or 0 for no bound")


class TorchLoopBackend(Backend):
    name = "torch_loop"
    config_type = TorchLoopConfig

    def why_not(self, problem: MoEProblem, device: torch.device, params: BackendConfig) -> str | None:
        if problem.config.execution.deterministic and device.type != "cpu":
            return "torch_loop adds rows by atomics on a GPU, so deterministic can't be promised"
        return torch_why_not(problem, device, self.name)

    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: BackendConfig) -> Sequence[Tactic]:
        assert isinstance(params, TorchLoopConfig)
        return [
            Tactic.of(self.name, chunk_rows=rows, compute=compute)
            for compute in compute_dtypes(problem, device)
            for rows in params.chunk_rows
            if rows < bucket.high  # an expert gets at most one row a token (ids twice in a row aside): a wider bound changes nothing
        ]

    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        return Tactic.of(self.name, chunk_rows=0, compute=compute_dtypes(problem, device)[0])

    def why_not_tactic(self, problem: MoEProblem, tactic: Tactic, bucket: Bucket | None, device: torch.device) -> str | None:
        params = dict(tactic.params)
        chunk, compute = params.get("chunk_rows"), params.get("compute")
        if params.keys() != {"chunk_rows", "compute"} or type(chunk) is not int or chunk < 0:
            return f"torch_loop has no tactic {tactic}"
        if compute not in compute_dtypes(problem, device):
            return f"torch_loop doesn't compute {problem.config.quant.dtype} in {compute} on {device.type}"
        return None

    def waits_for_host(self, tactic: Tactic) -> bool:
        return True  # it asks how many rows each expert has

    def workspace(self, problem: MoEProblem, tactic: Tactic, num_tokens: int) -> Workspace:
        config = problem.config
        hidden, wide = config.experts.hidden_size, 3 * problem.local_intermediate + config.experts.hidden_size
        rows = num_tokens * config.routing.slots
        chunk = min(rows, int(str(tactic["chunk_rows"])) or rows)
        sums = (num_tokens if config.execution.do_finalize else rows) * hidden * 4
        return Workspace(sums + chunk * (wide * element_size(str(tactic["compute"])) + hidden * 4))

    def bind(self, layer: BoundLayer, tactic: Tactic) -> Runner:
        config = layer.problem.config
        compute, chunk_rows = TORCH_DTYPES[str(tactic["compute"])], int(str(tactic["chunk_rows"]))
        on_input, finalizes = config.routing.weight_on_input, config.execution.do_finalize

        def run(acts: MoEActivationPack, out: torch.Tensor) -> Tactic:
            rows_TK, weights_TK = select(layer, acts)
            rows, weights, slots = rows_TK.flatten(), weights_TK.flatten()[:, None], rows_TK.shape[1]
            sums = torch.zeros(out.numel() // out.shape[-1], out.shape[-1], dtype=torch.float32, device=out.device)
            for expert in torch.unique(rows).tolist():
                if expert < 0:
                    continue
                product = expert_product(layer, expert, compute)
                places = (rows == expert).nonzero().squeeze(1)
                for place in torch.split(places, chunk_rows) if chunk_rows else (places,):
                    token, weight = place // slots, weights[place]
                    x = acts.hidden_states[token]
                    y = product(x * weight).float() if on_input else product(x).float() * weight
                    sums.index_add_(0, token if finalizes else place, y)
            out.copy_(sums.view(out.shape))
            return tactic

        return run
