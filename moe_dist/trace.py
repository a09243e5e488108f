"""The repro line: one call of the MoE layer written down so that another process can make it again (`repro.py` does).

Owns the line's format, both ways, and the runner that writes it before each call. Knows no clock, store or rank.
`layer.py` and `repro.py` import this.

The lines are debug messages of the logger "moe_dist.repro". Whether it is on is asked when a tactic is bound: a layer that
was bound while it was off pays nothing for it and writes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from moe_dist.backends.base import BoundLayer, MoEProblem, Runner
from moe_dist.config import MoEConfig
from moe_dist.errors import ConfigError
from moe_dist.tensors import MoEActivationPack, MoEWeightPack
from moe_dist.tuning.identity import build_environment
from moe_dist.tuning.problem import Tactic

logger = logging.getLogger("moe_dist.repro")

MARK = "MOE_DIST_REPRO"
SCHEMA_VERSION = 1

# Every format that a pack may hold; a name that is not here is refused, never looked up.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
}

ACTIVATIONS = tuple(field.name for field in dataclasses.fields(MoEActivationPack))
WEIGHTS = ("w13", "w2", "w13_bias", "w2_bias", "w13_scale", "w2_scale", "correction_bias")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One call on one rank, without the tensors' values.

    config: without its choice of backends, since `tactic` is what ran. ep_rank, tp_rank: the share. tensors: what the packs held,
    by field name. expert_map: its values, where the caller gave one. device: as torch names it. environment: the fields of
    `tuning.identity.Environment` as they were there.
    """

    config: MoEConfig
    tactic: Tactic
    ep_rank: int
    tp_rank: int
    tensors: Mapping[str, TensorSpec]
    expert_map: tuple[int, ...] | None
    device: str
    environment: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        return self.tensors["hidden_states"].shape[0]

    @property
    def problem(self) -> MoEProblem:
        return MoEProblem.of(self.config, routed="router_logits" not in self.tensors)

    def to_line(self) -> str:
        """The mark and one JSON object, on one line."""
        plain = {
            "schema": SCHEMA_VERSION,
            "config": self.config.to_dict(),
            "tactic": self.tactic.to_plain(),
            "ep_rank": self.ep_rank,
            "tp_rank": self.tp_rank,
            "tensors": {name: [str(spec.dtype).removeprefix("torch."), list(spec.shape)] for name, spec in self.tensors.items()},
            "expert_map": self.expert_map,
            "device": self.device,
            "environment": self.environment,
        }
        return f"{MARK} {json.dumps(plain, separators=(',', ':'))}"

    @classmethod
    def from_text(cls, text: str, source: str) -> RecordedCall:
        """The last repro line of `text`, whatever stands around it; `source` names the text in errors.

        ConfigError: there is none, or it is cut off, of another schema, or holds what this release does not know.
        """
        for number, line in reversed(list(enumerate(text.splitlines(), 1))):
            if MARK in line:
                where = f"{source}:{number}"
                try:
                    value, _ = json.JSONDecoder().raw_decode(line[line.rindex(MARK) + len(MARK) :].lstrip())
                except ValueError as error:
                    raise ConfigError(f"{where}: the repro line is cut off or no JSON: {error}; copy it whole") from None
                try:
                    return cls._from_plain(value)
                except ConfigError as error:
                    raise ConfigError(f"{where}: {error}") from error
        raise ConfigError(f"{source} holds no {MARK} line; set the logger {logger.name!r} to DEBUG before the layer is made, and run again")

    @classmethod
    def _from_plain(cls, value: Any) -> RecordedCall:
        if not isinstance(value, dict):
            raise ConfigError(f"the repro line holds {type(value).__name__}; it must be an object")
        if value.get("schema") != SCHEMA_VERSION:
            raise ConfigError(
                f"repro schema is {value.get('schema')!r}; this release reads {SCHEMA_VERSION}: use the release that wrote it"
            )
        names = {"schema", *(field.name for field in dataclasses.fields(cls))}
        if unknown := sorted(value.keys() - names):
            raise ConfigError(f"unknown repro field {unknown[0]!r}; known: {', '.join(sorted(names))}")
        if missing := sorted(names - value.keys()):
            raise ConfigError(f"the repro line lacks {', '.join(missing)}")
        for name, kind in (("ep_rank", int), ("tp_rank", int), ("device", str), ("environment", dict), ("config", dict), ("tensors", dict)):
            if type(value[name]) is not kind:
                raise ConfigError(f"repro field {name!r} is {value[name]!r}; it must be of type {kind.__name__}")
        expert_map = value["expert_map"]
        if expert_map is not None and not (isinstance(expert_map, list) and all(type(row) is int for row in expert_map)):
            raise ConfigError(f"repro field 'expert_map' is {expert_map!r}; it must be a list of rows, or null")
        tensors = {name: _spec(name, item) for name, item in value["tensors"].items()}
        if lacking := sorted({"hidden_states", "w13", "w2"} - tensors.keys()):
            raise ConfigError(f"the repro line lacks the tensors {', '.join(lacking)}")
        config = MoEConfig.from_dict(value["config"])
        for name, size in (("ep_rank", config.parallel.ep_size), ("tp_rank", config.parallel.tp_size)):
            if not 0 <= value[name] < size:
                raise ConfigError(f"repro field {name!r} is {value[name]}; the config has {size} such ranks")
        try:
            tactic = Tactic.from_plain(value["tactic"])
        except (TypeError, ValueError):
            raise ConfigError(
                f"repro field 'tactic' is {value['tactic']!r}; it must be [backend, [[name, value], ...], collective]"
            ) from None
        return cls(
            config=config,
            tactic=tactic,
            ep_rank=value["ep_rank"],
            tp_rank=value["tp_rank"],
            tensors=tensors,
            expert_map=None if expert_map is None else tuple(expert_map),
            device=value["device"],
            environment=value["environment"],
        )


def enabled() -> bool:
    """Whether calls that are bound now are to be written down."""
    return logger.isEnabledFor(logging.DEBUG)


def traced(runner: Runner, layer: BoundLayer, tactic: Tactic) -> Runner:
    """`runner`, which writes the repro line of each call before it makes it: the last line of a log is the call that failed.

    Reads the values of a given `expert_map`, and so waits for the device, now.
    """
    weights, device = layer.weights, layer.weights.w13.device
    call = RecordedCall(
        config=layer.problem.config,
        tactic=tactic,
        ep_rank=weights.ep_rank,
        tp_rank=weights.tp_rank,
        tensors=_specs(weights, WEIGHTS),
        expert_map=None if weights.expert_map is None else tuple(weights.expert_map.tolist()),
        device=str(device),
        environment=_environment(device),
    )

    def run(acts: MoEActivationPack, out: torch.Tensor) -> Tactic:
        logger.debug("%s", dataclasses.replace(call, tensors={**_specs(acts, ACTIVATIONS), **call.tensors}).to_line())
        return runner(acts, out)

    return run


def _specs(pack: MoEActivationPack | MoEWeightPack, names: tuple[str, ...]) -> dict[str, TensorSpec]:
    found = {name: getattr(pack, name) for name in names}
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items() if tensor is not None}


def _spec(name: str, item: Any) -> TensorSpec:
    if name not in (*ACTIVATIONS, *WEIGHTS):
        raise ConfigError(f"unknown tensor {name!r}; known: {', '.join((*ACTIVATIONS, *WEIGHTS))}")
    sizes = item[1] if isinstance(item, list) and len(item) == 2 else None
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size >= 0 for size in sizes):
        raise ConfigError(f"tensor {name!r} is {item!r}; it must be [dtype, [sizes]]")
    if item[0] not in _DTYPES:
        raise ConfigError(f"tensor {name!r} is of {item[0]!r}; known: {', '.join(_DTYPES)}")
    return TensorSpec(_DTYPES[item[0]], tuple(sizes))


@functools.cache
def _environment(device: torch.device) -> dict[str, Any]:
    return build_environment(device).to_plain()
