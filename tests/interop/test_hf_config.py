"""Model shapes: every family's field names and routing, nested configs, files and folders, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_dist.config import ActivationConfig, QuantConfig, RoutingConfig
from moe_dist.errors import ConfigError
from moe_dist.interop.hf_config import FAMILIES, known_models, loadable, read_model

FP8_BLOCK = QuantConfig(weight="fp8", granularity="block", block_shape=(128, 128))

# (name, routing, hidden, intermediate, MoE layers, shared intermediate, weight format): one of each family and routing kind,
# from the model cards. Layers: of all, less the leading or interleaved dense ones.
CARDS: list[tuple[str, RoutingConfig | None, int, int, int, int, QuantConfig]] = [
    ("mixtral-8x7b", RoutingConfig(8, 2), 4096, 14336, 32, 0, QuantConfig()),
    ("qwen2-57b-a14b", RoutingConfig(64, 8, renormalize=False), 3584, 2560, 28, 20480, QuantConfig()),
    ("qwen3-30b-a3b", RoutingConfig(128, 8), 2048, 768, 48, 0, QuantConfig()),
    ("qwen3-235b-a22b-fp8", RoutingConfig(128, 8), 4096, 1536, 94, 0, FP8_BLOCK),
    ("qwen3-next-80b-a3b", RoutingConfig(512, 10), 2048, 512, 48, 512, QuantConfig()),
    ("qwen3.5-35b-a3b", RoutingConfig(256, 8), 2048, 512, 40, 512, QuantConfig()),
    ("olmoe-1b-7b", RoutingConfig(64, 8, renormalize=False), 2048, 1024, 16, 0, QuantConfig()),
    ("deepseek-v2-lite", RoutingConfig(64, 6, renormalize=False), 2048, 1408, 26, 2816, QuantConfig()),
    (
        "deepseek-v2",
        RoutingConfig(160, 6, renormalize=False, n_group=8, topk_group=3, routed_scaling_factor=16.0),
        5120,
        1536,
        59,
        3072,
        QuantConfig(),
    ),
    ("deepseek-v3", RoutingConfig.deepseek_v3(), 7168, 2048, 58, 2048, FP8_BLOCK),
    # One group limits nothing, so there is none.
    (
        "kimi-k2",
        RoutingConfig.deepseek_v3(384, n_group=None, topk_group=None, routed_scaling_factor=2.827),
        7168,
        2048,
        60,
        2048,
        FP8_BLOCK,
    ),
    ("glm-4.5", RoutingConfig.deepseek_v3(160, n_group=None, topk_group=None), 5120, 1536, 89, 1536, QuantConfig()),
    (
        "glm-4.5-air",
        RoutingConfig.deepseek_v3(128, n_group=None, topk_group=None, routed_scaling_factor=1.0),
        4096,
        1408,
        45,
        1408,
        QuantConfig(),
    ),
    ("gpt-oss-20b", RoutingConfig(32, 4), 2880, 2880, 24, 0, QuantConfig(weight="mxfp4")),
    ("minimax-m2", RoutingConfig(256, 8, scoring="sigmoid", correction_bias="selection"), 3072, 1536, 62, 0, FP8_BLOCK),
    ("llama-4-scout", RoutingConfig.llama4(16), 5120, 8192, 48, 8192, QuantConfig()),
    ("llama-4-maverick", RoutingConfig.llama4(128), 5120, 8192, 24, 8192, QuantConfig()),
    ("nemotron-3-nano-30b", RoutingConfig.deepseek_v3(128, 6, n_group=None, topk_group=None), 2688, 1856, 23, 3712, QuantConfig()),
    # The experts of Super work in a latent space of 1024, not in the model's 4096.
    (
        "nemotron-3-super-120b",
        RoutingConfig.deepseek_v3(512, 22, n_group=None, topk_group=None, routed_scaling_factor=5.0),
        1024,
        2688,
        40,
        5376,
        QuantConfig(),
    ),
    ("phi-3.5-moe", None, 4096, 6400, 32, 0, QuantConfig()),
]


def config(**changes: Any) -> dict[str, Any]:
    """A small Qwen3-MoE config; `None` removes a field."""
    fields: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "hidden_act": "silu",
    } | changes
    return {name: value for name, value in fields.items() if value is not None}


def written(folder: Path, raw: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return str(path)


@pytest.mark.parametrize(("name", "routing", "hidden", "intermediate", "layers", "shared", "quant"), CARDS, ids=[card[0] for card in CARDS])
def test_published_shape(
    name: str, routing: RoutingConfig | None, hidden: int, intermediate: int, layers: int, shared: int, quant: QuantConfig
) -> None:
    shape = read_model(name)
    assert shape.routing == routing
    assert (shape.experts.hidden_size, shape.experts.intermediate_size) == (hidden, intermediate)
    assert (shape.num_moe_layers, shape.shared_intermediate_size) == (layers, shared)
    assert shape.quant == quant


def test_every_published_shape_gives_a_layer() -> None:
    assert {card[0] for card in CARDS} <= set(known_models())
    for name in known_models():
        shape = read_model(name)
        config = shape.moe_config(routed=shape.routing is None)
        assert (config.routing.num_experts, config.routing.top_k) == (shape.num_experts, shape.top_k)


def test_every_published_family_is_read_and_every_asked_for_family_is_published() -> None:
    asked = {"mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe"}
    asked |= {"gpt_oss", "minimax_m2", "llama4_text", "nemotron_h", "phimoe"}
    assert asked <= {read_model(name).family for name in known_models()} <= set(FAMILIES)


def test_activations_of_the_families() -> None:
    assert read_model("gpt-oss-120b").activation == ActivationConfig("swiglu", alpha=1.702, beta=1.0, limit=7.0)
    assert read_model("gpt-oss-120b").experts.bias
    assert read_model("nemotron-3-nano-30b").activation == ActivationConfig("relu2")
    assert read_model("mixtral-8x7b").activation == ActivationConfig("swiglu")


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "qwen/qwen3-30b-a3b-INSTRUCT-2507"])
def test_name_is_case_insensitive_and_may_be_a_repo_id(name: str) -> None:
    assert read_model(name).name == "qwen3-30b-a3b"


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),  # our short name
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"),  # of a repo that shares another's shape
        ("qwen/qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("someone/unknown", "someone/unknown"),
    ],
)
def test_what_an_engine_loads_is_a_repo_id(name: str, loaded: str) -> None:
    assert loadable(name) == loaded


def test_every_published_shape_names_what_an_engine_loads() -> None:
    for name in known_models():
        assert loadable(name).count("/") == 1
        assert read_model(loadable(name)).name == name


def test_what_an_engine_loads_is_a_folder(tmp_path: Path) -> None:
    path = written(tmp_path, config())
    assert loadable(path) == loadable(str(tmp_path)) == str(tmp_path)
    other = tmp_path / "other.json"  # no engine loads it, but tuning reads it
    other.write_text(Path(path).read_text())
    assert loadable(str(other)) == str(other)


@pytest.mark.parametrize("as_folder", [False, True])
def test_file_and_folder(tmp_path: Path, as_folder: bool) -> None:
    path = written(tmp_path, config(mlp_only_layers=[0], decoder_sparse_step=2, torch_dtype="float16"))
    shape = read_model(str(tmp_path) if as_folder else path)
    assert shape.routing == RoutingConfig(8, 2)
    assert shape.num_moe_layers == 3  # of layers 0..5 every second: 1, 3, 5; layer 0 is dense anyway
    assert shape.moe_config().quant.dtype == "fp16"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: {"model_type": "llava", "text_config": inner},
        lambda inner: {"model_type": "internvl_chat", "vision_config": {"hidden_size": 9}, "llm_config": inner},
        lambda inner: {"model_type": "deepseek_vl_v2", "language_config": inner},
        lambda inner: {"model_type": "omni", "talker_config": {"model_type": "qwen3_moe"}, "thinker_config": {"text_config": inner}},
    ],
    ids=["text_config", "llm_config", "language_config", "two levels down"],
)
def test_nested_language_model(tmp_path: Path, wrap: Any) -> None:
    outer = wrap(config()) | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    shape = read_model(written(tmp_path, outer))
    assert shape.experts.hidden_size == 64
    assert shape.quant == FP8_BLOCK  # stated once, on the outside


def test_newer_transformers_names(tmp_path: Path) -> None:
    # transformers 5 writes num_local_experts for families that said num_experts, and lists the kind of every layer.
    assert read_model(written(tmp_path, config(num_experts=None, num_local_experts=8))).num_experts == 8
    glm = config(model_type="glm4_moe", n_routed_experts=8, num_experts=None, mlp_layer_types=["dense"] + ["sparse"] * 5)
    assert read_model(written(tmp_path, glm)).num_moe_layers == 5


@pytest.mark.parametrize(
    ("found", "quant"),
    [
        ({"quant_method": "fp8"}, QuantConfig(weight="fp8")),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, QuantConfig(weight="fp8", block_shape=(64, 32))),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, QuantConfig(weight="nvfp4")),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "int", "num_bits": 8, "strategy": "channel"}}},
            },
            QuantConfig(weight="int8", granularity="channel"),
        ),
    ],
)
def test_quantisation_found(tmp_path: Path, found: dict[str, Any], quant: QuantConfig) -> None:
    assert read_model(written(tmp_path, config(quantization_config=found))).quant == quant


def test_modelopt_file_beside_the_config(tmp_path: Path) -> None:
    written(tmp_path, config())
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert read_model(str(tmp_path)).quant == QuantConfig(weight="nvfp4")


def test_quantisation_that_is_not_described_asks_for_a_name(tmp_path: Path) -> None:
    shape = read_model(written(tmp_path, config(quantization_config={"quant_method": "awq", "bits": 4})))
    with pytest.raises(ConfigError, match=r"quantisation \(awq\) is none that QuantConfig describes; name the weight format .* fp8-block"):
        shape.moe_config()
    assert shape.moe_config(quant="none").quant == QuantConfig()
    assert shape.moe_config(quant="fp8-block", dtype="fp16").quant == QuantConfig(
        dtype="fp16", weight="fp8", granularity="block", block_shape=(128, 128)
    )
    with pytest.raises(ConfigError, match="weight format is 'fp9'; choose one of none, fp8"):
        shape.moe_config(quant="fp9")


def test_routing_that_is_not_described_is_refused_but_its_sizes_tune() -> None:
    shape = read_model("phi-3.5-moe")
    with pytest.raises(ConfigError, match=r"phi-3\.5-moe: Phi-MoE routes by sparsemixer.*--routed"):
        shape.moe_config()
    assert shape.moe_config(routed=True).routing == RoutingConfig(16, 2)


def test_share_that_does_not_divide() -> None:
    with pytest.raises(ConfigError, match="num_experts 64 is not divisible by ep_size 3; choose an ep_size that divides it"):
        read_model("olmoe-1b-7b").moe_config(ep_size=3)
    assert read_model("olmoe-1b-7b").moe_config(ep_size=3, uneven=True).parallel.uneven
    with pytest.raises(ConfigError, match="intermediate_size 1024 is not divisible by tp_size 3"):
        read_model("olmoe-1b-7b").moe_config(tp_size=3)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (config(moe_intermediate_size=None, hidden_size=None), "this qwen3_moe config lacks hidden_size, moe_intermediate_size"),
        (config(hidden_size="64"), r"lacks hidden_size \(found '64'\)"),
        (config(hidden_act="xielu"), "a known hidden_act .found 'xielu'; known: silu"),
        (config(decoder_sparse_step=0), "a field of this qwen3_moe config has no meaning"),
        (config(model_type="qwen3", num_experts=None), r"\(model_type qwen3\) is a dense model"),
        (config(num_experts=0), r"\(model_type qwen3_moe\) is a dense model"),
        (config(mlp_only_layers=[0, 1, 2, 3, 4, 5]), "is a dense model"),
        (
            {"model_type": "nemotron_h", "n_routed_experts": 8, "num_experts_per_tok": 2, "hybrid_override_pattern": "M-M*"},
            "is a dense model",
        ),
        (config(model_type="novel_moe"), r"model_type novel_moe is of no family that is known here, though it has experts \(num_experts\)"),
        (config(model_type=None), "model_type none is of no family that is known here"),
        (config(top_k=2, num_experts_per_tok=9), "top_k 9 exceeds num_experts 8"),
        ([1, 2], "it holds a JSON list, not an object"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path: Path, raw: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(written(tmp_path, raw))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-30b", r"unknown model 'qwen3-30b', and no such .*; close names: qwen3-30b-a3b.*pass its config.json or the folder"),
        ("zzz", "unknown model 'zzz', and no such file or folder in /.+; known: deepseek-r1, "),
        ("./missing/config.json", r"model '\./missing/config\.json': no such file or folder in /.+"),
        ("models/missing", "unknown model 'models/missing', and no such file or folder in /"),
        ("/missing/model", "model '/missing/model': no such file or folder$"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(name)


def test_folder_without_config_and_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder holds no config\.json"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read: Expecting property name"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scoring_func": "sqrtsoftplus"}, "scores by 'sqrtsoftplus'"),
        ({"topk_method": "hash"}, "chooses experts by 'hash'"),
    ],
)
def test_deepseek_routing_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    raw = config(model_type="deepseek_v3", num_experts=None, n_routed_experts=8, **changes)
    shape = read_model(written(tmp_path, raw))
    assert shape.routing is None
    assert reason in str(shape.routing_refused)


def test_deepseek_config_written_by_transformers_takes_the_family_s_method(tmp_path: Path) -> None:
    # No scoring_func and no topk_method: V3 is noaux_tc over sigmoid, V2 greedy over softmax, groups or not.
    common = {"num_experts": None, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0}
    v3 = read_model(written(tmp_path, config(model_type="deepseek_v3", **common)))
    assert v3.routing == RoutingConfig(
        8, 2, scoring="sigmoid", n_group=4, topk_group=2, correction_bias="selection", routed_scaling_factor=2.0
    )
    v2 = read_model(written(tmp_path, config(model_type="deepseek_v2", **common)))
    assert v2.routing == RoutingConfig(8, 2, routed_scaling_factor=2.0)


def test_llama4_beyond_top_1_is_refused(tmp_path: Path) -> None:
    raw = config(model_type="llama4_text", num_experts=None, num_local_experts=8, intermediate_size=32)
    assert "with top-2" in str(read_model(written(tmp_path, raw)).routing_refused)
