"""What a backend is: one file each, registered once in `registry.py`; everything else is derived from that.

A backend runs the experts of one MoE problem. It knows tactics and weights, not timing, stores or ranks. `layer.py` and
`operation.py` call it; it may import config, tensors, errors and tuning.problem.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from moe_dist.config import BackendConfig, MoEConfig
from moe_dist.tensors import MoEActivationPack, MoEWeightPack
from moe_dist.tuning.problem import Bucket, BucketLadder, CompileAhead, Problem, Tactic, Workspace

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# run(acts, out): fills `out` ([T, H], or [T, K, H] without finalize) and returns the tactic that was really executed.
Runner = Callable[[MoEActivationPack, torch.Tensor], Tactic]


@dataclasses.dataclass(frozen=True)
class MoEProblem:
    """A MoE layer's work except the token count. routed: calls bring topk_ids and topk_weights instead of router_logits.

    `config` has no backends, and `tune_max_num_tokens` is not part of the key: both say what to try, not what to compute.
    """

    config: MoEConfig
    routed: bool

    @classmethod
    def of(cls, config: MoEConfig, *, routed: bool) -> MoEProblem:
        return cls(dataclasses.replace(config, backends=None), routed)

    def key(self) -> Problem:
        """The problem as the tuner keys it."""
        fields = self.config.to_dict()
        fields["execution"] = {name: value for name, value in fields["execution"].items() if name not in ("tune_max_num_tokens", "output")}
        return Problem.of("moe_layer", routed=self.routed, **fields)

    @property
    def ladder(self) -> BucketLadder:
        """The buckets of a layer whose tuner has no ladder of its own."""
        return BucketLadder.powers_of_two(self.config.execution.tune_max_num_tokens)

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.config.quant.dtype]

    @property
    def local_intermediate(self) -> int:
        """Columns of an expert that one TP rank holds."""
        return self.config.experts.intermediate_size // self.config.parallel.tp_size

    def local_experts(self, ep_rank: int) -> tuple[int, ...]:
        """The global ids that EP rank `ep_rank` holds, in the order of its weight rows."""
        routing, parallel = self.config.routing, self.config.parallel
        if parallel.ep_size == 1:
            return tuple(range(routing.total_experts))
        if parallel.placement == "round_robin":
            return tuple(range(ep_rank, routing.num_experts, parallel.ep_size))
        share, extra = divmod(routing.num_experts, parallel.ep_size)
        start = ep_rank * share + min(ep_rank, extra)
        return tuple(range(start, start + share + (ep_rank < extra)))


@dataclasses.dataclass(frozen=True)
class BoundLayer:
    """What a tactic is bound to: a problem and this rank's checked weights.

    expert_map: int32 [total experts] on the weights' device, global id -> local row or -1; None: id is row.
    """

    problem: MoEProblem
    weights: MoEWeightPack
    expert_map: torch.Tensor | None

    @property
    def num_local_experts(self) -> int:
        return self.weights.w13.shape[0]


class Backend(abc.ABC):
    """One way to run the experts. Instances hold no state; all methods but `bind` and `prepare` are pure."""

    name: ClassVar[str]
    config_type: ClassVar[type[BackendConfig]]

    @abc.abstractmethod
    def why_not(self, problem: MoEProblem, device: torch.device, params: BackendConfig) -> str | None:
        """Why this backend can't run `problem` on `device` at all, in the user's words; None: it can. Launches nothing."""

    @abc.abstractmethod
    def tactics(self, problem: MoEProblem, bucket: Bucket, device: torch.device, params: BackendConfig) -> Sequence[Tactic]:
        """The tactics worth timing for `bucket`."""

    @abc.abstractmethod
    def default(self, problem: MoEProblem, bucket: Bucket | None, device: torch.device) -> Tactic:
        """The tactic that runs untuned; `bucket` None: a token count beyond the ladder. Pure, and valid for any count."""

    def why_not_tactic(self, problem: MoEProblem, tactic: Tactic, bucket: Bucket | None, device: torch.device) -> str | None:
        """Why `tactic` (perhaps read from a store) can't serve every token count of `bucket` (None: any count); None: it can.

        Each validity rule is stated once, here; `tactics` filters by it.
        """
        known = set(self.tactics(problem, bucket or Bucket(1, 1), device, self.config_type()))
        return None if tactic in known or tactic == self.default(problem, bucket, device) else f"{self.name} has no tactic {tactic}"

    def waits_for_host(self, tactic: Tactic) -> bool:
        """Whether a call on a GPU reads results on the host: it can't be captured then, and is no candidate for `cuda_graph`."""
        return False

    def workspace(self, problem: MoEProblem, tactic: Tactic, num_tokens: int) -> Workspace:
        """Scratch of one call; the default says none."""
        return Workspace()

    def prepare(self, weights: MoEWeightPack) -> Any:
        """The weight layout that this backend needs, kept by `MoEWeightPack.prepare_for`; the checkpoint's own by default."""
        return weights

    def compile_ahead(self, layer: BoundLayer, tactics: Sequence[Tactic], how: CompileAhead) -> int:
        """Compile what `tactics` will launch, so that their first calls find it; how many kernels that were. The default has none.

        What fails to compile is left to `bind` and the first call, which say why.
        """
        return 0

    @abc.abstractmethod
    def bind(self, layer: BoundLayer, tactic: Tactic) -> Runner:
        """A runner for calls of any token count that `tactic` is valid for. May compile."""
