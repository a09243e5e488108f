"""A call written to a log and made again from it: what comes back, and what is refused of a log that is not as it was written."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_dist as md
from moe_dist.backends.torch_loop import TorchLoopBackend
from moe_dist.trace import MARK
from tests.backends.native import NATIVE, NativeBackend, NativeConfig
from tests.backends.oracle import make_case

CONFIG = md.MoEConfig(
    routing=md.RoutingConfig(8, 2),
    experts=md.ExpertConfig(hidden_size=40, intermediate_size=24),
    quant=md.QuantConfig(dtype="fp32"),
    execution=md.ExecutionConfig(tune_max_num_tokens=64),
)
LOOP = md.Tactic.of("torch_loop", chunk_rows=0, compute="fp32")
SEGMENTS = md.Tactic.of("torch_grouped", compute="fp32", method="segments")
Recorded = Callable[..., list[str]]


@pytest.fixture
def recorded(caplog: pytest.LogCaptureFixture) -> Recorded:
    """The repro lines of `call`."""

    def record(call: Callable[[], object]) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "moe_dist.repro"):
            call()
        return [message for message in caplog.messages if MARK in message]

    return record


def log_of(folder: Path, *lines: str) -> Path:
    path = folder / "issue.log"
    path.write_text("\n".join(lines))
    return path


# --- what comes back

ROUND_TRIPS: dict[str, tuple[dict[str, Any], dict[str, int], bool]] = {
    "plain, from logits": ({}, {}, False),
    "routed": ({}, {}, True),
    "fp8 blocks": ({"quant": md.QuantConfig(weight="fp8", block_shape=(16, 16))}, {}, True),
    "second of two EP ranks": ({"parallel": md.ParallelConfig(ep_size=2, placement="round_robin")}, {"ep_rank": 1}, True),
    "second of two TP ranks, biased": (
        {"experts": md.ExpertConfig(hidden_size=40, intermediate_size=24, bias=True), "parallel": md.ParallelConfig(tp_size=2)},
        {"tp_rank": 1},
        True,
    ),
    "grouped selection with its bias": ({"routing": md.RoutingConfig.deepseek_v3(8, 2, n_group=4, topk_group=2)}, {}, False),
    "slots unsummed, clamped": (
        {"execution": md.ExecutionConfig(do_finalize=False), "activation": md.ActivationConfig(limit=7.0)},
        {},
        True,
    ),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_call_comes_back(name: str, recorded: Recorded, tmp_path: Path) -> None:
    parts, share, routed = ROUND_TRIPS[name]
    config = dataclasses.replace(CONFIG, **parts)
    case = make_case(config, 7, routed=routed)
    weights = case.share(**share)
    layer = md.MoELayer(**config)
    results = []
    (line,) = recorded(lambda: results.append(layer((case.acts, weights))))
    repro = md.MoERepro.from_file(log_of(tmp_path, "INFO starting", f"(Worker pid=1) DEBUG {line}", "Traceback (most recent call last):"))
    assert repro.call.config == config
    assert repro.call.problem == case.problem
    assert repro.call.tactic == layer.lookup(7)
    assert (repro.call.ep_rank, repro.call.tp_rank) == (weights.ep_rank, weights.tp_rank)
    for pack in (case.acts, weights):
        for field in dataclasses.fields(pack):
            tensor, spec = getattr(pack, field.name), repro.call.tensors.get(field.name)
            if isinstance(tensor, torch.Tensor):
                assert spec is not None
                assert (spec.dtype, spec.shape) == (tensor.dtype, tuple(tensor.shape))
            else:
                assert spec is None
    again = repro.run()
    assert (again.shape, again.dtype) == (results[0].shape, results[0].dtype)
    assert not again.isnan().any()
    assert again.float().abs().sum() > 0
    assert torch.equal(again, repro.run())  # seeded
    assert not torch.equal(again, dataclasses.replace(repro, seed=1).run())


def test_a_map_of_the_callers_own_comes_back(recorded: Recorded, tmp_path: Path) -> None:
    # Rows in another order than ParallelConfig gives them, and one row more than experts: redundant, named by no id.
    config = dataclasses.replace(CONFIG, parallel=md.ParallelConfig(ep_size=2))
    case = make_case(config, 33)
    weights = dataclasses.replace(
        case.share(0),
        w13=case.whole.w13[[6, 1, 4, 0, 2]],
        w2=case.whole.w2[[6, 1, 4, 0, 2]],
        expert_map=torch.tensor([3, 1, -1, -1, 2, -1, 0, -1], dtype=torch.int32),
    )
    (line,) = recorded(lambda: md.moe_layer((case.acts, weights), **config))
    repro = md.MoERepro.from_file(log_of(tmp_path, line))
    assert repro.call.expert_map == (3, 1, -1, -1, 2, -1, 0, -1)
    assert repro.call.tensors["w13"].shape[0] == 5
    assert repro.run().shape == (33, 40)


def test_the_last_line_counts_and_formats_of_ids_are_kept(recorded: Recorded, tmp_path: Path) -> None:
    few, many = make_case(CONFIG, 3), make_case(CONFIG, 21)
    assert many.acts.topk_ids is not None
    many.acts.topk_ids = many.acts.topk_ids.long()
    layer = md.MoELayer(**CONFIG)
    lines = recorded(lambda: [layer((case.acts, few.whole)) for case in (few, many)])
    assert len(lines) == 2  # one a call
    repro = md.MoERepro.from_file(log_of(tmp_path, *lines))
    assert repro.call.num_tokens == 21
    assert repro.call.tensors["topk_ids"].dtype == torch.int64
    assert repro.run().shape == (21, 40)


def test_the_line_stands_before_the_call_that_fails(monkeypatch: pytest.MonkeyPatch, recorded: Recorded, tmp_path: Path) -> None:
    def bind(*_: object) -> Callable[..., md.Tactic]:
        def run(*_: object) -> md.Tactic:
            raise RuntimeError("an illegal memory access was encountered")

        return run

    monkeypatch.setattr(TorchLoopBackend, "bind", bind)
    case = make_case(CONFIG, 4)

    def fail() -> None:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            md.moe_layer((case.acts, case.whole), **CONFIG, backends=md.TorchLoopConfig())

    (line,) = recorded(fail)
    assert md.MoERepro.from_file(log_of(tmp_path, line)).call.tactic == LOOP


def test_a_layer_bound_while_the_logger_is_off_runs_what_the_backend_made(recorded: Recorded) -> None:
    case = make_case(CONFIG, 4)
    native = NativeBackend()
    bound = []
    bind = native.bind
    native.bind = lambda *args: bound.append(bind(*args)) or bound[-1]  # type: ignore[method-assign,func-returns-value]
    layer = md.MoELayer(**CONFIG, backends=NativeConfig(), extra_backends=[native])
    layer((case.acts, case.whole))
    index = layer._indexes[True]
    assert index.pick(4, "eager", None).runner is bound[-1]  # nothing stands between: that is what "costs nothing" means
    assert recorded(lambda: layer((case.acts, case.whole))) == []  # asked at binding, not at each call


def test_another_backend_and_the_parts(recorded: Recorded, tmp_path: Path) -> None:
    case = make_case(CONFIG, 7)
    (line,) = recorded(lambda: md.moe_layer((case.acts, case.whole), **CONFIG))
    repro = md.MoERepro.from_file(log_of(tmp_path, line))
    alone = repro.isolate_backend(md.TorchLoopConfig())
    assert (repro.call.tactic, alone.call.tactic) == (SEGMENTS, LOOP)
    torch.testing.assert_close(alone.run(), repro.run())  # the same values, so that results can be compared
    quick = md.MeasurementPolicy(rounds=1, sweeps=1, window=timedelta(microseconds=50))
    times = alone.benchmark_all(policy=quick)
    assert (times.tactic, times.num_tokens) == (LOOP, 7)
    with pytest.raises(md.UnsupportedBackend, match=r"'triton' can't run this: it needs a CUDA GPU, not 'cpu'") as caught:
        repro.isolate_backend(md.TritonConfig())
    assert caught.value.reasons["torch_loop"] is None


def test_a_backend_of_the_callers_own_is_named_and_another_can_stand_in(recorded: Recorded, tmp_path: Path) -> None:
    case = make_case(CONFIG, 7)
    (line,) = recorded(lambda: md.moe_layer((case.acts, case.whole), **CONFIG, backends=NativeConfig(), extra_backends=[NativeBackend()]))
    repro = md.MoERepro.from_file(log_of(tmp_path, line))
    assert repro.call.tactic == NATIVE
    with pytest.raises(md.UnsupportedBackend, match="backend 'native' can't run this: there is no such backend; known: triton"):
        repro.run()
    assert repro.isolate_backend(md.TorchLoopConfig()).run().shape == (7, 40)


def test_what_differs_here(recorded: Recorded, tmp_path: Path) -> None:
    case = make_case(CONFIG, 2)
    (line,) = recorded(lambda: md.moe_layer((case.acts, case.whole), **CONFIG))
    repro = md.MoERepro.from_file(log_of(tmp_path, line))
    assert repro.differences() == {}
    edited = edit(line, lambda plain: plain["environment"].update(triton="3.6.0", added="x"))
    here = str(repro.call.environment["triton"])
    assert md.MoERepro.from_file(log_of(tmp_path, edited)).differences() == {"triton": ("3.6.0", here), "added": ("x", None)}


# --- what is refused: named place, value and way out


def edit(line: str, change: Callable[[dict[str, Any]], object]) -> str:
    plain = json.loads(line[line.index("{") :])
    change(plain)
    return f"{MARK} {json.dumps(plain)}"


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "schema of a later release": (lambda p: p.update(schema=2), r"issue.log:2: repro schema is 2; this release reads 1: use the release"),
    "no schema": (lambda p: p.pop("schema"), r"issue.log:2: repro schema is None"),
    "unknown field": (lambda p: p.update(weights="w.pt"), r"issue.log:2: unknown repro field 'weights'; known: config, device"),
    "missing fields": (lambda p: (p.pop("tactic"), p.pop("device")), r"issue.log:2: the repro line lacks device, tactic"),
    "config of a later schema": (lambda p: p["config"].update(schema=9), r"issue.log:2: config schema is 9; this release reads 1"),
    "unknown config field": (lambda p: p["config"].update(lora=1), r"issue.log:2: unknown config field 'lora'; known: routing"),
    "unknown field of a part": (
        lambda p: p["config"]["routing"].update(method="DeepSeekV3"),
        r"issue.log:2: unknown field 'method' in RoutingConfig; known: correction_bias",
    ),
    "a part that is no mapping": (lambda p: p["config"].update(routing=5), r"issue.log:2: RoutingConfig is 5; it must be a mapping"),
    "backends that are no list": (lambda p: p["config"].update(backends=5), r"issue.log:2: backends is 5; it must be a list of mappings"),
    "a backend that is no mapping": (
        lambda p: p["config"].update(backends=["triton"]),
        r"issue.log:2: a backend is 'triton'; it must be a",
    ),
    "a backend's name that is none": (lambda p: p["config"].update(backends=[{"name": []}]), r"issue.log:2: unknown backend \[\]; known: "),
    "a part's value of another type": (
        lambda p: p["config"]["routing"].update(num_fused_shared_experts="1"),
        r"issue.log:2: RoutingConfig: '<' not supported",
    ),
    "a value out of range": (
        lambda p: p["config"]["routing"].update(top_k=9),
        r"issue.log:2: RoutingConfig.top_k 9 exceeds num_experts 8; choose at most 8",
    ),
    "a config that is code": (
        lambda p: p.update(config="MoEConfig(__import__('os').abort())"),
        r"issue.log:2: repro field 'config' is .*; it must be of type dict",
    ),
    "rank as text": (lambda p: p.update(ep_rank="0"), r"issue.log:2: repro field 'ep_rank' is '0'; it must be of type int"),
    "rank out of range": (lambda p: p.update(ep_rank=1), r"issue.log:2: repro field 'ep_rank' is 1; the config has 1 such ranks"),
    "map of another kind": (lambda p: p.update(expert_map=[0, "x"]), r"issue.log:2: repro field 'expert_map' is \[0, 'x'\]; it must be"),
    "no tactic": (
        lambda p: p.update(tactic=["torch_loop", []]),
        r"issue.log:2: repro field 'tactic' is \['torch_loop', \[\]\]; it must be",
    ),
    "unknown tensor": (lambda p: p["tensors"].update(w4=["int8", [1]]), r"issue.log:2: unknown tensor 'w4'; known: hidden_states"),
    "no hidden states": (lambda p: p["tensors"].pop("hidden_states"), r"issue.log:2: the repro line lacks the tensors hidden_states"),
    "unknown format": (
        lambda p: p["tensors"].update(w13=["os.abort", [8, 48, 40]]),
        r"issue.log:2: tensor 'w13' is of 'os.abort'; known: float32",
    ),
    "negative size": (lambda p: p["tensors"].update(w13=["float32", [-8, 48, 40]]), r"issue.log:2: tensor 'w13' is \['float32', \[-8"),
}


@pytest.fixture
def line(recorded: Recorded) -> str:
    case = make_case(CONFIG, 2)
    (line,) = recorded(lambda: md.moe_layer((case.acts, case.whole), **CONFIG))
    return line


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_lines(name: str, line: str, tmp_path: Path) -> None:
    change, message = MALFORMED[name]
    with pytest.raises(md.ConfigError, match=message):
        md.MoERepro.from_file(log_of(tmp_path, "noise", edit(line, change), "noise"))


def test_lines_that_are_no_json(line: str, tmp_path: Path) -> None:
    with pytest.raises(md.ConfigError, match=r"issue.log:1: the repro line is cut off or no JSON: .*; copy it whole"):
        md.MoERepro.from_file(log_of(tmp_path, line[:200]))
    with pytest.raises(md.ConfigError, match=r"issue.log:1: the repro line holds list; it must be an object"):
        md.MoERepro.from_file(log_of(tmp_path, f"{MARK} [1]"))


def test_a_log_without_a_line(tmp_path: Path) -> None:
    path = log_of(tmp_path, "INFO starting", "MOE_DIST something else")
    with pytest.raises(md.ConfigError, match=r"issue.log holds no MOE_DIST_REPRO line; set the logger 'moe_dist.repro' to DEBUG before"):
        md.MoERepro.from_file(path)


def test_parts_that_contradict_each_other(line: str, tmp_path: Path) -> None:
    wider = edit(line, lambda plain: plain["config"]["experts"].update(intermediate_size=48))
    with pytest.raises(md.ConfigError, match=r"the repro line gives w13 the shape \[8, 48, 40\]; its config and share give \[8, 96, 40\]"):
        md.MoERepro.from_file(log_of(tmp_path, wider)).run()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:77", r"the call is for cuda:77 \(recorded on NVIDIA H200\), which this process lacks; give from_file another device="),
        ("abacus:0", r"the call was recorded on 'abacus:0', which torch does not know; give device="),
    ],
)
def test_a_device_that_is_not_here(device: str, message: str, line: str, tmp_path: Path) -> None:
    elsewhere = edit(line, lambda plain: (plain.update(device=device), plain["environment"].update(device_name="NVIDIA H200")))
    with pytest.raises(md.ConfigError, match=message):
        md.MoERepro.from_file(log_of(tmp_path, elsewhere)).run()
    assert md.MoERepro.from_file(log_of(tmp_path, elsewhere), device="cpu").run().shape == (2, 40)


def test_a_tactic_that_this_release_lacks(line: str, tmp_path: Path) -> None:
    gone = edit(line, lambda plain: plain.update(tactic=["torch_loop", [["chunk_rows", 0], ["compute", "fp7"]], False]))
    with pytest.raises(md.UnsupportedBackend, match="torch_loop doesn't compute fp32 in fp7 on cpu"):
        md.MoERepro.from_file(log_of(tmp_path, gone)).run()
