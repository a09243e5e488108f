"""The configs of one MoE layer: pure data, frozen, checked at birth. No tensor, device, group or client lives here.

Sizes are the model's, global; `ParallelConfig` says how they are cut. Anyone may import this module; of ours it
imports errors alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from moe_dist.errors import ConfigError

SCHEMA_VERSION = 1
DEFAULT_MAX_NUM_TOKENS = 8192  # the largest token count that has a bucket, where nobody says otherwise

DTYPES = ("bf16", "fp16", "fp32")
SCORINGS = ("softmax", "sigmoid")
GATED_ACTIVATIONS = ("swiglu", "geglu")
UNGATED_ACTIVATIONS = ("relu2", "gelu", "silu")
PLACEMENTS = ("linear", "round_robin")
WEIGHT_FORMATS = ("fp8", "int8", "mxfp4", "nvfp4")
GRANULARITIES = ("tensor", "channel", "block")
CORRECTION_BIASES = (None, "selection")


def _positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{owner}.{name} is {value!r}; it must be an integer of at least 1")


def _one_of(owner: str, name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{owner}.{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}")


def _number(config: object, **values: float) -> None:
    """Numbers are kept as floats: 1 and 1.0 mean one thing and must not give two keys."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"{type(config).__name__}.{name} is {value!r}; it must be a finite number")
        object.__setattr__(config, name, float(value))


@dataclasses.dataclass(frozen=True)
class RoutingConfig:
    """How a token chooses its experts. Described, never picked from a list of model names.

    num_experts, top_k: the model's routed experts and how many a token takes.
    scoring: "softmax" over all experts, or "sigmoid" of each logit.
    renormalize: divide the chosen scores by their sum.
    n_group, topk_group: experts lie in `n_group` equal groups of which the best `topk_group` stay eligible; None: no
        groups. A group's score is the sum of its two best selection scores where a correction bias is used, else its
        best score (DeepSeek-V3 and V2, modeling code of both).
    correction_bias: "selection": `MoEWeightPack.correction_bias` (fp32 [num_experts]) is added to the scores that
        choose experts and groups, never to the weights (DeepSeek-V3's contract); None: there is none.
    routed_scaling_factor: multiplies the routed weights once; fused shared experts are not scaled.
    num_fused_shared_experts: experts that every token takes with weight 1, stored after the routed ones.
    weight_on_input: the router's weight multiplies the expert's input, not its output (Llama-4); needs top_k 1.
    """

    num_experts: int
    top_k: int
    _: dataclasses.KW_ONLY
    scoring: str = "softmax"
    renormalize: bool = True
    n_group: int | None = None
    topk_group: int | None = None
    correction_bias: str | None = None
    routed_scaling_factor: float = 1.0
    num_fused_shared_experts: int = 0
    weight_on_input: bool = False

    def __post_init__(self) -> None:
        _positive("RoutingConfig", num_experts=self.num_experts, top_k=self.top_k)
        if self.top_k > self.num_experts:
            raise ConfigError(f"RoutingConfig.top_k {self.top_k} exceeds num_experts {self.num_experts}; choose at most {self.num_experts}")
        _number(self, routed_scaling_factor=self.routed_scaling_factor)
        _one_of("RoutingConfig", "scoring", self.scoring, SCORINGS)
        _one_of("RoutingConfig", "correction_bias", self.correction_bias, CORRECTION_BIASES)
        if (self.n_group is None) != (self.topk_group is None):
            raise ConfigError(f"RoutingConfig.n_group {self.n_group} and topk_group {self.topk_group}: give both or neither")
        if self.n_group is not None and self.topk_group is not None:
            _positive("RoutingConfig", n_group=self.n_group, topk_group=self.topk_group)
            if self.num_experts % self.n_group:
                raise ConfigError(
                    f"RoutingConfig.num_experts {self.num_experts} is not divisible by n_group {self.n_group}; choose an n_group that divides it"
                )
            if self.topk_group > self.n_group:
                raise ConfigError(
                    f"RoutingConfig.topk_group {self.topk_group} exceeds n_group {self.n_group}; choose at most {self.n_group}"
                )
            eligible = self.topk_group * (self.num_experts // self.n_group)
            if self.top_k > eligible:
                raise ConfigError(
                    f"RoutingConfig.top_k {self.top_k} exceeds the {eligible} experts of {self.topk_group} groups; raise topk_group"
                )
        if self.num_fused_shared_experts < 0:
            raise ConfigError(f"RoutingConfig.num_fused_shared_experts is {self.num_fused_shared_experts}; it must be at least 0")
        if self.weight_on_input and (self.top_k != 1 or self.num_fused_shared_experts):
            raise ConfigError(
                f"RoutingConfig.weight_on_input needs top_k 1 and no fused shared experts, not top_k {self.top_k} "
                f"and {self.num_fused_shared_experts}; apply the weight on the output"
            )

    @property
    def total_experts(self) -> int:
        """Routed and fused shared experts together: the length of a weight's first axis without parallelism."""
        return self.num_experts + self.num_fused_shared_experts

    @property
    def slots(self) -> int:
        """Experts that one token visits: top_k and the fused shared ones."""
        return self.top_k + self.num_fused_shared_experts

    @classmethod
    def deepseek_v3(cls, num_experts: int = 256, top_k: int = 8, **changes: Any) -> RoutingConfig:
        """DeepSeek-V3, R1, Kimi-K2, GLM-4.5: sigmoid scores, biased grouped selection, renormalised, scaled."""
        fields: dict[str, Any] = {
            "scoring": "sigmoid",
            "renormalize": True,
            "n_group": 8,
            "topk_group": 4,
            "correction_bias": "selection",
            "routed_scaling_factor": 2.5,
        }
        return cls(num_experts, top_k, **(fields | changes))

    @classmethod
    def qwen3(cls, num_experts: int = 128, top_k: int = 8, **changes: Any) -> RoutingConfig:
        """Qwen3-MoE, Mixtral, gpt-oss: softmax, renormalised over the chosen (equal to softmax over the chosen logits)."""
        return cls(num_experts, top_k, **changes)

    @classmethod
    def llama4(cls, num_experts: int = 16, **changes: Any) -> RoutingConfig:
        """Llama-4: top-1, the sigmoid of its logit multiplies the expert's input."""
        fields: dict[str, Any] = {"scoring": "sigmoid", "renormalize": False, "weight_on_input": True}
        return cls(num_experts, 1, **(fields | changes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Number formats. `dtype` is that of hidden states and output, and of the weights where `weight` is None.

    weight: None or one of fp8, int8, mxfp4, nvfp4.
    granularity: what one scale covers: "tensor", "channel" (an output row) or "block" of `block_shape` = (rows of the
        output, columns of the input). Default for fp8 and int8: "tensor"; mxfp4 and nvfp4: blocks of (1, 32), (1, 16).
    Activations are quantised by the backend, one scale for each row and `block_shape[1]` columns (block), else a row.
    """

    dtype: str = "bf16"
    weight: str | None = None
    granularity: str | None = None
    block_shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _one_of("QuantConfig", "dtype", self.dtype, DTYPES)
        _one_of("QuantConfig", "weight", self.weight, (None, *WEIGHT_FORMATS))
        if self.weight is None:
            if self.granularity is not None or self.block_shape is not None:
                raise ConfigError(
                    f"QuantConfig.granularity {self.granularity!r} and block_shape {self.block_shape} need a quantised weight; name one of {WEIGHT_FORMATS}"
                )
            return
        block = {"mxfp4": (1, 32), "nvfp4": (1, 16)}.get(self.weight)
        if self.granularity is None:
            object.__setattr__(self, "granularity", "block" if block or self.block_shape else "tensor")
        _one_of("QuantConfig", "granularity", self.granularity, GRANULARITIES)
        if self.granularity == "block":
            shape = tuple(self.block_shape or block or (128, 128))
            if len(shape) != 2:
                raise ConfigError(f"QuantConfig.block_shape is {self.block_shape!r}; it must be (rows, columns)")
            _positive("QuantConfig.block_shape", rows=shape[0], columns=shape[1])
            object.__setattr__(self, "block_shape", shape)
        elif self.block_shape is not None:
            raise ConfigError(f"QuantConfig.block_shape {self.block_shape} needs granularity 'block', not {self.granularity!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """One expert: hidden_size -> intermediate_size -> hidden_size, the model's whole sizes. `bias`: both products add one."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False

    def __post_init__(self) -> None:
        _positive("ExpertConfig", hidden_size=self.hidden_size, intermediate_size=self.intermediate_size)


@dataclasses.dataclass(frozen=True)
class ActivationConfig:
    """What lies between the two products.

    kind: "swiglu" g*sigmoid(alpha*g)*(u+beta), "geglu" gelu_tanh(g)*(u+beta); ungated "relu2", "gelu" (tanh), "silu".
    limit: gate is clamped from above and up to [-limit, limit] before the product; ungated: the input to
        [-limit, limit]. None: no clamp. gpt-oss uses alpha 1.702, beta 1, limit 7.
    """

    kind: str = "swiglu"
    _: dataclasses.KW_ONLY
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        _one_of("ActivationConfig", "kind", self.kind, (*GATED_ACTIVATIONS, *UNGATED_ACTIVATIONS))
        _number(self, alpha=self.alpha, beta=self.beta, **({} if self.limit is None else {"limit": self.limit}))
        if self.limit is not None and not self.limit > 0:
            raise ConfigError(f"ActivationConfig.limit is {self.limit!r}; it must be above 0, or None for no clamp")
        if (self.alpha, self.beta) != (1.0, 0.0) and self.kind != "swiglu" and not (self.kind == "geglu" and self.alpha == 1.0):
            raise ConfigError(
                f"ActivationConfig.alpha {self.alpha} and beta {self.beta} have no meaning for {self.kind!r}; leave them at 1 and 0"
            )

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate rows, then up rows; else only up rows."""
        return self.kind in GATED_ACTIVATIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model's sizes are cut over ranks: data only, a process group travels separately.

    tp_size cuts every expert's intermediate_size; ep_size shares out whole experts. placement "linear": rank r holds
    a contiguous range; "round_robin": experts r, r+ep_size, ... uneven: ep_size need not divide num_experts; the first
    ranks then hold one more.
    """

    tp_size: int = 1
    ep_size: int = 1
    placement: str = "linear"
    uneven: bool = False

    def __post_init__(self) -> None:
        _positive("ParallelConfig", tp_size=self.tp_size, ep_size=self.ep_size)
        _one_of("ParallelConfig", "placement", self.placement, PLACEMENTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How a call is carried out.

    tune_max_num_tokens: the largest token count that has a bucket; beyond it the default tactic runs.
    do_finalize: sum the experts' rows into [tokens, hidden]; False returns [tokens, slots, hidden], weighted, zeros
        for remote experts.
    enable_pdl: programmatic dependent launch where a backend has it; None lets the backend decide.
    output: "new": a fresh tensor; "given": the caller passes `out=`; "in_place": hidden_states is overwritten.
    deterministic: only tactics that give the same bits from run to run. batch_invariant: one row gives the same bits
        whatever the batch; implies deterministic.
    """

    tune_max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS
    do_finalize: bool = True
    enable_pdl: bool | None = None
    output: str = "new"
    deterministic: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        _positive("ExecutionConfig", tune_max_num_tokens=self.tune_max_num_tokens)
        _one_of("ExecutionConfig", "output", self.output, ("new", "given", "in_place"))
        if self.output == "in_place" and not self.do_finalize:
            raise ConfigError("ExecutionConfig.output 'in_place' needs do_finalize=True: unfinalized rows don't fit hidden_states")


@dataclasses.dataclass(frozen=True)
class BackendConfig:
    """Base of every backend's parameters. `a | b` is an ordered choice; `name` is the backend's registered name."""

    name: ClassVar[str] = ""

    def __or__(self, other: BackendConfig | BackendOptions) -> BackendOptions:
        return BackendOptions((self,)) | other


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """An ordered choice of backends, each named once."""

    options: tuple[BackendConfig, ...]

    def __post_init__(self) -> None:
        names = [option.name for option in self.options]
        if len(set(names)) != len(names):
            raise ConfigError(f"backends {names} name one backend twice; give each once")

    def __or__(self, other: BackendConfig | BackendOptions) -> BackendOptions:
        return BackendOptions(self.options + (other.options if isinstance(other, BackendOptions) else (other,)))

    def __iter__(self) -> Iterator[BackendConfig]:
        return iter(self.options)


_PARTS: dict[str, type] = {
    "routing": RoutingConfig,
    "experts": ExpertConfig,
    "quant": QuantConfig,
    "activation": ActivationConfig,
    "parallel": ParallelConfig,
    "execution": ExecutionConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer, whole. `**config` unpacks it into `moe_layer` and `MoELayer`; a field left at None is not unpacked."""

    routing: RoutingConfig
    experts: ExpertConfig
    quant: QuantConfig = QuantConfig()
    activation: ActivationConfig = ActivationConfig()
    backends: BackendOptions | BackendConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    execution: ExecutionConfig = ExecutionConfig()

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", self.options)
        tp, ep = self.parallel.tp_size, self.parallel.ep_size
        intermediate, experts = self.experts.intermediate_size, self.routing.num_experts
        if intermediate % tp:
            raise ConfigError(f"intermediate_size {intermediate} is not divisible by tp_size {tp}; choose a tp_size that divides it")
        if ep > experts:
            raise ConfigError(f"ep_size {ep} exceeds num_experts {experts}; choose at most {experts}")
        if experts % ep and not self.parallel.uneven:
            raise ConfigError(
                f"num_experts {experts} is not divisible by ep_size {ep}; choose an ep_size that divides it, or set uneven=True (--allow-uneven)"
            )
        if ep > 1 and self.routing.num_fused_shared_experts:
            raise ConfigError(
                f"num_fused_shared_experts {self.routing.num_fused_shared_experts} with ep_size {ep}: run shared experts apart from the routed ones"
            )
        if self.quant.granularity == "block" and self.quant.block_shape is not None:
            block = max(self.quant.block_shape)  # w13's rows and w2's columns are both cut along intermediate_size
            if tp > 1 and intermediate // tp % block:
                raise ConfigError(
                    f"intermediate_size / tp_size = {intermediate // tp} is not a multiple of the scale block {block}: "
                    "a block would be cut between ranks; choose a smaller tp_size"
                )

    @property
    def options(self) -> BackendOptions | None:
        """`backends` as it is after birth: never a lone config."""
        return BackendOptions((self.backends,)) if isinstance(self.backends, BackendConfig) else self.backends

    def keys(self) -> list[str]:
        """The names that `**config` unpacks."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]

    def __getitem__(self, name: str) -> Any:
        if name not in {field.name for field in dataclasses.fields(self)}:
            raise KeyError(name)
        return getattr(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values with a schema version; `from_dict` reads it back, without evaluating anything."""
        out: dict[str, Any] = {"schema": SCHEMA_VERSION}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, BackendOptions):
                out[field.name] = [{"name": option.name, **dataclasses.asdict(option)} for option in value]
            elif value is not None:
                out[field.name] = dataclasses.asdict(value)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MoEConfig:
        """Rebuild what `to_dict` gave. ConfigError: another schema version, an unknown or a missing field, a part that is no mapping."""
        if data.get("schema") != SCHEMA_VERSION:
            raise ConfigError(f"config schema is {data.get('schema')!r}; this release reads {SCHEMA_VERSION}")
        parts: dict[str, Any] = {}
        for name, value in data.items():
            if name == "schema":
                continue
            if name == "backends":
                if not isinstance(value, (list, tuple)):
                    raise ConfigError(f"backends is {value!r}; it must be a list of mappings, each with its name")
                parts[name] = BackendOptions(tuple(_backend_from_dict(item) for item in value))
            elif name in _PARTS:
                parts[name] = _part_from_dict(_PARTS[name], value)
            else:
                raise ConfigError(f"unknown config field {name!r}; known: {', '.join([*_PARTS, 'backends'])}")
        missing = {"routing", "experts"} - parts.keys()
        if missing:
            raise ConfigError(f"config lacks {', '.join(sorted(missing))}")
        return cls(**parts)


def summarize(plain: Mapping[str, Any]) -> str:
    """A layer in a line for people, from what `MoEConfig.to_dict` gave, of this release or another. KeyError or TypeError: it is none."""
    routing, experts, quant, parallel = (plain[name] for name in ("routing", "experts", "quant", "parallel"))
    return (
        f"{routing['num_experts']} experts, top-{routing['top_k']}, hidden {experts['hidden_size']}, intermediate "
        f"{experts['intermediate_size']}, {quant['weight'] or quant['dtype']}; tp {parallel['tp_size']}, ep {parallel['ep_size']}"
    )


def _part_from_dict(kind: type, value: Mapping[str, Any]) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{kind.__name__} is {value!r}; it must be a mapping of its fields")
    known = {field.name for field in dataclasses.fields(kind) if field.name != "_"}
    unknown = sorted(set(value) - known)
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r} in {kind.__name__}; known: {', '.join(sorted(known))}")
    plain = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    try:
        return kind(**plain)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__}: {error}") from error


def _backend_from_dict(value: Mapping[str, Any]) -> BackendConfig:
    kinds = {kind.name: kind for kind in _all_backend_configs(BackendConfig)}
    if not isinstance(value, Mapping):
        raise ConfigError(f"a backend is {value!r}; it must be a mapping of its name and fields")
    fields = dict(value)
    name = fields.pop("name", None)
    if not isinstance(name, str) or name not in kinds:
        raise ConfigError(f"unknown backend {name!r}; known: {', '.join(sorted(kinds))}")
    config: BackendConfig = _part_from_dict(kinds[name], fields)
    return config


def _all_backend_configs(kind: type[BackendConfig]) -> Iterator[type[BackendConfig]]:
    for child in kind.__subclasses__():
        if child.name:
            yield child
        yield from _all_backend_configs(child)
