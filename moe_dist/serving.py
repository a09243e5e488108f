"""What the framework plugins share: a served model's layers, their one tuning in warm-up, and the lines that say what serves what.

Owns the order of things in an engine's start-up. Knows no framework: the plugins turn a framework's layer into a config and
a weight pack, and say which group runs in step and which token counts will run. The plugins alone import this.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_dist.backends.base import TORCH_DTYPES, Backend, MoEProblem
from moe_dist.backends.reference import ReferenceBackend
from moe_dist.backends.registry import find_backends
from moe_dist.config import BackendOptions, MoEConfig
from moe_dist.distributed.epoch import EPOCHS
from moe_dist.distributed.group import CAP, PROGRESS_TIMEOUT
from moe_dist.layer import MoELayer
from moe_dist.operation import MoEOperation
from moe_dist.settings import ServingSettings
from moe_dist.stores.codec import Malformed, decode_epoch
from moe_dist.stores.open import open_store, shown_url
from moe_dist.tensors import MoEActivationPack, MoEWeightPack
from moe_dist.tuning.pass_terms import ProgressEvent
from moe_dist.tuning.pins import Pins
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import MODES, Bucket, BucketLadder, Epoch, Tactic, Winner, digest
from moe_dist.tuning.tuner import PassReport, Tuner

log = logging.getLogger("moe_dist.serving")

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}  # of activations, by their names in a config
PROGRESS_LINE_EVERY_S = 10.0


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """The token counts of a call that an engine will run, equal on all ranks.

    max_num_tokens: the largest. captured: the counts that it captures as CUDA graphs, () for none.
    eager_from: the least count that also runs eagerly; None: only those above the largest captured one do.
    """

    max_num_tokens: int
    captured: tuple[int, ...] = ()
    eager_from: int | None = None

    @classmethod
    def gathered(cls, largest: int, captured: Iterable[int], ranks: int, *, eager_from: int | None = None) -> TokenCounts:
        """Of steps whose rows `ranks` ranks gather, padded alike. largest, captured: one rank's; what no step reaches is not captured."""
        sizes = {count * ranks for count in captured if count <= largest}
        return cls(largest * ranks, tuple(sorted(sizes)), eager_from)

    @property
    def ladder(self) -> BucketLadder:
        """Powers of two, the largest count, and the largest captured one, so that no bucket is shared by graphs and larger eager calls."""
        bounds = set(BucketLadder.powers_of_two(self.max_num_tokens).bounds) | {
            count for count in (max(self.captured, default=0),) if count
        }
        return BucketLadder(tuple(sorted(bounds)))

    def buckets(self, mode: str) -> tuple[Bucket, ...]:
        """The buckets of `ladder` in which `mode` runs."""
        if mode == "cuda_graph":
            return tuple(b for b in self.ladder.buckets() if any(b.low <= count <= b.high for count in self.captured))
        least = self.eager_from if self.eager_from is not None else max(self.captured, default=0) + 1
        return tuple(b for b in self.ladder.buckets() if b.high >= least)


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long tuning may take in an engine that gives its whole start-up `startup_timeout`: equal inputs, so equal on all ranks.

    Measuring gets a quarter at most, a silent rank a tenth, all passes together half: weights are loaded and graphs captured in the rest.
    """

    budget: timedelta
    progress_timeout: timedelta
    cap: timedelta

    @classmethod
    def within(cls, settings: ServingSettings, startup_timeout: timedelta) -> Deadlines:
        return cls(min(settings.budget, startup_timeout / 4), min(PROGRESS_TIMEOUT, startup_timeout / 10), min(CAP, startup_timeout / 2))


@dataclasses.dataclass
class _ServedLayer:
    name: str
    layer: MoELayer
    weights: MoEWeightPack
    extra_backends: tuple[Backend, ...]


class ServedModel:
    """The MoE layers of one model on this rank. Layers are added while the model loads, tuned in warm-up, then served.

    An engine that warms up again tunes again, by another `Tuner`: graphs that were captured before it pin its epoch too.
    deployment: whose epochs these are. versions: of foreign backends among the layers' extra ones, part of every key.
    earlier: what served this model until now, if its layers were made anew.
    """

    def __init__(
        self, settings: ServingSettings, *, deployment: str, versions: Mapping[str, str] | None = None, earlier: ServedModel | None = None
    ) -> None:
        self.settings = settings
        self.epoch = Epoch(deployment=deployment)
        self.measured, self.tuning = 0, timedelta(0)  # of the last `tune`: candidates timed here, and how long it took
        self._deployment, self._versions = deployment, dict(versions or {})
        self._layers: list[_ServedLayer] = []
        self._pins: Pins = Pins() if earlier is None else earlier._pins  # of every tuner that these layers had

    def add(self, name: str, config: MoEConfig, weights: MoEWeightPack, extra_backends: Iterable[Backend] = ()) -> MoELayer:
        """A layer to call with `weights`; it runs the defaults until the model is tuned. extra_backends: the framework's own, for this layer;
        the first of them that can run it is the default.

        name: replaces the layer of that name, whose weights were reloaded. InputError: the weights don't fit the config.
        UnsupportedBackend: no backend can run this layer; carries every one's reason.
        """
        extra = tuple(extra_backends)
        served = _ServedLayer(name, untuned_layer(config, weights.w13.device, extra), weights, extra)
        _call_without_tokens(served)
        self._layers = [other for other in self._layers if other.name != name]
        self._layers.append(served)
        return served.layer

    def workspace_bytes(self, counts: TokenCounts) -> int:
        """The scratch to keep free for one call of these layers, whatever wins: the most that any tactic of the default's backend needs.

        A framework's own experts are such a backend, so where they are the default this is what the framework would need without us.
        """
        most, seen = 0, set[str]()
        for served in self._layers:
            operation = self._operation(served)
            if (key := digest(operation.problem)) in seen:
                continue
            seen.add(key)
            for mode in MODES:
                for bucket in counts.buckets(mode):
                    default = operation.default(bucket, mode)
                    tactics = {default, *(tactic for tactic in operation.candidates(bucket, mode) if tactic.backend == default.backend)}
                    most = max(most, *(operation.workspace(tactic, bucket.high).nbytes for tactic in tactics))
        return most

    def default_backends(self) -> set[str]:
        """The backends whose tactics run untuned."""
        return {served.layer.lookup(1).backend for served in self._layers}

    def tune(
        self, counts: TokenCounts, group: dist.ProcessGroup | None, startup_timeout: timedelta, workspace_limit: int | None = None
    ) -> int:
        """Tune every distinct layer together with the ranks of `group`, then bind all layers to the one epoch. All its ranks call this.

        group: the ranks that run these layers in step; None: alone. workspace_limit: what was kept free for one call; a tactic that needs
        more is out; None: half of what is free now. Returns how many candidates were timed here: 0 after a warm start.
        Whatever `Tuner.run_pass` raises, as PassAborted where graphs of an earlier tuning live on any rank: the engine's start-up must end
        with it. StoreError: the store's URL has no meaning.
        """
        settings, started, measured = self.settings, time.monotonic(), 0
        if settings.tune != "off" and (self._layers or group is not None):
            device = self._layers[0].weights.w13.device if self._layers else None
            passes = _passes(settings, counts, device)
            limits = Deadlines.within(settings, startup_timeout)
            with Tuner(
                store=settings.store, group=group, strategy=settings.strategy, ladder=counts.ladder, deployment=self._deployment,
                device=device, versions=self._versions, budget=limits.budget / max(1, len(passes)),
                workspace_limit=_spare_bytes(device) if workspace_limit is None else workspace_limit,
                progress_timeout=limits.progress_timeout, cap=limits.cap / max(1, len(passes)), on_progress=_progress_line(),
            ) as tuner:  # fmt: skip
                tuner.pins = self._pins
                for served in self._layers:
                    tuner.record(self._operation(served))
                for index, (policy, buckets) in enumerate(passes):
                    later = [bucket for _, others in passes[index + 1 :] for bucket in others]
                    report = tuner.run_pass(buckets, policy=policy, measure=settings.tune == "tune", ahead=later, publish=not later)
                    measured += report.measured
                    for line in faults(report):
                        log.warning("%s", line)
            self.epoch = tuner.epoch
            for served in self._layers:
                served.layer.tuner = tuner
            if device is not None and device.type == "cuda":
                torch.cuda.empty_cache()  # the engine captures its graphs in what was free before
        for served in self._layers:
            _call_without_tokens(served)
        if group is None or dist.get_rank(group) == 0:  # the others serve the same
            for line in self.describe(counts):
                log.info("%s", line)
        self.measured, self.tuning = measured, timedelta(seconds=time.monotonic() - started)
        log.info("%s; %s took %.1f s", self.summary(measured), settings.tune, self.tuning.total_seconds())
        return measured

    def serves(self, counts: TokenCounts) -> list[tuple[str, Bucket, Tactic]]:
        """(mode, bucket, tactic) of the first layer, for every bucket in which a mode runs; empty without layers."""
        return [
            (mode, bucket, self._layers[0].layer.lookup(bucket.high, mode))
            for mode in MODES
            for bucket in (counts.buckets(mode) if self._layers else ())
        ]

    def summary(self, measured: int) -> str:
        settings = self.settings
        if settings.tune == "off":
            return f"{len(self._layers)} layers run the defaults: tuning is off"
        return f"{len(self._layers)} layers serve epoch {self.epoch.number} ({self.epoch.digest[:8]}) of {shown_url(settings.store)}; {measured} candidates timed"

    def describe(self, counts: TokenCounts) -> list[str]:
        """One line a distinct layer: which tactic serves each bucket and mode, and where it came from."""
        distinct: dict[str, list[_ServedLayer]] = {}
        for served in self._layers:
            distinct.setdefault(digest(MoEProblem.of(served.layer.config, routed=True).key()), []).append(served)
        return [_describe(alike, counts, self.epoch) for alike in distinct.values()]

    @staticmethod
    def _operation(served: _ServedLayer) -> MoEOperation:
        config, weights = served.layer.config, served.weights
        return MoEOperation(MoEProblem.of(config, routed=True), weights, weights.w13.device, config.options, served.extra_backends)


def faults(report: PassReport) -> list[str]:
    """One line a backend and reason for which candidates could not serve, the most frequent first; being slower is none."""
    counts = collections.Counter((tactic.backend, reason) for _, tactic, reason in report.rejected if not re.match(r"\d+\.\d\dx ", reason))
    return [f"{count} candidates of backend {backend} are out: {reason}" for (backend, reason), count in counts.most_common()]


def mode_of(call: torch.Tensor) -> str:
    """How a call on this tensor's device is executed now: "cuda_graph" while a graph is captured, else "eager"."""
    return "cuda_graph" if call.is_cuda and torch.cuda.is_current_stream_capturing() else "eager"


def untuned_layer(config: MoEConfig, device: torch.device, extra_backends: Sequence[Backend] = ()) -> MoELayer:
    """A layer for routed calls whose default is the first of `extra_backends` that can run it, then ours by priority."""
    if extra_backends and config.backends is None:
        ours = [option for option in find_backends(config, device) if option.name != ReferenceBackend.name]
        config = dataclasses.replace(config, backends=BackendOptions((*(backend.config_type() for backend in extra_backends), *ours)))
    return MoELayer(extra_backends=extra_backends, **config)


def _spare_bytes(device: torch.device | None) -> int | None:
    """What a tactic may need besides weights and KV cache, which lie on the device already; None: nobody counts.

    Half of what is free now: graphs are captured after this, and the other half of a step needs memory too.
    """
    if device is None or device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free // 2


def stored_epochs(url: str) -> list[Epoch]:
    """The newest readable epoch of every deployment in a store, by deployment; leaves it as it is. StoreError: the URL has no meaning."""
    store = open_store(url, upkeep=False)
    try:
        newest: dict[str, Epoch] = {}
        for key in store.list(EPOCHS):  # rising, so that the last readable one of a deployment stays
            with contextlib.suppress(Malformed):
                found, _ = decode_epoch(store.get(key) or b"")
                newest[found.deployment] = found
        return [newest[deployment] for deployment in sorted(newest)]
    finally:
        store.close()


def _passes(
    settings: ServingSettings, counts: TokenCounts, device: torch.device | None
) -> list[tuple[MeasurementPolicy, tuple[Bucket, ...]]]:
    """One pass a mode, by that mode's own clock; or one for both, by device time."""
    if settings.policy == "auto":
        return [(MeasurementPolicy("auto"), counts.ladder.buckets())]
    return [(MeasurementPolicy(mode), counts.buckets(mode)) for mode in ("cuda_graph", "eager") if counts.buckets(mode)]


def _call_without_tokens(served: _ServedLayer) -> None:
    """So the layer checks its weights, builds its index and binds every tactic, before anything is captured."""
    config = served.layer.config
    device, slots = served.weights.w13.device, config.routing.slots
    problem = MoEProblem.of(config, routed=True)
    served.layer(
        (
            MoEActivationPack(
                hidden_states=torch.empty(0, config.experts.hidden_size, dtype=problem.dtype, device=device),
                topk_ids=torch.empty(0, slots, dtype=torch.int32, device=device),
                topk_weights=torch.empty(0, slots, device=device),
            ),
            served.weights,
        )
    )


def _describe(alike: Sequence[_ServedLayer], counts: TokenCounts, epoch: Epoch) -> str:
    layer = alike[0].layer
    config = layer.config
    routing, experts, quant, parallel = config.routing, config.experts, config.quant, config.parallel
    shape = (
        f"{routing.num_experts} experts top-{routing.top_k}, hidden {experts.hidden_size}, intermediate {experts.intermediate_size}, "
        f"{quant.weight or quant.dtype}{f' by {quant.granularity}' if quant.granularity else ''}, tp {parallel.tp_size} ep {parallel.ep_size}"
    )
    problem = MoEProblem.of(config, routed=True).key()
    parts = []
    for mode in ("eager", "cuda_graph"):
        winners = epoch.of(problem, mode)
        runs: list[tuple[int, int, str]] = []
        for bucket in counts.buckets(mode):
            winner = winners.get(bucket)
            said = f"{layer.lookup(bucket.high, mode)} [{_source(winner)}]"
            if runs and runs[-1][2] == said:
                runs[-1] = (runs[-1][0], bucket.high, said)
            else:
                runs.append((bucket.low, bucket.high, said))
        parts += [f"{mode} {Bucket(low, high)}: {said}" for low, high, said in runs]
    return f"{len(alike)} x ({shape}), first {alike[0].name}: " + "; ".join(parts)


def _source(winner: Winner | None) -> str:
    if winner is None:
        return "default"
    return {"tuned": "tuned now", "hit": "store", "epoch": "epoch"}[winner.source]


def _progress_line() -> Callable[[ProgressEvent], None]:
    """A line when measuring begins, and then one every ten seconds."""
    said = 0.0

    def say(event: ProgressEvent) -> None:
        nonlocal said
        if event.phase == "measure" and time.monotonic() - said >= PROGRESS_LINE_EVERY_S:
            said = time.monotonic()
            log.info("tuning %d of %d: %s", event.done + 1, event.cells, event.cell)

    return say
