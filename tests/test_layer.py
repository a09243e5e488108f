"""The layer: what it computes and refuses, and which tactic each call is served by."""

from __future__ import annotations

import builtins
import dataclasses
import io
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgpack
import pytest
import torch

import moe_dist as md
from moe_dist.distributed.group import RankGroup
from moe_dist.operation import MoEOperation
from moe_dist.tuning.measure import journal_key
from moe_dist.tuning.pass_terms import Limits
from moe_dist.tuning.problem import Cell, Epoch, Operation, Winner
from tests.backends.native import NATIVE, NativeBackend, NativeConfig
from tests.backends.oracle import error_of, make_case, oracle

CONFIG = md.MoEConfig(
    routing=md.RoutingConfig(8, 2),
    experts=md.ExpertConfig(hidden_size=40, intermediate_size=24),
    quant=md.QuantConfig(dtype="fp32"),
    execution=md.ExecutionConfig(tune_max_num_tokens=128),
)
LOOP = md.Tactic.of("torch_loop", chunk_rows=0, compute="fp32")
DENSE = md.Tactic.of("torch_dense", compute="fp32", form="wide")
SEGMENTS = md.Tactic.of("torch_grouped", compute="fp32", method="segments")
MEET = md.Tactic.of("native", collective=True)


class FakeTuner:
    """What the layer sees of a tuner: an epoch, and somebody who takes records."""

    def __init__(self, winners: Mapping[md.Bucket, md.Tactic], *, routed: bool = True, config: md.MoEConfig = CONFIG) -> None:
        self.problem = md.MoEProblem.of(config, routed=routed).key()
        self.records: list[Operation] = []
        self.limits = Limits(None, {})
        self.group = RankGroup.alone()
        self.serve(winners)

    def serve(self, winners: Mapping[md.Bucket, md.Tactic]) -> None:
        self.epoch = Epoch(
            1,
            "test",
            {Cell(self.problem, "eager", bucket): Winner(tactic, 1.0, SEGMENTS, 2.0, "tuned") for bucket, tactic in winners.items()},
        )

    def record(self, operation: Operation) -> None:
        self.records.append(operation)


def tuned(winners: Mapping[md.Bucket, md.Tactic], **parts: Any) -> tuple[md.MoELayer, Any]:
    tuner = FakeTuner(winners)
    fields = {name: CONFIG[name] for name in CONFIG.keys()} | parts  # noqa: SIM118
    return md.MoELayer(**fields, tuner=cast(md.Tuner, tuner)), tuner


def batch(tokens: int, config: md.MoEConfig = CONFIG, **how: Any) -> tuple[md.MoEActivationPack, md.MoEWeightPack]:
    case = make_case(config, tokens, **how)
    return case.acts, case.share()


# --- what it computes


@pytest.mark.parametrize("call", [md.moe_layer, lambda tensors, **fields: md.MoELayer(**fields)(tensors)], ids=["function", "layer"])
def test_agrees_with_the_oracle(call: Callable[..., torch.Tensor]) -> None:
    case = make_case(CONFIG, 33)
    assert error_of(call((case.acts, case.whole), **CONFIG), oracle(case)) < 1e-5


def test_logits_and_their_routing_give_the_same() -> None:
    acts, weights = batch(20, routed=False)
    assert acts.router_logits is not None
    scores, ids = acts.router_logits.softmax(-1).topk(2)
    routed = md.MoEActivationPack(hidden_states=acts.hidden_states, topk_ids=ids, topk_weights=scores / scores.sum(-1, keepdim=True))
    layer = md.MoELayer(**CONFIG)
    torch.testing.assert_close(layer((acts, weights)), layer((routed, weights)))


def test_zero_tokens_and_then_a_normal_call() -> None:
    layer = md.MoELayer(**CONFIG)
    acts, weights = batch(5)
    empty = md.MoEActivationPack(hidden_states=acts.hidden_states[:0], topk_ids=acts.topk_ids[:0], topk_weights=acts.topk_weights[:0])  # type: ignore[index]
    assert layer((empty, weights)).shape == (0, 40)
    assert md.moe_layer((empty, weights), **CONFIG).shape == (0, 40)
    torch.testing.assert_close(layer((acts, weights)), md.moe_layer((acts, weights), **CONFIG))


def test_without_finalize_the_slots_come_back() -> None:
    config = dataclasses.replace(CONFIG, execution=md.ExecutionConfig(do_finalize=False))
    case = make_case(config, 7)
    result = md.moe_layer((case.acts, case.whole), **config)
    assert result.shape == (7, 2, 40)
    assert error_of(result, oracle(case)) < 1e-5


def test_parameters_that_need_gradients_leave_no_graph() -> None:
    acts, weights = batch(3)
    weights.w13.requires_grad_()
    assert not md.moe_layer((acts, weights), **CONFIG).requires_grad


def test_config_unpacks_beside_backends() -> None:
    # A config that names no backends leaves room for the argument.
    extra = NativeBackend(MEET)
    out = md.moe_layer(batch(3), **CONFIG, backends=NativeConfig(), extra_backends=[extra])
    assert out.unique().tolist() == [1.0]


def test_an_explicit_choice_is_the_one_executed() -> None:
    extra = NativeBackend(MEET)
    config = dataclasses.replace(CONFIG, backends=NativeConfig())
    layer = md.MoELayer(**config, extra_backends=[extra])
    layer(batch(3))
    assert extra.tokens == [3]
    assert layer.lookup(3) == NATIVE


def test_an_impossible_choice_lists_every_reason() -> None:
    config = dataclasses.replace(CONFIG, execution=md.ExecutionConfig(batch_invariant=True))
    with pytest.raises(md.UnsupportedBackend, match=r"'torch_loop \| torch_dense' can't run this: on cpu, each with its reason") as caught:
        md.moe_layer(batch(3), **config, backends=md.TorchLoopConfig() | md.TorchDenseConfig())
    assert list(caught.value.reasons) == ["torch_loop", "torch_dense"]


@pytest.mark.parametrize("tokens", [7, 64, 513])  # inside one tile, whole tiles, one row over
def test_batch_invariance_is_kept_where_it_is_promised(tokens: int) -> None:
    config = dataclasses.replace(CONFIG, execution=md.ExecutionConfig(batch_invariant=True), backends=md.ReferenceConfig())
    acts, weights = batch(513, config, routed=False)
    assert acts.router_logits is not None
    alone = md.MoEActivationPack(hidden_states=acts.hidden_states[:1], router_logits=acts.router_logits[:1])
    among = md.MoEActivationPack(hidden_states=acts.hidden_states[:tokens], router_logits=acts.router_logits[:tokens])
    assert torch.equal(md.moe_layer((alone, weights), **config), md.moe_layer((among, weights), **config)[:1])


# --- where the result goes


def test_given_output_is_filled_and_returned() -> None:
    tensors = batch(5)
    config = dataclasses.replace(CONFIG, execution=md.ExecutionConfig(output="given"))
    out = torch.full((5, 40), torch.nan)
    assert md.moe_layer(tensors, **config, out=out) is out
    torch.testing.assert_close(out, md.moe_layer(tensors, **CONFIG))


def test_in_place_overwrites_hidden_states() -> None:
    acts, weights = batch(5)
    expected = md.moe_layer((acts, weights), **CONFIG)
    config = dataclasses.replace(CONFIG, execution=md.ExecutionConfig(output="in_place"))
    assert md.moe_layer((acts, weights), **config) is acts.hidden_states
    torch.testing.assert_close(acts.hidden_states, expected)


@pytest.mark.parametrize(
    ("output", "out", "message"),
    [
        ("given", None, r"out is missing, but ExecutionConfig.output is 'given'; pass out=, or set output='new'"),
        ("in_place", torch.empty(5, 40), r"out is given, but ExecutionConfig.output is 'in_place'; leave out= away"),
        ("given", torch.empty(5, 41), r"out has shape \[5, 41\]; this config and rank need \[5, 40\]"),
        ("given", torch.empty(5, 40, dtype=torch.bfloat16), r"out is torch.bfloat16; this config needs torch.float32"),
        ("new", torch.empty(40, 5).T, r"out has strides \[1, 5\]; it must be contiguous"),
    ],
)
def test_wrong_outputs(output: str, out: torch.Tensor | None, message: str) -> None:
    config = dataclasses.replace(CONFIG, execution=md.ExecutionConfig(output=output))
    with pytest.raises(md.InputError, match=message):
        md.moe_layer(batch(5), **config, out=out)


def test_hidden_states_are_no_output() -> None:
    acts, weights = batch(5)
    with pytest.raises(md.InputError, match=r"out is hidden_states; to overwrite them set ExecutionConfig.output='in_place'"):
        md.moe_layer((acts, weights), **CONFIG, out=acts.hidden_states)


# --- what it refuses: named value, limit, way out, before anything runs


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half()


ACTS: dict[str, tuple[dict[str, Callable[[torch.Tensor], torch.Tensor | None]], str]] = {
    "columns": (
        {"hidden_states": lambda x: x[:, :39].contiguous()},
        r"hidden_states has shape \[5, 39\]; this config needs \[tokens, 40\]",
    ),
    "dimensions": ({"hidden_states": lambda x: x[None]}, r"hidden_states has shape \[1, 5, 40\]"),
    "format": ({"hidden_states": half}, r"hidden_states is torch.float16; this config needs torch.float32"),
    "strides": ({"hidden_states": lambda x: x.T.contiguous().T}, r"hidden_states has strides \[1, 5\]; it must be contiguous"),
    "device": ({"hidden_states": lambda x: x.to("meta")}, r"hidden_states is on meta, the weights are on cpu; move them to one device"),
    "rows of ids": ({"topk_ids": lambda x: x[:4]}, r"topk_ids has shape \[4, 2\]; this config and rank need \[5, 2\]"),
    "slots of ids": ({"topk_ids": lambda x: x[:, :1].contiguous()}, r"topk_ids has shape \[5, 1\]; this config and rank need \[5, 2\]"),
    "format of ids": ({"topk_ids": lambda x: x.float()}, r"topk_ids is torch.float32; this config needs torch.int32 or torch.int64"),
    "format of weights": ({"topk_weights": half}, r"topk_weights is torch.float16; this config needs torch.float32"),
    "no ids": ({"topk_ids": lambda x: None}, r"topk_ids is missing; give router_logits, or both topk_ids and topk_weights"),
    "no weights": ({"topk_weights": lambda x: None}, r"topk_weights is missing; give router_logits, or both"),
    "id too large": ({"topk_ids": lambda x: x.clone().fill_(8)}, r"topk_ids holds 8; ids are global, 0 to 7, and -1 for an empty slot"),
    "id too small": ({"topk_ids": lambda x: x.clone().fill_(-2)}, r"topk_ids holds -2; ids are global, 0 to 7"),
}


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("call", [md.moe_layer, lambda tensors, **fields: md.MoELayer(**fields)(tensors)], ids=["function", "layer"])
def test_wrong_activations(call: Callable[..., torch.Tensor], name: str) -> None:
    changes, message = ACTS[name]
    acts, weights = batch(5)
    wrong = dataclasses.replace(acts, **{field: change(getattr(acts, field)) for field, change in changes.items()})
    with pytest.raises(md.InputError, match=message):
        call((wrong, weights), **CONFIG)


def test_wrong_logits() -> None:
    acts, weights = batch(5, routed=False)
    assert acts.router_logits is not None
    with pytest.raises(md.InputError, match=r"router_logits has shape \[5, 7\]; this config and rank need \[5, 8\]"):
        md.moe_layer((dataclasses.replace(acts, router_logits=acts.router_logits[:, :7].contiguous()), weights), **CONFIG)
    with pytest.raises(md.InputError, match=r"router_logits is torch.int64; this config needs torch.float32 or"):
        md.moe_layer((dataclasses.replace(acts, router_logits=acts.router_logits.long()), weights), **CONFIG)
    both = dataclasses.replace(acts, topk_ids=torch.zeros(5, 2, dtype=torch.int32))
    with pytest.raises(md.InputError, match="router_logits and topk_ids or topk_weights are given; give the logits, or both of the others"):
        md.moe_layer((both, weights), **CONFIG)


FP8 = md.QuantConfig(dtype="fp32", weight="fp8", block_shape=(16, 16))
BIASED = md.ExpertConfig(hidden_size=40, intermediate_size=24, bias=True)
V3 = md.RoutingConfig.deepseek_v3(8, 2, n_group=None, topk_group=None)
EP2 = md.ParallelConfig(ep_size=2)
Change = Callable[[torch.Tensor], torch.Tensor | None]
WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Change | int], str]] = {
    "experts": ({}, {"w13": lambda w: w[:7]}, r"w13 has shape \[7, 48, 40\]; this config and rank need \[8, 48, 40\]"),
    "not cut for EP": ({"parallel": EP2}, {"w13": lambda w: w.repeat(2, 1, 1)}, r"w13 has shape \[8, 48, 40\]; .* need \[4, 48, 40\]"),
    "gate missing": ({}, {"w13": lambda w: w[:, :24].contiguous()}, r"w13 has shape \[8, 24, 40\]; .* need \[8, 48, 40\]"),
    "transposed": ({}, {"w2": lambda w: w.transpose(1, 2).contiguous()}, r"w2 has shape \[8, 24, 40\]; .* need \[8, 40, 24\]"),
    "transposed view": (
        {},
        {"w2": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2)},
        r"w2 has strides .*; it must be contiguous: call",
    ),
    "format": ({}, {"w13": half}, r"w13 is torch.float16; this config needs torch.float32"),
    "format of fp8": ({"quant": FP8}, {"w2": lambda w: w.float()}, r"w2 is torch.float32; this config needs torch.float8_e4m3fn"),
    "device": ({}, {"w2": lambda w: w.to("meta")}, r"w2 is on meta, the weights are on cpu"),
    "scale missing": (
        {"quant": FP8},
        {"w13_scale": lambda s: None},
        r"w13_scale is missing, but QuantConfig.weight is 'fp8' by block; give \[8, 3, 3\]",
    ),
    "scale's shape": (
        {"quant": FP8},
        {"w2_scale": lambda s: s[:, :2].contiguous()},
        r"w2_scale has shape \[8, 2, 2\]; .* need \[8, 3, 2\]",
    ),
    "scale's format": ({"quant": FP8}, {"w2_scale": half}, r"w2_scale is torch.float16; this config needs torch.float32"),
    "scale unasked": (
        {},
        {"w13_scale": lambda _: torch.ones(8)},
        r"w13_scale is given, but QuantConfig.weight is None; name the weights' format",
    ),
    "bias missing": (
        {"experts": BIASED},
        {"w13_bias": lambda b: None},
        r"w13_bias is missing, but ExpertConfig.bias is True; give \[8, 48\] in fp32",
    ),
    "second bias missing": (
        {"experts": BIASED},
        {"w2_bias": lambda b: None},
        r"w2_bias is missing, but ExpertConfig.bias is True; give \[8, 40\]",
    ),
    "bias unasked": ({}, {"w2_bias": lambda _: torch.ones(8, 40)}, r"w2_bias is given, but ExpertConfig.bias is False; set it, or leave"),
    "bias's shape": ({"experts": BIASED}, {"w2_bias": lambda b: b[:, :8].contiguous()}, r"w2_bias has shape \[8, 8\]; .* need \[8, 40\]"),
    "correction unasked": (
        {},
        {"correction_bias": lambda _: torch.ones(8)},
        r"correction_bias is given, but RoutingConfig.correction_bias is None",
    ),
    "ep_rank": ({"parallel": EP2}, {"ep_rank": 2}, r"MoEWeightPack.ep_rank is 2, but ParallelConfig has 2 such ranks; give 0 to 1"),
    "tp_rank": ({}, {"tp_rank": -1}, r"MoEWeightPack.tp_rank is -1, but ParallelConfig has 1 such ranks; give 0 to 0"),
    "map's length": ({}, {"expert_map": lambda _: torch.zeros(7, dtype=torch.int32)}, r"expert_map has shape \[7\]; .* need \[8\]"),
    "map's format": ({}, {"expert_map": lambda _: torch.arange(8)}, r"expert_map is torch.int64; this config needs torch.int32"),
    "map's rows": (
        {},
        {"expert_map": lambda _: torch.arange(1, 9).int()},
        r"expert_map holds rows 1 to 8; this rank has rows 0 to 7, and -1",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_wrong_weights(name: str) -> None:
    parts, changes, message = WEIGHTS[name]
    config = dataclasses.replace(CONFIG, **parts)
    acts, weights = batch(5, config)
    wrong = dataclasses.replace(
        weights, **{field: change if isinstance(change, int) else change(getattr(weights, field)) for field, change in changes.items()}
    )
    with pytest.raises(md.InputError, match=message):
        md.moe_layer((acts, wrong), **config)


def test_correction_bias_is_needed_for_logits_alone() -> None:
    config = dataclasses.replace(CONFIG, routing=V3)
    acts, weights = batch(5, config, routed=False)
    bare = dataclasses.replace(weights, correction_bias=None)
    with pytest.raises(
        md.InputError, match=r"correction_bias is missing, but RoutingConfig.correction_bias is 'selection'; give fp32 \[8\], or routed"
    ):
        md.moe_layer((acts, bare), **config)
    with pytest.raises(md.InputError, match=r"correction_bias is torch.float16; this config needs torch.float32"):
        md.moe_layer((acts, dataclasses.replace(weights, correction_bias=torch.ones(8).half())), **config)
    routed, _ = batch(5, config)
    assert md.moe_layer((routed, bare), **config).shape == (5, 40)


def test_w2_bias_may_be_missing_on_later_tp_ranks() -> None:
    config = dataclasses.replace(CONFIG, experts=BIASED, parallel=md.ParallelConfig(tp_size=2))
    case = make_case(config, 5)
    assert case.share(0, 1).w2_bias is None
    assert error_of(md.moe_layer((case.acts, case.share(0, 1)), **config), oracle(case, 0, 1)) < 1e-5


def test_weights_are_checked_once_for_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    import moe_dist.layer as module

    checked: list[md.MoEWeightPack] = []
    real = module.bind_weights
    monkeypatch.setattr(module, "bind_weights", lambda problem, weights: checked.append(weights) or real(problem, weights))
    layer, (acts, weights), (_, other) = md.MoELayer(**CONFIG), batch(5), batch(5, seed=1)
    for _ in range(3):
        layer((acts, weights))
    layer((acts, other))
    assert checked == [weights, other]
    torch.testing.assert_close(layer((acts, other)), md.moe_layer((acts, other), **CONFIG))


# --- which tactic serves


def test_untuned_runs_the_default_everywhere() -> None:
    layer = md.MoELayer(**CONFIG)
    with pytest.raises(md.TunerStateError, match="the layer has seen no weights yet, so its device is unknown; call get_tuned_layer"):
        layer.lookup(1)
    layer(batch(1))
    assert {layer.lookup(tokens) for tokens in (0, 1, 128, 129, 10_000)} == {SEGMENTS}


def test_winners_switch_at_their_bucket() -> None:
    # Two backends that cross at 64 tokens.
    layer, _ = tuned({md.Bucket(1, 64): DENSE, md.Bucket(65, 128): LOOP})
    layer(batch(1))
    assert [layer.lookup(tokens) for tokens in (0, 1, 64, 65, 128, 129)] == [SEGMENTS, DENSE, DENSE, LOOP, LOOP, SEGMENTS]


def test_cells_that_are_missing_run_the_default() -> None:
    layer, _ = tuned({md.Bucket(9, 16): LOOP})
    layer(batch(1))
    assert [layer.lookup(tokens) for tokens in (8, 9, 16, 17)] == [SEGMENTS, LOOP, LOOP, SEGMENTS]


def test_a_ladder_longer_than_the_configs_is_served() -> None:
    layer, _ = tuned({md.Bucket(257, 512): LOOP})
    layer(batch(1))
    assert [layer.lookup(tokens) for tokens in (129, 256, 257, 512, 513)] == [SEGMENTS, SEGMENTS, LOOP, LOOP, SEGMENTS]


def test_the_winner_is_what_runs() -> None:
    layer, _ = tuned({md.Bucket(1, 64): DENSE, md.Bucket(65, 128): LOOP})
    for tokens in (64, 65):
        case = make_case(CONFIG, tokens)
        assert error_of(layer((case.acts, case.whole)), oracle(case)) < 1e-5


def test_another_problems_winners_are_not_ours() -> None:
    layer, _ = tuned({md.Bucket(1, 64): DENSE})
    layer(batch(3, routed=False))  # the tuner knows the routed problem
    assert layer.lookup(3) == SEGMENTS
    layer(batch(3))
    assert layer.lookup(3) == DENSE


def test_a_new_epoch_is_served_at_the_next_call() -> None:
    layer, tuner = tuned({md.Bucket(1, 64): DENSE})
    layer(batch(1))
    tuner.serve({md.Bucket(1, 64): LOOP})
    assert layer.lookup(5) == LOOP


def test_capture_finishes_with_the_epoch_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tuner = tuned({md.Bucket(1, 64): DENSE})
    layer(batch(1))
    tuner.serve({md.Bucket(1, 64): LOOP})
    with monkeypatch.context() as during:
        during.setattr(torch.compiler, "is_compiling", lambda: True)
        assert layer.lookup(5) == DENSE
    assert layer.lookup(5) == LOOP


def test_collective_tactics_need_group_tokens() -> None:
    extra = NativeBackend(MEET)
    layer, _ = tuned({md.Bucket(1, 8): MEET, md.Bucket(9, 128): LOOP}, extra_backends=[extra])
    layer(batch(5))
    assert extra.tokens == []  # without group_tokens the agreed default runs
    assert layer.lookup(5) == SEGMENTS
    assert layer(batch(5), group_tokens=8).unique().tolist() == [1.0]
    layer(batch(5), group_tokens=9)  # the winner there is not collective: this rank's own count chooses
    assert extra.tokens == [5]


def test_a_dead_group_serves_no_collective_tactic() -> None:
    extra = NativeBackend(MEET)
    layer, tuner = tuned({md.Bucket(1, 8): MEET}, extra_backends=[extra])
    tuner.group.dead = "rank 1 lost"
    layer(batch(5), group_tokens=8)
    assert extra.tokens == []  # the agreed default, which is not collective, ran


def test_a_default_that_is_collective_is_refused() -> None:
    class Meeting(NativeBackend):
        def default(self, problem: md.MoEProblem, bucket: md.Bucket | None, device: torch.device) -> md.Tactic:
            return MEET

    layer, _ = tuned({}, extra_backends=[Meeting()], backends=NativeConfig())
    with pytest.raises(
        md.UnsupportedBackend, match="its default native talks to peers, and calls without group_tokens need one that does not"
    ):
        layer(batch(5))


def test_a_rank_without_tokens_still_meets_its_peers() -> None:
    extra = NativeBackend(MEET)
    layer, _ = tuned({md.Bucket(1, 8): MEET}, extra_backends=[extra])
    acts, weights = batch(0)
    assert layer((acts, weights), group_tokens=8).shape == (0, 40)
    assert extra.tokens == [0]
    layer((acts, weights))
    assert extra.tokens == [0]


def test_a_winner_outside_the_layers_choice_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    layer, _ = tuned({md.Bucket(1, 8): DENSE}, backends=md.TorchLoopConfig())
    with caplog.at_level(logging.WARNING):
        layer(batch(5))
    assert layer.lookup(5) == LOOP
    assert (
        "torch_dense(compute=fp32,form=wide) is left out for 1-8 tokens, the layer's default runs: backend 'torch_dense' is not among those that run here: torch_loop"
        in caplog.text
    )


def test_a_winner_that_its_backend_no_longer_has_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    layer, _ = tuned({md.Bucket(1, 8): md.Tactic.of("torch_loop", chunk_rows=0, compute="fp8")})
    with caplog.at_level(logging.WARNING):
        layer(batch(5))
    assert layer.lookup(5) == SEGMENTS
    assert "torch_loop doesn't compute fp32 in fp8 on cpu" in caplog.text


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (lambda cell, needed: Limits(needed - 1, {}), "needs {needed} bytes of workspace; the limit is {less}"),
        (lambda cell, needed: Limits(None, {journal_key(cell, DENSE): "it was running when its process died"}), "its process died"),
    ],
    ids=["limit", "journal"],
)
def test_a_winner_adopted_before_the_layer_was_known_is_left_out_where_this_rank_refuses_it(
    caplog: pytest.LogCaptureFixture, limits: Callable[[Cell, int], Limits], reason: str
) -> None:
    layer, tuner = tuned({md.Bucket(1, 8): DENSE})
    problem, weights = md.MoEProblem.of(CONFIG, routed=True), batch(1)[1]
    needed = MoEOperation(problem, weights, torch.device("cpu")).workspace(DENSE, 8).nbytes
    assert needed > 0
    tuner.limits = limits(Cell(tuner.problem, "eager", md.Bucket(1, 8)), needed)
    with caplog.at_level(logging.WARNING):
        layer(batch(5))
    assert layer.lookup(5) == SEGMENTS
    assert reason.format(needed=needed, less=needed - 1) in caplog.text


def test_a_collective_winner_that_cannot_run_here_is_an_error() -> None:
    # Left out on one rank, its peers would wait for it.
    layer, _ = tuned({md.Bucket(1, 8): MEET})
    with pytest.raises(
        md.TunerStateError,
        match="this rank can't run the collective winner native of 1-8 tokens: backend 'native' is not among those that run here: torch_grouped",
    ):
        layer(batch(5))


def test_beyond_the_ladder_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    layer, _ = tuned({md.Bucket(65, 128): LOOP})
    with caplog.at_level(logging.WARNING):
        layer(batch(128))
        assert not caplog.records
        for tokens in (129, 200):
            layer(batch(tokens))
    assert [record.getMessage() for record in caplog.records] == [
        "129 tokens exceed the largest tuned count 128: the default torch_grouped(compute=fp32,method=segments) runs; "
        "raise ExecutionConfig.tune_max_num_tokens and tune again"
    ]


@pytest.mark.parametrize("mode", ["cuda_graph", "graph"])
def test_modes_that_a_cpu_lacks(mode: str) -> None:
    with pytest.raises(md.InputError, match=f"mode is '{mode}'; cpu tensors run as eager"):
        md.MoELayer(**CONFIG)(batch(1), mode=mode)


def test_lookup_opens_and_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = tuned({md.Bucket(1, 64): DENSE, md.Bucket(65, 128): LOOP})
    layer(batch(1))
    counted: list[str] = []
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (msgpack, "unpackb"), (msgpack, "packb")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, _real=real, _name=name, **named: counted.append(_name) or _real(*args, **named))
    found = {layer.lookup(tokens % 200) for tokens in range(10_000)}
    assert found == {DENSE, LOOP, SEGMENTS}
    assert counted == []


# --- how it is tuned


def test_tuned_layer_tells_the_tuner_what_it_lacks() -> None:
    tuner = FakeTuner({})
    layer = md.MoELayer(**CONFIG).get_tuned_layer(batch(5), cast(md.Tuner, tuner))
    assert [operation.problem for operation in tuner.records] == [tuner.problem]
    tuner.serve({md.Bucket(1, 64): DENSE})
    assert layer.lookup(5) == DENSE
    md.MoELayer(**CONFIG).get_tuned_layer(batch(5), cast(md.Tuner, tuner))
    assert len(tuner.records) == 1


def test_tuned_layer_checks_what_it_is_given() -> None:
    acts, weights = batch(5)
    with pytest.raises(md.InputError, match="topk_ids holds 8"):
        md.MoELayer(**CONFIG).get_tuned_layer((dataclasses.replace(acts, topk_ids=torch.full((5, 2), 8)), weights))
    with pytest.raises(md.InputError, match=r"129 tokens exceed ExecutionConfig.tune_max_num_tokens 128; raise it, or tune with fewer"):
        md.MoELayer(**CONFIG).get_tuned_layer(batch(129))


def test_tuned_layer_without_a_tuner_runs_a_pass_of_its_own() -> None:
    layer = md.MoELayer(**CONFIG).get_tuned_layer(batch(3))
    assert layer.tuner is not None
    cells = list(layer.tuner.epoch.winners)
    assert [(cell.mode, cell.bucket) for cell in cells] == [("eager", md.Bucket(3, 4))]
    assert layer.lookup(3) == layer.tuner.epoch.winners[cells[0]].tactic
    case = make_case(CONFIG, 3)
    assert error_of(layer((case.acts, case.whole)), oracle(case)) < 1e-5


def test_autotune_records_a_problem_once_and_runs_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = md.BucketLadder((4,))
    with md.autotune(ladder=ladder) as tuner:
        first = md.moe_layer(batch(3), **CONFIG)
        md.moe_layer(batch(2, seed=1), **CONFIG)  # an equal problem
        md.moe_layer(batch(3, routed=False), **CONFIG)  # another
        with monkeypatch.context() as during:  # nothing is recorded while a graph is captured or traced
            during.setattr(torch.compiler, "is_compiling", lambda: True)
            traced = dataclasses.replace(CONFIG, routing=md.RoutingConfig(8, 3))
            md.moe_layer(batch(3, traced), **traced)
        assert not tuner.epoch.winners
    torch.testing.assert_close(first, md.moe_layer(batch(3), **CONFIG, backends=md.TorchGroupedConfig(methods=("segments",))))
    problems = {cell.problem for cell in tuner.epoch.winners}
    assert problems == {md.MoEProblem.of(CONFIG, routed=routed).key() for routed in (True, False)}


def test_autotune_checks_ids_before_it_records() -> None:
    acts, weights = batch(3)
    with pytest.raises(md.InputError, match="topk_ids holds 9"), md.autotune():
        md.moe_layer((dataclasses.replace(acts, topk_ids=torch.full((3, 2), 9)), weights), **CONFIG)


def test_a_replaced_pack_starts_without_the_other_ones_layouts() -> None:
    case = make_case(dataclasses.replace(CONFIG, parallel=EP2), 9)
    first = case.share(0)
    md.moe_layer((case.acts, first), **case.config)
    second = dataclasses.replace(first, w13=case.share(1).w13, w2=case.share(1).w2, ep_rank=1)
    assert error_of(md.moe_layer((case.acts, second), **case.config), oracle(case, 1)) < 1e-5
