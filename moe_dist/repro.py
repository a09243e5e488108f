"""Makes a call again from the repro line that it left in a log: the same config, share, shapes and tactic, on random values.

Owns the making of tensors that fit a line, and what is asked of such a call. The line is `trace.py`'s; nothing in it is evaluated.
People and their scripts use this, through the public name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_dist.backends.base import BoundLayer, MoEProblem
from moe_dist.backends.registry import explain_backends, get_backend
from moe_dist.bench.components import ComponentTimes, component_times
from moe_dist.checks import bind_weights, check_activations, check_expert_map, output_shape
from moe_dist.config import BackendConfig
from moe_dist.errors import ConfigError, UnsupportedBackend
from moe_dist.operation import make_random_weights, probe_inputs
from moe_dist.tensors import MoEActivationPack, MoEWeightPack
from moe_dist.trace import ACTIVATIONS, WEIGHTS, RecordedCall
from moe_dist.tuning.identity import build_environment
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Bucket, ProbeSpec

Pack = TypeVar("Pack", MoEActivationPack, MoEWeightPack)


@dataclasses.dataclass(frozen=True)
class MoERepro:
    """A recorded call that can be made again. seed: of the tensors' values. device: where; as recorded unless given.

    Weights and routing are random: what depends on the values that were lost (a NaN in a checkpoint, one skewed batch) may not
    come back.
    """

    call: RecordedCall
    seed: int = 0
    device: torch.device | None = None

    @classmethod
    def from_file(cls, path: Path | str, *, seed: int = 0, device: torch.device | str | None = None) -> MoERepro:
        """The last repro line in the log at `path`, whatever else the log holds.

        ConfigError: the file has none, or it is cut off, of another schema, or holds what this release does not know.
        """
        call = RecordedCall.from_text(Path(path).read_text(errors="replace"), str(path))
        return cls(call, seed, None if device is None else torch.device(device))

    def run(self) -> torch.Tensor:
        """Make the call with its tactic; the result ([T, H], or [T, K, H] without finalize). What it leaves unwritten is NaN.

        ConfigError: the line's parts contradict each other, or its device is not here. UnsupportedBackend: the tactic can't run here;
        `isolate_backend` chooses another.
        """
        call, _, _ = self._prepared()
        return call()

    def benchmark_all(self, *, policy: MeasurementPolicy | None = None) -> ComponentTimes:
        """`moe_dist.benchmark_all` of this call, with the recorded tactic. Errors: `run`'s, and that function's."""
        call, layer, acts = self._prepared()
        return component_times(layer, acts, self.call.tactic, call, policy or MeasurementPolicy())

    def isolate_backend(self, config: BackendConfig) -> MoERepro:
        """The same call by the default tactic of one backend. UnsupportedBackend: it can't run it; carries every one's reason."""
        device, problem = self._where(), self.call.problem
        backend = get_backend(config.name)
        if (reason := backend.why_not(problem, device, config)) is not None:
            raise UnsupportedBackend(config.name, reason, explain_backends(problem.config, device, routed=problem.routed))
        tactic = backend.default(problem, self._bucket(), device)
        return dataclasses.replace(self, call=dataclasses.replace(self.call, tactic=tactic))

    def differences(self) -> dict[str, tuple[Any, Any]]:
        """{field: (recorded, here)} for every field of the environment that differs: device, driver, torch, triton, kernels ..."""
        here, there = build_environment(self._where()).to_plain(), self.call.environment
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in here.items()}  # as JSON gives it back
        names = sorted({*plain, *there})
        return {name: (there.get(name), plain.get(name)) for name in names if there.get(name) != plain.get(name)}

    def _where(self) -> torch.device:
        try:
            device = self.device or torch.device(self.call.device)
        except RuntimeError:
            raise ConfigError(f"the call was recorded on {self.call.device!r}, which torch does not know; give device=") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            name = self.call.environment.get("device_name", "?")
            raise ConfigError(f"the call is for {device} (recorded on {name}), which this process lacks; give from_file another device=")
        return device

    def _bucket(self) -> Bucket | None:
        return self.call.problem.ladder.bucket(max(1, self.call.num_tokens))

    def _prepared(self) -> tuple[Callable[[], torch.Tensor], BoundLayer, MoEActivationPack]:
        call, problem, device = self.call, self.call.problem, self._where()
        backend = get_backend(call.tactic.backend)
        if (reason := backend.why_not_tactic(problem, call.tactic, self._bucket(), device)) is not None:
            raise UnsupportedBackend(backend.name, reason)
        layer = bind_weights(problem, self._weights(problem, device))
        check_expert_map(layer)
        acts = _fit(probe_inputs(problem, call.num_tokens, ProbeSpec(seed=self.seed), 0, device), call, ACTIVATIONS, device)
        check_activations(problem, acts, device)
        out = torch.full(output_shape(problem, call.num_tokens), torch.nan, dtype=problem.dtype, device=device)
        runner = backend.bind(layer, call.tactic)

        def run() -> torch.Tensor:
            with torch.no_grad():
                runner(acts, out)
            return out

        return run, layer, acts

    def _weights(self, problem: MoEProblem, device: torch.device) -> MoEWeightPack:
        call = self.call
        given = call.expert_map
        experts = None
        if given is not None:
            holder = {row: expert for expert, row in enumerate(given)}
            experts = [holder.get(row, 0) for row in range(call.tensors["w13"].shape[0])]  # a row that no id leads to holds anything
        whole = make_random_weights(problem, call.ep_rank, call.tp_rank, device, self.seed, experts=experts)
        weights = _fit(whole, call, WEIGHTS, device)
        return weights if given is None else dataclasses.replace(weights, expert_map=torch.tensor(given, dtype=torch.int32, device=device))


def _fit(pack: Pack, call: RecordedCall, names: tuple[str, ...], device: torch.device) -> Pack:
    """`pack` with just the tensors that were recorded, in their formats. ConfigError: the config gives a tensor another shape."""
    fitted: dict[str, Any] = dict.fromkeys(names)
    for name in names:
        spec, tensor = call.tensors.get(name), getattr(pack, name)
        if spec is None:
            continue
        if tensor is None:  # w2's bias on a TP rank above 0, whose share of it the config leaves open
            tensor = torch.zeros(spec.shape, device=device)
        if tuple(tensor.shape) != spec.shape:
            raise ConfigError(f"the repro line gives {name} the shape {list(spec.shape)}; its config and share give {list(tensor.shape)}")
        fitted[name] = tensor.to(spec.dtype)
    return dataclasses.replace(pack, **fitted)
