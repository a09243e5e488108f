"""The unified layer: the stateless function `moe_layer`, and `MoELayer`, which serves a tuner's winners.

Owns the path of a serving call: checks, the index from token count to tactic, the output's contract. Measures, stores
and agrees on nothing. Plugins, cli and bench import this.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Required, TypedDict, Unpack, cast

import torch

from moe_dist import trace
from moe_dist.backends.base import Backend, BoundLayer, MoEProblem, Runner
from moe_dist.backends.registry import usable_backends
from moe_dist.checks import bind_weights, check_activations, check_expert_map, check_ids, check_out, output_shape
from moe_dist.config import (
    ActivationConfig,
    BackendConfig,
    BackendOptions,
    ExecutionConfig,
    ExpertConfig,
    MoEConfig,
    ParallelConfig,
    QuantConfig,
    RoutingConfig,
)
from moe_dist.errors import GroupError, InputError, TunerStateError, UnsupportedBackend
from moe_dist.operation import MoEOperation
from moe_dist.tensors import MoEActivationPack, MoEWeightPack
from moe_dist.tuning.context import current_tuner
from moe_dist.tuning.pass_terms import Limits
from moe_dist.tuning.pins import Pins
from moe_dist.tuning.problem import MODES, Bucket, Cell, Epoch, Tactic, modes_on
from moe_dist.tuning.tuner import Tuner

logger = logging.getLogger(__name__)

MoETensors = tuple[MoEActivationPack, MoEWeightPack]


class ConfigFields(TypedDict, total=False):
    """What `MoEConfig` takes and `**config` unpacks."""

    routing: Required[RoutingConfig]
    experts: Required[ExpertConfig]
    quant: QuantConfig
    activation: ActivationConfig
    backends: BackendOptions | BackendConfig | None
    parallel: ParallelConfig
    execution: ExecutionConfig


def moe_layer(
    tensors: MoETensors,
    *,
    out: torch.Tensor | None = None,
    extra_backends: Sequence[Backend] = (),
    **fields: Unpack[ConfigFields],
) -> torch.Tensor:
    """Run one MoE layer on this rank's share by the priority table; never measures, keeps nothing between calls.

    tensors: (activations, weights), see the packs. Returns [T, H] in the config's dtype: the sum over this rank's experts
    (a partial sum under EP or TP, left to the caller to reduce), or [T, K, H] with do_finalize=False. out: takes the result.
    Inside `autotune` the problem is recorded, once, and the default runs.
    InputError: tensors don't fit the config. UnsupportedBackend: no backend can run this; carries every one's reason.
    """
    config = MoEConfig(**fields)
    acts, weights = tensors
    problem = MoEProblem.of(config, routed=acts.router_logits is None)
    layer = bind_weights(problem, weights)
    num_tokens = _check_call(layer, acts)
    device = weights.w13.device
    if device.type == "cpu" and not _capturing(device):
        check_expert_map(layer)
    backend, _ = next(usable_backends(problem, device, config.options, extra_backends))
    tuner = current_tuner()
    if tuner is not None and not _capturing(device):
        _check_values(layer, acts)
        tuner.record(MoEOperation(problem, weights, device, config.options, extra_backends))
    bucket = problem.ladder.bucket(max(1, num_tokens))
    runner = _make_runner(backend, layer, backend.default(problem, bucket, device))
    return _execute(problem, runner, acts, num_tokens, out)


class MoELayer:
    """One layer's configs, bound to a tuner's winners. Takes what `MoEConfig` unpacks.

    group: the ranks that run this layer in lock step, handed to the tuner that `get_tuned_layer` makes when it is given
    none. tuner: whose epoch to serve from; None: the defaults run. extra_backends: instances that the registry doesn't know.

    The binding of the last weight pack is kept: use one MoELayer per layer of a model. A call that finds the epoch
    replaced builds its index anew, except under graph capture, which finishes with the epoch that it began with. As long as a
    captured graph lives, the tuner takes no other epoch, and what the graph reads stays alive with this layer or its tuner.
    """

    def __init__(
        self,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        tuner: Tuner | None = None,
        extra_backends: Sequence[Backend] = (),
        **fields: Unpack[ConfigFields],
    ) -> None:
        self.config = MoEConfig(**fields)
        self.group = group
        self.tuner = tuner
        self.extra_backends = tuple(extra_backends)
        self._indexes: dict[bool, ServingIndex] = {}  # of routed calls, and of those with router logits
        self._last_routed = False
        self._pins = [Pins()]  # of graphs that were captured without a tuner, and with each tuner so far
        self._beyond_reported = False

    def get_tuned_layer(self, tensors: MoETensors, tuner: Tuner | None = None) -> MoELayer:
        """A layer of the same configs that serves a tuner's winners, bound to `tensors`' weights.

        tuner: whose epoch to serve from, else this layer's own, else that of the `autotune` block around the call: a problem
        that its epoch lacks is recorded for its next pass. With none of these a pass runs now, over this layer's group, for the
        bucket of these tensors, and keeps its results in memory.
        InputError: the tensors don't fit, ids included, or are more tokens than the ladder has. Whatever `Tuner.run_pass` raises.
        """
        acts, weights = tensors
        tuner = tuner or self.tuner or current_tuner()
        problem = MoEProblem.of(self.config, routed=acts.router_logits is None)
        device, fields = weights.w13.device, cast(ConfigFields, dict(**self.config))
        operation = MoEOperation(problem, weights, device, self.config.options, self.extra_backends)
        num_tokens = _check_call(operation.layer, acts)
        _check_values(operation.layer, acts)
        if tuner is None:
            ladder = problem.ladder
            bucket = ladder.bucket(max(1, num_tokens))
            if bucket is None:
                raise InputError(
                    f"{num_tokens} tokens exceed ExecutionConfig.tune_max_num_tokens {ladder.max_num_tokens}; raise it, or tune with fewer"
                )
            with Tuner(group=self.group, ladder=ladder, device=device) as tuner:
                tuner.record(operation)
                tuner.run_pass([bucket])
        elif not any(tuner.epoch.of(operation.problem, mode) for mode in MODES):
            tuner.record(operation)
        tuned = MoELayer(group=self.group, tuner=tuner, extra_backends=self.extra_backends, **fields)
        tuned._last_routed = problem.routed
        tuned._bind(weights, problem.routed)
        return tuned

    def __call__(
        self, tensors: MoETensors, *, mode: str = "eager", group_tokens: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `moe_layer`, with the tactic that the epoch holds for `mode` and this token count.

        mode: how the caller executes this call, "eager" or "cuda_graph". group_tokens: a token count that the caller
        guarantees equal on all ranks; without it, or once the tuner's group is dead, no collective tactic is eligible.
        A GroupError out of a collective tactic: a peer did not come; the group is then dead.
        """
        acts, weights = tensors
        routed = acts.router_logits is None
        index = self._index_for(weights, routed)
        self._last_routed = routed
        num_tokens = _check_call(index.layer, acts)
        if group_tokens is not None and self.tuner is not None and self.tuner.group.dead:
            group_tokens = None  # nobody is sure to answer: what needs no peer runs
        bound = index.pick(num_tokens, mode, group_tokens)
        if index.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._pin(index)
        if num_tokens > index.max_num_tokens and not self._beyond_reported and self.tuner is not None:
            self._beyond_reported = True
            logger.warning(
                "%d tokens exceed the largest tuned count %d: the default %s runs; raise ExecutionConfig.tune_max_num_tokens and tune again",
                num_tokens,
                index.max_num_tokens,
                bound.tactic,
            )
        try:
            return _execute(index.layer.problem, bound.runner, acts, num_tokens, out, collective=bound.tactic.collective)
        except GroupError as error:
            if self.tuner is not None:
                self.tuner.group.dead = str(error)
            raise

    def lookup(self, num_tokens: int, mode: str = "eager") -> Tactic:
        """The tactic that a call of `num_tokens` tokens without `group_tokens` runs, for the last weights and kind of call.

        InputError: num_tokens is below 0. TunerStateError: the layer has seen no weights yet.
        """
        if num_tokens < 0:
            raise InputError(f"num_tokens is {num_tokens}; it must be at least 0")
        index = self._indexes.get(self._last_routed)
        if index is None:
            raise TunerStateError("the layer has seen no weights yet, so its device is unknown; call get_tuned_layer or the layer first")
        return self._index_for(index.layer.weights, self._last_routed).pick(num_tokens, mode, None).tactic

    def _pin(self, index: ServingIndex) -> None:
        """For as long as the graph lives that is being captured: its tuner keeps the epoch, and what it reads stays alive."""
        pins, arena = (self._pins[0], None) if self.tuner is None else (self.tuner.pins, self.tuner.arena)
        pins.add_captured(index.device, index, arena)
        if pins not in self._pins:
            self._pins.append(pins)  # also once this layer has another tuner

    def _index_for(self, weights: MoEWeightPack, routed: bool) -> ServingIndex:
        index = self._indexes.get(routed)
        if index is None or index.layer.weights is not weights:
            return self._bind(weights, routed)
        tuner = self.tuner
        if tuner is not None and tuner.epoch is not index.epoch and not _capturing(index.device):
            return self._bind(weights, routed)
        return index

    def _bind(self, weights: MoEWeightPack, routed: bool) -> ServingIndex:
        problem = MoEProblem.of(self.config, routed=routed)
        epoch = self.tuner.epoch if self.tuner is not None else None
        layer = bind_weights(problem, weights)
        if not _capturing(weights.w13.device):
            check_expert_map(layer)
        limits = self.tuner.limits if self.tuner is not None else None
        index = ServingIndex(layer, self.config.options, self.extra_backends, epoch, limits)
        self._indexes[routed] = index
        return index


class BoundTactic:
    """A tactic, ready to run."""

    __slots__ = ("runner", "tactic")

    def __init__(self, tactic: Tactic, runner: Runner) -> None:
        self.tactic = tactic
        self.runner = runner


class ServingIndex:
    """The index of one problem on one weight pack and epoch: by mode, a list with a tactic for each token count.

    limits: of the tuner whose epoch this is, which may have adopted it before it knew this problem; None: there are none.
    """

    def __init__(
        self,
        layer: BoundLayer,
        options: BackendOptions | None,
        extra_backends: Sequence[Backend],
        epoch: Epoch | None,
        limits: Limits | None = None,
    ) -> None:
        self.layer = layer
        self.device = layer.weights.w13.device
        self.epoch = epoch
        self._options, self._extra, self._limits = options, extra_backends, limits or Limits(None, {})
        self._backends = {backend.name: backend for backend, _ in usable_backends(layer.problem, self.device, options, extra_backends)}
        self._runners: dict[Tactic, BoundTactic] = {}
        self._beyond = self._default(None)
        ladder = layer.problem.ladder
        defaults = [self._default(Bucket(1, 1))]  # zero tokens
        for bucket in ladder.buckets():
            defaults += [self._default(bucket)] * (bucket.high - bucket.low + 1)
        self._local: dict[str, list[BoundTactic]] = {}
        self._collective: dict[str, dict[int, BoundTactic]] = {}
        for mode in modes_on(self.device.type):
            self._local[mode], self._collective[mode] = self._fill(mode, list(defaults))
        self.max_num_tokens = max(len(local) for local in self._local.values()) - 1

    def pick(self, num_tokens: int, mode: str, group_tokens: int | None) -> BoundTactic:
        try:
            local = self._local[mode]
        except KeyError:
            raise InputError(f"mode is {mode!r}; {self.device.type} tensors run as {' or '.join(self._local)}") from None
        if group_tokens is not None:
            collective = self._collective[mode].get(group_tokens)
            if collective is not None:
                return collective
        return local[num_tokens] if num_tokens < len(local) else self._beyond

    def _fill(self, mode: str, local: list[BoundTactic]) -> tuple[list[BoundTactic], dict[int, BoundTactic]]:
        collective: dict[int, BoundTactic] = {}
        if self.epoch is None or not (winners := self.epoch.of(self.layer.problem.key(), mode)):
            return local, collective
        operation = MoEOperation(self.layer.problem, self.layer.weights, self.device, self._options, self._extra)
        for bucket, winner in winners.items():
            cell = Cell(operation.problem, mode, bucket)
            local += [self._beyond] * (bucket.high + 1 - len(local))  # a ladder longer than the config's own
            counts = range(bucket.low, bucket.high + 1)
            chosen = winner.tactic
            if chosen.collective:
                if (
                    reason := self._limits.why_not(operation, cell, chosen)
                ) is not None:  # peers will run it: leaving it out here would hang them
                    raise TunerStateError(f"this rank can't run the collective winner {chosen} of {bucket} tokens: {reason}; tune again")
                collective.update(dict.fromkeys(counts, self._ready(chosen)))
                chosen = winner.default  # what calls without group_tokens run
                if chosen.collective:
                    continue  # they keep the layer's own default, which is not
            if (reason := self._limits.why_not(operation, cell, chosen)) is not None:
                logger.warning("%s is left out for %s tokens, the layer's default runs: %s", chosen, bucket, reason)
            else:
                local[bucket.low : bucket.high + 1] = [self._ready(chosen)] * len(counts)
        return local, collective

    def _default(self, bucket: Bucket | None) -> BoundTactic:
        backend = next(iter(self._backends.values()))
        tactic = backend.default(self.layer.problem, bucket, self.device)
        if tactic.collective:
            raise UnsupportedBackend(
                backend.name, f"its default {tactic} talks to peers, and calls without group_tokens need one that does not"
            )
        return self._ready(tactic)

    def _ready(self, tactic: Tactic) -> BoundTactic:
        if tactic not in self._runners:
            self._runners[tactic] = BoundTactic(tactic, _make_runner(self._backends[tactic.backend], self.layer, tactic))
        return self._runners[tactic]


def _make_runner(backend: Backend, layer: BoundLayer, tactic: Tactic) -> Runner:
    """`backend.bind`; its calls leave repro lines if their logger is on now, and pay nothing for it otherwise."""
    runner = backend.bind(layer, tactic)
    return trace.traced(runner, layer, tactic) if trace.enabled() and not _capturing(layer.weights.w13.device) else runner


def _check_call(layer: BoundLayer, acts: MoEActivationPack) -> int:
    """The number of tokens. Ids on a GPU are not looked at, since that waits for it: out of range there, they count as remote."""
    device = layer.weights.w13.device
    num_tokens = check_activations(layer.problem, acts, device)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        check_ids(layer.problem, acts)
    return num_tokens


def _check_values(layer: BoundLayer, acts: MoEActivationPack) -> None:
    """What a serving call on a GPU leaves unchecked, because it waits for the device."""
    check_ids(layer.problem, acts)
    check_expert_map(layer)


def _execute(
    problem: MoEProblem, runner: Runner, acts: MoEActivationPack, num_tokens: int, out: torch.Tensor | None, *, collective: bool = False
) -> torch.Tensor:
    """Fill the output that `ExecutionConfig.output` asks for. Without tokens only a collective tactic runs: its peers wait for it."""
    contract = problem.config.execution.output
    if out is not None:
        if contract == "in_place":
            raise InputError("out is given, but ExecutionConfig.output is 'in_place'; leave out= away, or set output='given'")
        check_out(problem, out, acts)
    elif contract == "given":
        raise InputError("out is missing, but ExecutionConfig.output is 'given'; pass out=, or set output='new'")
    else:
        out = acts.hidden_states.new_empty(output_shape(problem, num_tokens))
    with torch.no_grad():
        if num_tokens or collective:
            runner(acts, out)
        # Not written directly: a backend may still read hidden_states when it has its first rows ready.
        return acts.hidden_states.copy_(out) if contract == "in_place" else out


def _capturing(device: torch.device) -> bool:
    """Whether this call is being captured or traced: nothing may then be recorded or looked up for the first time."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
