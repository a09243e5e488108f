"""Reads the MoE layer of a model from its Hugging Face `config.json`, or by name from the shapes that ship with us.

Owns the field names and routing semantics of each family, checked against the modeling code that transformers, vLLM and the
models' own repositories publish. Knows no tensor and loads no model code. Used by cli and bench; of ours it imports errors and config.

What a family's config leaves out but its modeling code fixes (Mixtral normalises, MiniMax-M2 scores by sigmoid) is stated in
the family's reader below; what the modeling code reads from the config is read here too, and a missing size is refused by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from moe_dist.errors import ConfigError

# Where a multimodal or wrapped config keeps its language model, in the order in which they are searched.
NESTED = ("text_config", "llm_config", "language_config", "language_model", "thinker_config", "llm")
EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
UNGATED = {"relu2": "relu2", "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
TORCH_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# The weight formats that can be asked for by name, in place of the checkpoint's own.
QUANT_NAMES: dict[str, QuantConfig] = {
    "none": QuantConfig(),
    "fp8": QuantConfig(weight="fp8"),
    "fp8-channel": QuantConfig(weight="fp8", granularity="channel"),
    "fp8-block": QuantConfig(weight="fp8", granularity="block", block_shape=(128, 128)),
    "int8": QuantConfig(weight="int8"),
    "int8-channel": QuantConfig(weight="int8", granularity="channel"),
    "mxfp4": QuantConfig(weight="mxfp4"),
    "nvfp4": QuantConfig(weight="nvfp4"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The routed experts of one model, whole. All MoE layers of a model have this one shape.

    name: as it was asked for. family: the config's `model_type`.
    routing: None where `RoutingConfig` can't describe it; `routing_refused` then says why, and only calls that bring topk_ids
        and topk_weights can be tuned. num_experts and top_k are known either way.
    experts: hidden_size is what the experts read and write: the latent size where a model projects to one (Nemotron-H).
    quant: the checkpoint's weight format with the config's dtype; None where `QuantConfig` can't describe it
        (`quant_refused`).
    shared_intermediate_size: of all shared experts together, which every token takes beside the routed ones; 0: none. They
        run apart from the routed experts and are no part of `moe_config`.
    """

    name: str
    family: str
    num_experts: int
    top_k: int
    routing: RoutingConfig | None
    routing_refused: str | None
    experts: ExpertConfig
    activation: ActivationConfig
    quant: QuantConfig | None
    quant_refused: str | None
    num_moe_layers: int
    shared_intermediate_size: int

    def moe_config(
        self,
        *,
        tp_size: int = 1,
        ep_size: int = 1,
        placement: str = "linear",
        uneven: bool = False,
        dtype: str | None = None,
        quant: str | None = None,
        routed: bool = False,
        tune_max_num_tokens: int | None = None,
        backends: BackendConfig | BackendOptions | None = None,
    ) -> MoEConfig:
        """One MoE layer of this model, cut over tp_size x ep_size ranks.

        dtype: of activations and output; None: the checkpoint's. quant: a name of `QUANT_NAMES`; None: the checkpoint's.
        routed: calls bring topk_ids and topk_weights, as a serving engine's do: the routing need not be describable, and sizes alone
            count, here as in the plugins' keys.
        ConfigError: a size doesn't divide, or routing or weight format can't be described.
        """
        if self.routing is None and not routed:
            raise ConfigError(
                f"{self.name}: {self.routing_refused}; tune calls that bring topk_ids and topk_weights instead (routed=True, --routed)"
            )
        if quant is not None and quant not in QUANT_NAMES:
            raise ConfigError(f"weight format is {quant!r}; choose one of {', '.join(QUANT_NAMES)}")
        weights = self.quant if quant is None else QUANT_NAMES[quant]
        if weights is None:
            raise ConfigError(f"{self.name}: {self.quant_refused}; name the weight format to tune for: {', '.join(QUANT_NAMES)}")
        stored = self.quant or QuantConfig()
        execution = ExecutionConfig() if tune_max_num_tokens is None else ExecutionConfig(tune_max_num_tokens=tune_max_num_tokens)
        return MoEConfig(
            routing=self.routing if self.routing is not None and not routed else RoutingConfig(self.num_experts, self.top_k),
            experts=self.experts,
            quant=dataclasses.replace(weights, dtype=dtype or stored.dtype),
            activation=self.activation,
            backends=backends,
            parallel=ParallelConfig(tp_size=tp_size, ep_size=ep_size, placement=placement, uneven=uneven),
            execution=execution,
        )


def known_models() -> tuple[str, ...]:
    """The names that `read_model` knows offline, sorted."""
    return tuple(sorted(_published()))


def read_model(name_or_path: str) -> ModelShape:
    """The MoE shape of a known name or Hugging Face repo id (case does not matter), a `config.json`, or a folder with one.

    ConfigError: unknown name, unreadable file, dense model, unknown family, or a size that the family needs is missing.
    """
    path = Path(name_or_path)
    if path.is_dir() or path.is_file():
        return _read(name_or_path, _load(path))
    if name_or_path.endswith(".json") or name_or_path.startswith((".", "/", "~")):
        raise ConfigError(f"model {name_or_path!r}: no such file or folder{_here(path)}")
    if (found := _known(name_or_path)) is not None:
        return _read(found[0], found[1]["config"])
    published, wanted = _published(), name_or_path.lower()
    close = difflib.get_close_matches(wanted.split("/")[-1], published, n=4, cutoff=0.5)
    hint = f"close names: {', '.join(close)}" if close else f"known: {', '.join(sorted(published))}"
    unknown = f"unknown model {name_or_path!r}, and no such file or folder{_here(path)}"
    raise ConfigError(f"{unknown}; {hint}; for any other, pass its config.json or the folder that holds it")


def experts_said(config: object) -> str | None:
    """The field and number of experts, as "num_experts 128", of a config whose fields are attributes, as engines hold it; None: it says none."""
    return next((f"{field} {count}" for field in EXPERT_COUNTS if (count := getattr(config, field, None))), None)


def _here(path: Path) -> str:
    """Where `path` was looked for."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"


def loadable(name_or_path: str) -> str:
    """What a serving engine loads, and `read_model` reads, for a model that `read_model` knows: its folder, or its repo id."""
    path = Path(name_or_path)
    if path.is_file() and path.name == "config.json":
        return str(path.parent)
    found = None if path.exists() else _known(name_or_path)
    if found is None:
        return name_or_path
    repos: list[str] = found[1]["repos"]
    return next((repo for repo in repos if name_or_path.lower() in (repo.lower(), repo.lower().split("/")[-1])), repos[0])


def _known(name: str) -> tuple[str, dict[str, Any]] | None:
    """The short name and the entry of a published model, by any of its names."""
    wanted = name.lower()
    for short, entry in _published().items():
        repos = [repo.lower() for repo in entry["repos"]]
        if wanted in (short, *repos, *(repo.split("/")[-1] for repo in repos)):
            return short, entry
    return None


def _published() -> dict[str, Any]:
    text = importlib.resources.files(__package__).joinpath("published_shapes.json").read_text()
    shapes: dict[str, Any] = json.loads(text)
    return shapes


def _load(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model {str(path)!r}: the folder holds no config.json")
    raw = _json(file)
    # NVIDIA's ModelOpt checkpoints keep their format beside the config.
    beside = file.parent / "hf_quant_config.json"
    if "quantization_config" not in raw and beside.is_file():
        raw["quantization_config"] = {"quant_method": "modelopt", **_json(beside).get("quantization", {})}
    return raw


def _json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {str(file)!r} can't be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"model {str(file)!r} is no config: it holds a JSON {type(raw).__name__}, not an object")
    return raw


class _Fields:
    """Reads fields of one config and keeps the names of those that are missing or no number, to refuse them all at once."""

    def __init__(self, name: str, raw: Mapping[str, Any]) -> None:
        self.name = name
        self.raw = raw
        self.family = str(raw["model_type"])
        self.wrong: list[str] = []

    def size(self, *names: str) -> int:
        """The first of `names` that is there; a positive integer. 1 stands in until `refuse_wrong`."""
        for name in names:
            value = self.raw.get(name)
            if value is not None:
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
                self.wrong.append(f"{name} (found {value!r})")
                return 1
        self.wrong.append(" or ".join(names))
        return 1

    def get(self, name: str, default: Any) -> Any:
        """The field, or what the family's modeling code takes where it is missing or null."""
        value = self.raw.get(name)
        return default if value is None else value

    def refuse_wrong(self) -> None:
        if self.wrong:
            raise ConfigError(
                f"{self.name}: this {self.family} config lacks {', '.join(self.wrong)}; "
                "pass the model's own config.json, or describe the layer with MoEConfig"
            )


@dataclasses.dataclass(kw_only=True)
class _Layer:
    """What a family's reader finds; the rest is the same for all. routing: keyword fields of RoutingConfig, or why there are none."""

    experts: tuple[str, ...]
    intermediate: str
    routing: dict[str, Any] | str
    moe_layers: int
    hidden: str = "hidden_size"
    activation: ActivationConfig | None = None  # None: gated, by hidden_act
    bias: bool = False
    shared_intermediate_size: int = 0


def _mixtral(fields: _Fields) -> _Layer:
    return _Layer(
        experts=("num_local_experts", "num_experts"),
        intermediate="intermediate_size",
        routing={"scoring": "softmax", "renormalize": True},
        moe_layers=fields.size("num_hidden_layers"),
    )


def _phimoe(fields: _Fields) -> _Layer:
    mixed = "Phi-MoE routes by sparsemixer: each chosen expert is weighted by a softmax over the logits close to it alone"
    return dataclasses.replace(_mixtral(fields), routing=f"{mixed}, which RoutingConfig can't describe")


def _olmoe(fields: _Fields) -> _Layer:
    routing = {"scoring": "softmax", "renormalize": bool(fields.get("norm_topk_prob", False))}
    return dataclasses.replace(_mixtral(fields), experts=("num_experts", "num_local_experts"), routing=routing)


def _qwen(fields: _Fields) -> _Layer:
    """Qwen2-MoE, Qwen3-MoE, Qwen3-Next; the last shares one gated expert."""
    layers = fields.size("num_hidden_layers")
    dense = set(fields.get("mlp_only_layers", ()))
    step = fields.get("decoder_sparse_step", 1)
    return _Layer(
        experts=("num_experts", "num_local_experts"),
        intermediate="moe_intermediate_size",
        routing={"scoring": "softmax", "renormalize": bool(fields.get("norm_topk_prob", fields.family == "qwen3_next"))},
        moe_layers=sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        shared_intermediate_size=fields.get("shared_expert_intermediate_size", 0),
    )


def _qwen_normalised(fields: _Fields) -> _Layer:
    """Qwen3.5 and Qwen3-VL normalise whatever the config says."""
    return dataclasses.replace(_qwen(fields), routing={"scoring": "softmax", "renormalize": True})


def _deepseek_routing(fields: _Fields, scoring: str, method: str) -> dict[str, Any] | str:
    """`method` and `scoring` stand in where the config has none, as transformers writes it."""
    scoring = fields.get("scoring_func", scoring)
    method = fields.get("topk_method", method)
    if scoring not in ("softmax", "sigmoid"):
        return f"{fields.family} scores by {scoring!r}, which RoutingConfig can't describe"
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        return f"{fields.family} chooses experts by {method!r}, which RoutingConfig can't describe"
    routing = {
        "scoring": scoring,
        "renormalize": bool(fields.get("norm_topk_prob", method == "noaux_tc")),
        "routed_scaling_factor": float(fields.get("routed_scaling_factor", 1.0)),
        "correction_bias": "selection" if method == "noaux_tc" else None,
    }
    if method != "greedy" and fields.get("n_group", 1) > 1:  # one group limits nothing
        routing |= {"n_group": fields.size("n_group"), "topk_group": fields.size("topk_group")}
    return routing


def _deepseek(fields: _Fields, scoring: str, method: str) -> _Layer:
    layers = fields.size("num_hidden_layers")
    frequency = fields.get("moe_layer_freq", 1)
    if kinds := fields.get("mlp_layer_types", None):
        moe_layers = list(kinds).count("sparse")
    elif isinstance(frequency, Sequence):
        moe_layers = sum(map(bool, frequency))
    else:
        moe_layers = sum(layer % frequency == 0 for layer in range(fields.get("first_k_dense_replace", 0), layers))
    return _Layer(
        experts=("n_routed_experts", "num_local_experts", "num_experts"),
        intermediate="moe_intermediate_size",
        routing=_deepseek_routing(fields, scoring, method),
        moe_layers=moe_layers,
        shared_intermediate_size=fields.get("n_shared_experts", 0) * fields.get("moe_intermediate_size", 0),
    )


def _deepseek_v2(fields: _Fields) -> _Layer:
    return _deepseek(fields, "softmax", "greedy")


def _deepseek_v3(fields: _Fields) -> _Layer:
    """DeepSeek-V3 and R1, Kimi-K2, GLM-4.5 and GLM-5."""
    return _deepseek(fields, "sigmoid", "noaux_tc")


def _gpt_oss(fields: _Fields) -> _Layer:
    activation = ActivationConfig("swiglu", alpha=fields.get("swiglu_alpha", 1.702), beta=1.0, limit=fields.get("swiglu_limit", 7.0))
    # A softmax over the chosen logits is the softmax over all, renormalised over the chosen.
    return dataclasses.replace(_mixtral(fields), activation=activation, bias=True)


def _minimax_m2(fields: _Fields) -> _Layer:
    scoring = fields.get("scoring_func", "sigmoid")
    routing: dict[str, Any] | str = {
        "scoring": scoring,
        "renormalize": True,
        "correction_bias": "selection" if fields.get("use_routing_bias", True) else None,
    }
    if scoring != "sigmoid":
        routing = f"{fields.family} scores by {scoring!r}; its modeling code knows sigmoid alone"
    return dataclasses.replace(
        _mixtral(fields),
        routing=routing,
        shared_intermediate_size=fields.get("shared_intermediate_size", 0),
    )


def _llama4(fields: _Fields) -> _Layer:
    layers = fields.size("num_hidden_layers")
    listed = fields.get("moe_layers", None)
    step = fields.get("interleave_moe_layer_step", 1)
    top_k = fields.size("num_experts_per_tok")
    routing: dict[str, Any] | str = {"scoring": "sigmoid", "renormalize": False, "weight_on_input": True}
    if top_k != 1:
        routing = f"Llama-4 weights each expert's input; with top-{top_k} that is more than RoutingConfig can describe"
    return _Layer(
        experts=("num_local_experts", "num_experts"),
        intermediate="intermediate_size",
        routing=routing,
        moe_layers=len(listed) if listed is not None else len(range(step - 1, layers, step)),
        shared_intermediate_size=fields.get("intermediate_size", 0),
    )


def _nemotron_h(fields: _Fields) -> _Layer:
    pattern = fields.get("hybrid_override_pattern", None)
    kinds = fields.get("layers_block_type", fields.get("layer_types", None))
    if pattern is None and kinds is None:
        fields.wrong.append("hybrid_override_pattern or layers_block_type")
    moe_layers = str(pattern).count("E") if pattern is not None else list(kinds or ()).count("moe")
    kind = fields.get("mlp_hidden_act", "relu2")
    if kind not in UNGATED:
        fields.wrong.append(f"a known mlp_hidden_act (found {kind!r}; known: {', '.join(UNGATED)})")
    return _Layer(
        experts=("n_routed_experts", "num_local_experts"),
        intermediate="moe_intermediate_size",
        routing=_deepseek_routing(fields, "sigmoid", "noaux_tc"),
        moe_layers=moe_layers,
        hidden="hidden_size" if fields.raw.get("moe_latent_size") is None else "moe_latent_size",
        activation=ActivationConfig(UNGATED.get(kind, "relu2")),
        shared_intermediate_size=fields.get("moe_shared_expert_intermediate_size", 0),
    )


FAMILIES: dict[str, Callable[[_Fields], _Layer]] = {
    "mixtral": _mixtral,
    "phimoe": _phimoe,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen,
    "qwen3_moe": _qwen,
    "qwen3_next": _qwen,
    "qwen3_vl_moe_text": _qwen_normalised,
    "qwen3_5_moe_text": _qwen_normalised,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _deepseek_v3,
    "glm4_moe_lite": _deepseek_v3,
    "glm4v_moe_text": _deepseek_v3,
    "glm_moe_dsa": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax_m2,
    "llama4_text": _llama4,
    "nemotron_h": _nemotron_h,
}


def _read(name: str, raw: Mapping[str, Any]) -> ModelShape:
    chain = _language_model(raw)
    inner = chain[-1]
    if inner.get("model_type") not in FAMILIES:
        raise _unknown(name, chain)
    fields = _Fields(name, inner)
    try:
        layer = FAMILIES[fields.family](fields)
    except (TypeError, ValueError, ZeroDivisionError) as error:  # a field of another type than its family writes
        raise ConfigError(f"{name}: a field of this {fields.family} config has no meaning: {error}") from error
    if all(not fields.raw.get(field) for field in layer.experts) or layer.moe_layers == 0:
        raise _dense(name, fields.family)
    num_experts, top_k = fields.size(*layer.experts), fields.size("num_experts_per_tok")
    hidden, intermediate = fields.size(layer.hidden), fields.size(layer.intermediate)
    kind = fields.get("hidden_act", "silu")
    if layer.activation is None and kind not in GATED:
        fields.wrong.append(f"a known hidden_act (found {kind!r}; known: {', '.join(GATED)})")
    fields.refuse_wrong()
    found = next((part["quantization_config"] for part in reversed(chain) if part.get("quantization_config")), None)
    quant = _quantisation(found)
    torch_dtype = str(inner.get("torch_dtype", inner.get("dtype", raw.get("torch_dtype", raw.get("dtype", "bfloat16")))))
    return ModelShape(
        name=name,
        family=fields.family,
        num_experts=num_experts,
        top_k=top_k,
        routing=None if isinstance(layer.routing, str) else RoutingConfig(num_experts, top_k, **layer.routing),
        routing_refused=layer.routing if isinstance(layer.routing, str) else None,
        experts=ExpertConfig(hidden_size=hidden, intermediate_size=intermediate, bias=layer.bias),
        activation=layer.activation or ActivationConfig(GATED[kind]),
        quant=None if isinstance(quant, str) else dataclasses.replace(quant, dtype=TORCH_DTYPES.get(torch_dtype, "bf16")),
        quant_refused=quant if isinstance(quant, str) else None,
        num_moe_layers=layer.moe_layers,
        shared_intermediate_size=layer.shared_intermediate_size,
    )


def _language_model(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts from the outermost config down to the first that is of a known family; to the last of them where none is."""
    if raw.get("model_type") in FAMILIES:
        return [raw]
    chain = [raw]
    for name in NESTED:
        part = raw.get(name)
        if isinstance(part, Mapping):
            below = _language_model(part)
            if below[-1].get("model_type") in FAMILIES:
                return [raw, *below]
            if len(chain) == 1:
                chain = [raw, *below]
    return chain


def _unknown(name: str, chain: Sequence[Mapping[str, Any]]) -> ConfigError:
    families = ", ".join(sorted({str(part["model_type"]) for part in chain if part.get("model_type")})) or "none"
    counts = sorted({field for part in chain for field in EXPERT_COUNTS if part.get(field)})
    if not counts:
        return _dense(name, families)
    return ConfigError(
        f"{name}: model_type {families} is of no family that is known here, though it has experts ({', '.join(counts)}); "
        f"known: {', '.join(sorted(FAMILIES))}; describe the layer with MoEConfig"
    )


def _dense(name: str, family: str) -> ConfigError:
    return ConfigError(f"{name} (model_type {family}) is a dense model: it has no experts to tune; choose a mixture-of-experts model")


def _quantisation(found: Any) -> QuantConfig | str:
    """The weight format of the experts, or why it can't be described. None: unquantised."""
    if not found:
        return QuantConfig()
    if not isinstance(found, Mapping):
        return f"the checkpoint's quantization_config is {found!r}, not an object"
    method, algorithm = found.get("quant_method"), found.get("quant_algo")
    if method == "fp8" and algorithm is None:
        block = found.get("weight_block_size")
        return QuantConfig(weight="fp8", block_shape=tuple(block)) if block else QuantConfig(weight="fp8")
    if method == "mxfp4":
        return QuantConfig(weight="mxfp4")
    if method == "modelopt" and algorithm in ("FP8", "NVFP4"):
        return QuantConfig(weight=str(algorithm).lower())
    groups = found.get("config_groups") or {}
    if method == "compressed-tensors" and len(groups) == 1:
        return _compressed_tensors(found, next(iter(groups.values())).get("weights") or {})
    described = " ".join(str(word) for word in (method, algorithm) if word)
    return f"the checkpoint's quantisation ({described or 'unnamed'}) is none that QuantConfig describes"


def _compressed_tensors(found: Mapping[str, Any], weights: Mapping[str, Any]) -> QuantConfig | str:
    kind, bits, strategy, group = (weights.get(name) for name in ("type", "num_bits", "strategy", "group_size"))
    number = {"float": "fp8", "int": "int8"}.get(str(kind)) if bits == 8 else None
    if number and strategy in ("tensor", "channel"):
        return QuantConfig(weight=number, granularity=strategy)
    if number and strategy == "block" and weights.get("block_structure"):
        return QuantConfig(weight=number, granularity="block", block_shape=tuple(weights["block_structure"]))
    if (kind, bits) == ("float", 4) and group in (16, 32):
        return QuantConfig(weight="nvfp4" if group == 16 else "mxfp4")
    return f"the checkpoint's quantisation ({found.get('format') or 'compressed-tensors'}: {kind} {bits} bits by {strategy}) is none that QuantConfig describes"
