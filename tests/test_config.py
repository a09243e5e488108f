"""Configs: what each refuses at birth, and that they come back whole from text and from plain values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

import moe_dist as md
from moe_dist.tuning.problem import digest

EXPERTS = md.ExpertConfig(hidden_size=64, intermediate_size=48)


def layer(experts: md.ExpertConfig = EXPERTS, routing: md.RoutingConfig | None = None, **parts: object) -> md.MoEConfig:
    return md.MoEConfig(routing=routing or md.RoutingConfig(8, 2), experts=experts, **parts)  # type: ignore[arg-type]


WRONG: list[tuple[Callable[[], object], str]] = [
    # routing
    (lambda: md.RoutingConfig(0, 1), r"RoutingConfig.num_experts is 0; it must be an integer of at least 1"),
    (lambda: md.RoutingConfig(8, True), r"RoutingConfig.top_k is True; it must be an integer of at least 1"),
    (lambda: md.RoutingConfig(8.0, 2), r"RoutingConfig.num_experts is 8.0; it must be an integer"),  # type: ignore[arg-type]
    (lambda: md.RoutingConfig(8, 9), r"RoutingConfig.top_k 9 exceeds num_experts 8; choose at most 8"),
    (lambda: md.RoutingConfig(8, 2, scoring="relu"), r"RoutingConfig.scoring is 'relu'; choose one of 'softmax', 'sigmoid'"),
    (lambda: md.RoutingConfig(8, 2, correction_bias="both"), r"RoutingConfig.correction_bias is 'both'; choose one of None, 'selection'"),
    (lambda: md.RoutingConfig(8, 2, n_group=2), r"RoutingConfig.n_group 2 and topk_group None: give both or neither"),
    (
        lambda: md.RoutingConfig(8, 2, n_group=3, topk_group=1),
        r"num_experts 8 is not divisible by n_group 3; choose an n_group that divides",
    ),
    (lambda: md.RoutingConfig(8, 2, n_group=4, topk_group=5), r"topk_group 5 exceeds n_group 4; choose at most 4"),
    (lambda: md.RoutingConfig(8, 5, n_group=4, topk_group=2), r"top_k 5 exceeds the 4 experts of 2 groups; raise topk_group"),
    (lambda: md.RoutingConfig(8, 2, num_fused_shared_experts=-1), r"num_fused_shared_experts is -1; it must be at least 0"),
    (lambda: md.RoutingConfig(8, 2, weight_on_input=True), r"weight_on_input needs top_k 1 and no fused shared experts, not top_k 2 and 0"),
    (lambda: md.RoutingConfig(8, 2, routed_scaling_factor=float("nan")), r"routed_scaling_factor is nan; it must be a finite number"),
    # formats
    (lambda: md.QuantConfig(dtype="fp64"), r"QuantConfig.dtype is 'fp64'; choose one of 'bf16', 'fp16', 'fp32'"),
    (lambda: md.QuantConfig(weight="fp4"), r"QuantConfig.weight is 'fp4'; choose one of None, 'fp8', 'int8', 'mxfp4', 'nvfp4'"),
    (lambda: md.QuantConfig(granularity="block"), r"granularity 'block' and block_shape None need a quantised weight; name one of"),
    (
        lambda: md.QuantConfig(weight="fp8", granularity="row"),
        r"QuantConfig.granularity is 'row'; choose one of 'tensor', 'channel', 'block'",
    ),
    (lambda: md.QuantConfig(weight="fp8", block_shape=(128,)), r"block_shape is \(128,\); it must be \(rows, columns\)"),  # type: ignore[arg-type]
    (lambda: md.QuantConfig(weight="fp8", block_shape=(128, 0)), r"QuantConfig.block_shape.columns is 0; it must be an integer"),
    (
        lambda: md.QuantConfig(weight="fp8", granularity="tensor", block_shape=(8, 8)),
        r"block_shape \(8, 8\) needs granularity 'block', not 'tensor'",
    ),
    # experts, activation, parallel, execution
    (lambda: md.ExpertConfig(hidden_size=0, intermediate_size=1), r"ExpertConfig.hidden_size is 0; it must be an integer of at least 1"),
    (lambda: md.ActivationConfig("swish"), r"ActivationConfig.kind is 'swish'; choose one of 'swiglu'"),
    (lambda: md.ActivationConfig(limit=0.0), r"ActivationConfig.limit is 0.0; it must be above 0, or None for no clamp"),
    (lambda: md.ActivationConfig(limit=float("inf")), r"ActivationConfig.limit is inf; it must be a finite number"),
    (lambda: md.ActivationConfig("relu2", beta=1.0), r"alpha 1.0 and beta 1.0 have no meaning for 'relu2'; leave them at 1 and 0"),
    (lambda: md.ActivationConfig("geglu", alpha=1.7), r"alpha 1.7 and beta 0.0 have no meaning for 'geglu'"),
    (lambda: md.ParallelConfig(tp_size=0), r"ParallelConfig.tp_size is 0; it must be an integer of at least 1"),
    (lambda: md.ParallelConfig(placement="random"), r"ParallelConfig.placement is 'random'; choose one of 'linear', 'round_robin'"),
    (lambda: md.ExecutionConfig(tune_max_num_tokens=0), r"ExecutionConfig.tune_max_num_tokens is 0; it must be an integer"),
    (lambda: md.ExecutionConfig(output="mine"), r"ExecutionConfig.output is 'mine'; choose one of 'new', 'given', 'in_place'"),
    (lambda: md.ExecutionConfig(output="in_place", do_finalize=False), r"'in_place' needs do_finalize=True: unfinalized rows don't fit"),
    # backends
    (lambda: md.TorchLoopConfig() | md.TorchLoopConfig(chunk_rows=(8,)), r"name one backend twice; give each once"),
    (
        lambda: md.TorchGroupedConfig(methods=("cutlass",)),
        r"TorchGroupedConfig.methods is \('cutlass',\); choose some of \('grouped_mm', 'segments'\)",
    ),
    (lambda: md.TorchGroupedConfig(methods=()), r"TorchGroupedConfig.methods is \(\); choose some"),
    (lambda: md.TorchDenseConfig(max_experts=0), r"TorchDenseConfig.max_experts is 0; it must be an integer of at least 1"),
    # the whole: sizes that don't divide
    (
        lambda: layer(parallel=md.ParallelConfig(tp_size=5)),
        r"intermediate_size 48 is not divisible by tp_size 5; choose a tp_size that divides it",
    ),
    (lambda: layer(parallel=md.ParallelConfig(ep_size=3)), r"num_experts 8 is not divisible by ep_size 3; choose .*, or set uneven=True"),
    (lambda: layer(parallel=md.ParallelConfig(ep_size=9, uneven=True)), r"ep_size 9 exceeds num_experts 8; choose at most 8"),
    (
        lambda: layer(routing=md.RoutingConfig(8, 2, num_fused_shared_experts=1), parallel=md.ParallelConfig(ep_size=2)),
        r"num_fused_shared_experts 1 with ep_size 2: run shared experts apart from the routed ones",
    ),
    (  # 320 over 4 is 80 columns a rank, within a block of 128
        lambda: layer(
            md.ExpertConfig(hidden_size=256, intermediate_size=320),
            quant=md.QuantConfig(weight="fp8", granularity="block"),
            parallel=md.ParallelConfig(tp_size=4),
        ),
        r"intermediate_size / tp_size = 80 is not a multiple of the scale block 128: a block would be cut between ranks; choose a smaller",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message[:48] for _, message in WRONG])
def test_refused_at_birth(make: Callable[[], object], message: str) -> None:
    with pytest.raises(md.ConfigError, match=message):
        make()


def test_uneven_and_whole_blocks_are_accepted() -> None:
    layer(parallel=md.ParallelConfig(ep_size=3, uneven=True))
    layer(
        md.ExpertConfig(hidden_size=256, intermediate_size=1536),
        quant=md.QuantConfig(weight="fp8", granularity="block"),
        parallel=md.ParallelConfig(tp_size=4),  # 384 columns a rank: three blocks
    )


def test_configs_are_frozen_and_keyword_only_where_a_swap_is_silent() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EXPERTS.hidden_size = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        md.ExpertConfig(64, 48)  # type: ignore[misc]
    with pytest.raises(TypeError):
        md.ParallelConfig(2, 4)  # type: ignore[misc]


WHOLE = {
    "least": layer(),
    "most": layer(
        md.ExpertConfig(hidden_size=256, intermediate_size=512, bias=True),
        routing=md.RoutingConfig.deepseek_v3(16, 4, n_group=4, topk_group=2),
        quant=md.QuantConfig(dtype="fp16", weight="fp8", block_shape=(128, 64)),
        activation=md.ActivationConfig(limit=7, alpha=1.702, beta=1),
        backends=md.TorchDenseConfig(max_experts=3) | md.TorchLoopConfig(chunk_rows=(0, 8)) | md.ReferenceConfig(),
        parallel=md.ParallelConfig(tp_size=2, ep_size=3, placement="round_robin", uneven=True),
        execution=md.ExecutionConfig(tune_max_num_tokens=64, do_finalize=False, enable_pdl=True, output="given", batch_invariant=True),
    ),
    "one backend": layer(backends=md.TorchGroupedConfig(methods=("segments",))),
}


@pytest.mark.parametrize("name", WHOLE)
def test_repr_is_constructor_syntax(name: str) -> None:
    assert eval(repr(WHOLE[name]), vars(md)) == WHOLE[name]


@pytest.mark.parametrize("name", WHOLE)
def test_plain_values_come_back_even_through_json(name: str) -> None:
    plain = WHOLE[name].to_dict()
    assert plain["schema"] == 1
    assert md.MoEConfig.from_dict(plain) == WHOLE[name]
    assert md.MoEConfig.from_dict(json.loads(json.dumps(plain))) == WHOLE[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "config schema is 2; this release reads 1"),
        ({"schema": None}, "config schema is None; this release reads 1"),
        ({"group": {}}, "unknown config field 'group'; known: routing, experts"),
        ({"experts": {"hidden": 3}}, "unknown field 'hidden' in ExpertConfig; known: bias, hidden_size, intermediate_size"),
        ({"experts": {"hidden_size": 3}}, r"ExpertConfig: .*intermediate_size"),
        ({"backends": [{"name": "flash"}]}, r"unknown backend 'flash'; known: .*torch_loop"),
        ({"backends": [{"name": "torch_loop", "chunks": 1}]}, "unknown field 'chunks' in TorchLoopConfig; known: chunk_rows"),
    ],
)
def test_plain_values_of_somebody_else(change: dict[str, object], message: str) -> None:
    with pytest.raises(md.ConfigError, match=message):
        md.MoEConfig.from_dict(layer().to_dict() | change)


def test_plain_values_that_lack_a_part() -> None:
    with pytest.raises(md.ConfigError, match="config lacks experts, routing"):
        md.MoEConfig.from_dict({"schema": 1})


def test_unpacking_leaves_out_what_is_none() -> None:
    assert "backends" not in dict(**layer())
    assert dict(**WHOLE["one backend"])["backends"] == md.BackendOptions((md.TorchGroupedConfig(methods=("segments",)),))
    assert md.MoEConfig(**WHOLE["most"]) == WHOLE["most"]
    with pytest.raises(KeyError, match="group"):
        layer()["group"]


def test_choices_keep_their_order() -> None:
    a, b, c = md.TorchDenseConfig(), md.TorchLoopConfig(), md.ReferenceConfig()
    assert list(a | b | c) == list(a | (b | c)) == [a, b, c]


def test_named_routings_are_the_published_ones() -> None:
    assert md.RoutingConfig.deepseek_v3() == md.RoutingConfig(
        256, 8, scoring="sigmoid", n_group=8, topk_group=4, correction_bias="selection", routed_scaling_factor=2.5
    )
    assert md.RoutingConfig.qwen3() == md.RoutingConfig(128, 8)
    assert md.RoutingConfig.llama4() == md.RoutingConfig(16, 1, scoring="sigmoid", renormalize=False, weight_on_input=True)
    assert md.RoutingConfig.deepseek_v3(384, 8, n_group=1, topk_group=1).n_group == 1  # Kimi-K2


# --- keys

BASE = layer(
    routing=md.RoutingConfig(8, 1, n_group=4, topk_group=2),
    quant=md.QuantConfig(weight="fp8", block_shape=(16, 16)),
    parallel=md.ParallelConfig(),
)
CHANGES: dict[str, list[dict[str, object]]] = {
    "routing": [
        {"num_experts": 16},
        {"top_k": 2},
        {"scoring": "sigmoid"},
        {"renormalize": False},
        {"n_group": 2},
        {"topk_group": 3},
        {"correction_bias": "selection"},
        {"routed_scaling_factor": 2.0},
        {"num_fused_shared_experts": 1},
        {"weight_on_input": True},
    ],
    "experts": [{"hidden_size": 128}, {"intermediate_size": 96}, {"bias": True}],
    "quant": [{"dtype": "fp16"}, {"weight": "int8"}, {"granularity": "channel", "block_shape": None}, {"block_shape": (16, 8)}],
    "activation": [{"kind": "geglu"}, {"limit": 7.0}, {"alpha": 1.7}, {"beta": 1.0}],
    "parallel": [{"tp_size": 3}, {"ep_size": 2}, {"placement": "round_robin"}, {"uneven": True}],
    "execution": [{"do_finalize": False}, {"enable_pdl": True}, {"deterministic": True}, {"batch_invariant": True}],
}
NO_PART_OF_THE_WORK = {"tune_max_num_tokens", "output"}  # they say what to try and where the result goes


@pytest.mark.parametrize(("part", "change"), [(part, change) for part, changes in CHANGES.items() for change in changes])
def test_each_field_changes_the_problem(part: str, change: dict[str, object]) -> None:
    other = dataclasses.replace(BASE, **{part: dataclasses.replace(BASE[part], **change)})
    assert digest(md.MoEProblem.of(BASE, routed=True).key()) != digest(md.MoEProblem.of(other, routed=True).key())


def test_no_field_is_forgotten() -> None:
    for part, changes in CHANGES.items():
        fields = {field.name for field in dataclasses.fields(BASE[part])} - {"_"}
        assert fields - NO_PART_OF_THE_WORK == {name for change in changes for name in change}
    assert set(CHANGES) == set(BASE.keys())


def test_equal_numbers_give_equal_keys() -> None:
    whole, floating = (layer(routing=md.RoutingConfig(8, 2, routed_scaling_factor=factor), activation=md.ActivationConfig(limit=limit))
                       for factor, limit in ((2, 7), (2.0, 7.0)))  # fmt: skip
    assert digest(md.MoEProblem.of(whole, routed=True).key()) == digest(md.MoEProblem.of(floating, routed=True).key())


# --- shares


@pytest.mark.parametrize(
    ("parallel", "shares"),
    [
        (md.ParallelConfig(), [range(10)]),
        (md.ParallelConfig(ep_size=2), [range(5), range(5, 10)]),
        (md.ParallelConfig(ep_size=4, uneven=True), [range(3), range(3, 6), range(6, 8), range(8, 10)]),
        (md.ParallelConfig(ep_size=2, placement="round_robin"), [range(0, 10, 2), range(1, 10, 2)]),
        (md.ParallelConfig(ep_size=4, placement="round_robin", uneven=True), [(0, 4, 8), (1, 5, 9), (2, 6), (3, 7)]),
    ],
)
def test_shares_cover_every_expert_once(parallel: md.ParallelConfig, shares: list[tuple[int, ...]]) -> None:
    problem = md.MoEProblem.of(layer(routing=md.RoutingConfig(10, 2), parallel=parallel), routed=True)
    assert [problem.local_experts(rank) for rank in range(parallel.ep_size)] == [tuple(share) for share in shares]
