"""The MoE layer as an operation that can be tuned: candidates of all backends, probe inputs, poisoned outputs, truth.

Implements `tuning.problem.Operation`; knows no clock, store or rank. `layer.py`, the launcher and plugins make these.
Shapes: T tokens, K slots, E local experts, N routed experts, H hidden, I local intermediate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from moe_dist.backends.base import Backend, BoundLayer, MoEProblem, Runner
from moe_dist.backends.reference import compute
from moe_dist.backends.registry import get_backend, usable_backends
from moe_dist.checks import STORAGE, bind_weights, output_shape, scale_shape
from moe_dist.config import BackendOptions
from moe_dist.errors import ConfigError
from moe_dist.tensors import MoEActivationPack, MoEWeightPack
from moe_dist.tuning.probe import GuardedOutputs, draw_choices, seeded
from moe_dist.tuning.problem import Bucket, CompileAhead, ProbeSpec, Problem, Tactic, Workspace

TRUTH_ROWS = 16  # rows that are compared with the truth, over all input sets; the poison is looked for in every row
TOLERANCE = 2.0  # times the error of plain torch in the same format
FLOOR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-17}  # an error that rounding alone explains
# A call that reads so much leaves nothing of it in any L2 for the next, whatever its inputs: one input set is enough.
STREAMED_BYTES = 512 << 20
WEIGHT_SHIFT = 1021  # elements from one random expert to the next: prime, so that no two rows of two experts coincide


class MoEOperation:
    """One MoE problem on this rank's weights.

    options: the backends to consider, in order of preference; None: all but the reference. extra_backends: instances that
    the registry doesn't know, such as a framework's own experts.
    InputError: the weights don't fit. UnsupportedBackend: no backend can run this; carries every one's reason.
    """

    def __init__(
        self,
        problem: MoEProblem,
        weights: MoEWeightPack,
        device: torch.device,
        options: BackendOptions | None = None,
        extra_backends: Sequence[Backend] = (),
    ) -> None:
        self.moe_problem = problem
        self.problem: Problem = problem.key()
        self.device = device
        # Layouts that candidates make live as long as this operation, not as long as the caller's pack.
        own = dataclasses.replace(weights)
        own._prepared.update(weights._prepared)
        self.layer = bind_weights(problem, own)
        self._extra = tuple(extra_backends)
        self._backends = list(usable_backends(problem, device, options, self._extra))
        self._checksum: int | None = None

    def default(self, bucket: Bucket | None, mode: str) -> Tactic:
        return self._backends[0][0].default(self.moe_problem, bucket, self.device)

    def candidates(self, bucket: Bucket, mode: str) -> Iterable[Tactic]:
        for backend, params in self._backends:
            for tactic in backend.tactics(self.moe_problem, bucket, self.device, params):
                capturable = mode != "cuda_graph" or not backend.waits_for_host(tactic)
                if capturable and self.why_not(tactic, bucket) is None:
                    yield tactic

    def why_not(self, tactic: Tactic, bucket: Bucket) -> str | None:
        known = {backend.name: backend for backend, _ in self._backends}
        if tactic.backend not in known:
            return f"backend {tactic.backend!r} is not among those that run here: {', '.join(known)}"
        return known[tactic.backend].why_not_tactic(self.moe_problem, tactic, bucket, self.device)

    def workspace(self, tactic: Tactic, num_tokens: int) -> Workspace:
        return get_backend(tactic.backend, self._extra).workspace(self.moe_problem, tactic, num_tokens)

    def compile_ahead(self, tactics: Sequence[Tactic], how: CompileAhead) -> int:
        by_backend: dict[str, list[Tactic]] = {}
        for tactic in tactics:
            by_backend.setdefault(tactic.backend, []).append(tactic)
        return sum(get_backend(name, self._extra).compile_ahead(self.layer, own, how) for name, own in by_backend.items())

    def bind(self, tactic: Tactic) -> Runner:
        """A runner of `tactic` on this operation's weights."""
        return get_backend(tactic.backend, self._extra).bind(self.layer, tactic)

    def probe(self, num_tokens: int, spec: ProbeSpec) -> MoEProbe:
        try:
            return MoEProbe(self, num_tokens, spec)
        except RuntimeError as error:
            if "can't allocate memory" in str(error):  # torch's CPU allocator has no type for it
                raise MemoryError(str(error)) from error
            raise

    def weights_changed(self) -> bool:
        """Whether the weights differ from what they were when this was first asked."""
        sums = [part for tensor in (self.layer.weights.w13, self.layer.weights.w2) for part in _checksums(tensor)]
        now = int(torch.stack(sums).sum())  # one wait for the device
        if self._checksum is None:
            self._checksum = now
        return now != self._checksum


class MoERun:
    """One serving call of `tactic` on input set i; returns the tactic that was executed."""

    def __init__(self, tactic: Tactic, runner: Runner, inputs: Sequence[MoEActivationPack], outputs: Sequence[torch.Tensor]) -> None:
        self.tactic = tactic
        self._runner, self._inputs, self._outputs = runner, inputs, outputs

    def __call__(self, i: int) -> Tactic:
        return self._runner(self._inputs[i], self._outputs[i])


class MoEProbe:
    """Seeded inputs at one token count, outputs between guard bytes, and the truth for a sample of rows."""

    def __init__(self, operation: MoEOperation, num_tokens: int, spec: ProbeSpec) -> None:
        self.copies = spec.copies if _streamed_bytes(operation.layer, num_tokens) < STREAMED_BYTES else 1
        self._operation = operation
        problem, device = operation.moe_problem, operation.device
        self.inputs = [probe_inputs(problem, num_tokens, spec, copy, device) for copy in range(self.copies)]
        self._outputs = GuardedOutputs(output_shape(problem, num_tokens), problem.dtype, self.copies, device)
        self._sample_truth(num_tokens)
        operation.weights_changed()

    def _sample_truth(self, num_tokens: int) -> None:
        a_copy = max(1, min(num_tokens, TRUTH_ROWS // self.copies))
        self._rows = torch.linspace(0, num_tokens - 1, a_copy, device=self._operation.device).round().long()
        sampled = _sampled(self.inputs, self._rows)
        layer, problem = self._operation.layer, self._operation.moe_problem
        self._truth = compute(layer, sampled).flatten(1)
        yardstick = compute(layer, sampled, dtype=problem.dtype, quantise_rows=problem.config.quant.weight == "fp8").flatten(1)
        # Rows that only remote experts serve are zero: errors are relative to the typical row, not to each row.
        self._scale = float(self._truth.square().sum(1).mean().sqrt()) or 1.0
        error = self._error(yardstick.to(problem.dtype))
        # Plain torch may overflow in fp16 where the truth is finite; its error then allows nothing.
        self._limit = TOLERANCE * max(error if math.isfinite(error) else 0.0, FLOOR[problem.dtype])

    def _error(self, result: torch.Tensor) -> float:
        """The largest error of a row, relative to the truth's root mean square over rows."""
        return float((result.float() - self._truth).norm(dim=1).max()) / self._scale

    def bind(self, tactic: Tactic) -> MoERun:
        return MoERun(tactic, self._operation.bind(tactic), self.inputs, self._outputs.tensors)

    def check(self, run: Callable[[int], Tactic]) -> str | None:
        asked = getattr(run, "tactic", None)  # a caller may have wrapped what `bind` gave, in a captured graph for one
        self._outputs.poison()
        before = [{name: tensor.clone() for name, tensor in vars(acts).items() if tensor is not None} for acts in self.inputs]
        executed = [run(i) for i in range(self.copies)]
        changed = self._restore(before)  # the next candidate is judged by what this one was given
        for tactic in executed:
            if asked is not None and tactic != asked:
                return f"it executed {tactic} instead of {asked}"
        if (fault := changed or self._outputs.fault()) is not None:
            return fault
        if self._operation.weights_changed():
            return "the weights differ from what they were: it, or a tactic before it, wrote to them"
        error = self._error(torch.cat([output[self._rows].flatten(1) for output in self._outputs.tensors]))
        if not error <= self._limit:
            return f"its error is {error:.3g} of the result, above {self._limit:.3g}, {TOLERANCE:g} times that of plain torch"
        return None

    def _restore(self, before: Sequence[dict[str, torch.Tensor]]) -> str | None:
        """Make the inputs what they were; what was changed first, or None."""
        changed = None
        flags = [
            (getattr(acts, name) != tensor).any()
            for acts, tensors in zip(self.inputs, before, strict=True)
            for name, tensor in tensors.items()
        ]
        if not bool(torch.stack(flags).any()):  # one wait for the device, where nothing was changed
            return None
        for i, (acts, tensors) in enumerate(zip(self.inputs, before, strict=True)):
            for name, tensor in tensors.items():
                if not torch.equal(getattr(acts, name), tensor):
                    getattr(acts, name).copy_(tensor)
                    changed = changed or f"it changed {name} of input set {i}"
        return changed


def probe_inputs(problem: MoEProblem, num_tokens: int, spec: ProbeSpec, copy: int, device: torch.device) -> MoEActivationPack:
    """Input set `copy`: the same on every rank, so that each rank sees its own tokens and the remote slots between them.

    Ids are global, unique in a row and possible under the routing's groups. Without `problem.routed` they become logits
    that lead to just this choice, unless a correction bias spans more than the scores do.
    """
    config = problem.config
    routing = config.routing
    generator = seeded(spec, num_tokens, copy)
    # One block is drawn and shifted: drawing each of a large probe's elements takes longer than a call.
    drawn = torch.randn(min(num_tokens, 256), config.experts.hidden_size, generator=generator).to(problem.dtype).to(device)
    hidden_states = drawn.repeat(-(-num_tokens // max(1, len(drawn))), 1)[:num_tokens]
    groups = None if routing.n_group is None or routing.topk_group is None else (routing.n_group, routing.topk_group)
    chosen = draw_choices(spec, generator, num_tokens, routing.num_experts, routing.top_k, groups)
    if not problem.routed:
        jitter = 0.5 * torch.randn(num_tokens, routing.num_experts, generator=generator)
        logits = jitter.scatter_add(1, chosen, torch.full(chosen.shape, 8.0)) - 4.0
        return MoEActivationPack(hidden_states=hidden_states, router_logits=logits.to(device))
    weights = torch.rand(num_tokens, routing.top_k, generator=generator) + 0.1
    weights = weights / weights.sum(1, keepdim=True) * routing.routed_scaling_factor
    shared = torch.arange(routing.num_experts, routing.total_experts).expand(num_tokens, -1)
    return MoEActivationPack(
        hidden_states=hidden_states,
        topk_ids=torch.cat([chosen, shared], 1).int().to(device),
        topk_weights=torch.cat([weights, torch.ones(shared.shape)], 1).to(device),
    )


def _sampled(inputs: Sequence[MoEActivationPack], rows: torch.Tensor) -> MoEActivationPack:
    """The same `rows` of every input set, one after the other."""

    def take(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        return None if tensors[0] is None else torch.cat([tensor[rows] for tensor in tensors if tensor is not None])

    return MoEActivationPack(
        hidden_states=torch.cat([acts.hidden_states[rows] for acts in inputs]),
        router_logits=take([acts.router_logits for acts in inputs]),
        topk_ids=take([acts.topk_ids for acts in inputs]),
        topk_weights=take([acts.topk_weights for acts in inputs]),
    )


def _streamed_bytes(layer: BoundLayer, num_tokens: int) -> int:
    """Bytes of weights that a call of `num_tokens` reads at most."""
    weights = layer.weights
    hit = min(layer.num_local_experts, num_tokens * layer.problem.config.routing.slots)
    return hit * sum(weight[0].numel() * weight.element_size() for weight in (weights.w13, weights.w2))


def _checksums(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int64 whose sum differs when a byte does: of all whole words, and of the bytes behind them."""
    flat = tensor.detach().view(torch.uint8).flatten()
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    return words.sum(), flat[words.numel() * 8 :].sum(dtype=torch.int64)


def make_random_weights(
    problem: MoEProblem, ep_rank: int, tp_rank: int, device: torch.device, seed: int = 0, *, experts: Sequence[int] | None = None
) -> MoEWeightPack:
    """Weights of this rank's share as a trained model's might be: no two experts alike, results about as large as the inputs.

    experts: the global ids of the rows, where a map of the caller's own places them; None: `ParallelConfig` does.
    Made by drawing one expert and shifting it, since drawing every expert of a large model takes minutes on a CPU.
    ConfigError: 4-bit formats, whose scales belong to a backend.
    """
    config, share = problem.config, problem.local_experts(ep_rank) if experts is None else experts
    quant, hidden = config.quant, config.experts.hidden_size
    if quant.weight not in (None, "fp8", "int8"):
        raise ConfigError(f"random weights come in bf16, fp16, fp32, fp8 and int8, not {quant.weight}; load a checkpoint")
    generator = torch.Generator(device).manual_seed(seed * 1_009 + tp_rank)
    width = problem.local_intermediate * (2 if config.activation.gated else 1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        size, deviation = rows * columns, columns**-0.5
        block = draw(size + WEIGHT_SHIFT * config.routing.total_experts)
        if quant.weight is None:
            block, scale = (block * deviation).to(problem.dtype), None
        else:
            dtype = STORAGE[quant.weight][0][0]
            step = 100.0 if quant.weight == "fp8" else 30.0
            block = (block * step).clamp(-4 * step, 4 * step).to(dtype)
            shape = scale_shape(quant, len(share), rows, columns)
            scale = (torch.rand(shape, generator=generator, device=device) + 0.5) * (deviation / step)
        out = torch.empty(len(share), rows, columns, dtype=block.dtype, device=device)
        for row, expert in enumerate(share):
            out[row] = block[expert * WEIGHT_SHIFT : expert * WEIGHT_SHIFT + size].view(rows, columns)
        return out, scale

    w13, w13_scale = weight(width, hidden)
    w2, w2_scale = weight(hidden, problem.local_intermediate)
    bias = config.experts.bias
    return MoEWeightPack(
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_bias=draw(len(share), width).to(problem.dtype) if bias else None,
        w2_bias=draw(len(share), hidden).to(problem.dtype) if bias and tp_rank == 0 else None,
        correction_bias=0.1 * draw(config.routing.num_experts) if config.routing.correction_bias else None,
        ep_rank=ep_rank,
        tp_rank=tp_rank,
    )
