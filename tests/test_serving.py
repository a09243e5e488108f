"""What both plugins share: which buckets an engine's counts need, and a model's layers tuned, replayed and left alone."""

from __future__ import annotations

import dataclasses
import gc
import logging
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_dist as md
from moe_dist.distributed.epoch import EPOCHS, published
from moe_dist.errors import PassAborted
from moe_dist.serving import Deadlines, ServedModel, TokenCounts, _passes, _progress_line, faults, stored_epochs
from moe_dist.settings import ServingSettings, serving_settings
from moe_dist.stores.filesystem import FilesystemStore
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Bucket

CPU = torch.device("cpu")
ENGINE_TIMEOUT = timedelta(seconds=600)
COUNTS = TokenCounts(max_num_tokens=4)


def config(experts: int = 4) -> md.MoEConfig:
    return md.MoEConfig(
        routing=md.RoutingConfig(experts, 2),
        experts=md.ExpertConfig(hidden_size=16, intermediate_size=8),
        quant=md.QuantConfig(dtype="fp32"),
        execution=md.ExecutionConfig(tune_max_num_tokens=4),
    )


def weights_of(config: md.MoEConfig, seed: int = 0) -> md.MoEWeightPack:
    return md.make_random_weights(md.MoEProblem.of(config, routed=True), 0, 0, CPU, seed=seed)


def model(store: Path | str, tune: str = "tune") -> ServedModel:
    served = ServedModel(ServingSettings(store=str(store), tune=tune, budget=timedelta(seconds=30)), deployment="test")
    # Two layers alike and one of another shape: two distinct problems.
    for index, experts in enumerate((4, 4, 6)):
        served.add(f"layers.{index}", config(experts), weights_of(config(experts), seed=index))
    return served


def test_buckets_are_those_that_the_engine_runs() -> None:
    # 24 is captured and no power of two: it gets a bound of its own, so that the eager 25 to 32 share no bucket with graphs.
    counts = TokenCounts(max_num_tokens=100, captured=(1, 2, 8, 24))
    assert counts.ladder.bounds == (1, 2, 4, 8, 16, 24, 32, 64, 100)
    assert [b.high for b in counts.buckets("cuda_graph")] == [1, 2, 8, 24]  # nothing is captured in 3-4 and 9-16
    assert [b.high for b in counts.buckets("eager")] == [32, 64, 100]
    # Full decode graphs alone: prefill of any length is eager too.
    assert [b.high for b in TokenCounts(100, (1, 24), eager_from=1).buckets("eager")] == [1, 2, 4, 8, 16, 24, 32, 64, 100]
    assert [b.high for b in TokenCounts(5).buckets("eager")] == [1, 2, 4, 5]
    assert not TokenCounts(5).buckets("cuda_graph")
    # Of four ranks that gather their rows: a step that no rank can fill is not captured.
    assert TokenCounts.gathered(16, [8, 1, 16, 32], 4, eager_from=1) == TokenCounts(64, (4, 32, 64), 1)


def test_deadlines_stay_below_the_engine_s_own() -> None:
    settings = ServingSettings(store="memory:")
    assert Deadlines.within(settings, ENGINE_TIMEOUT) == Deadlines(timedelta(seconds=120), timedelta(seconds=60), timedelta(seconds=300))
    # An impatient engine: every limit shrinks with it.
    assert Deadlines.within(settings, timedelta(seconds=40)) == Deadlines(
        timedelta(seconds=10), timedelta(seconds=4), timedelta(seconds=20)
    )


def test_passes_share_what_tuning_as_a_whole_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mode has a pass of its own on a GPU: two that took half of an engine's start-up each would leave it nothing."""
    passes = [(MeasurementPolicy("eager"), (Bucket(1, 1), Bucket(2, 2))), (MeasurementPolicy("eager"), (Bucket(3, 4),))]
    monkeypatch.setattr("moe_dist.serving._passes", lambda settings, counts, device: passes)
    given = list[dict[str, Any]]()

    class Tuner(md.Tuner):
        def __init__(self, **settings: Any) -> None:
            given.append(settings)
            super().__init__(**settings)

    monkeypatch.setattr("moe_dist.serving.Tuner", Tuner)
    model("memory:").tune(COUNTS, None, timedelta(seconds=40))
    (limits,) = given
    assert limits["cap"] * len(passes) == timedelta(seconds=20)
    assert limits["budget"] * len(passes) == timedelta(seconds=10)
    assert limits["progress_timeout"] == timedelta(seconds=4)


def test_settings_come_from_the_engine_then_the_environment_then_defaults() -> None:
    environ = {"MOE_DIST_TUNE": "replay", "MOE_DIST_STORE": "memory:", "MOE_DIST_BUDGET_S": "7.5"}
    assert serving_settings(None, environ) == ServingSettings(store="memory:", tune="replay", budget=timedelta(seconds=7.5))
    assert serving_settings({"tune": "off", "budget_s": 3}, environ) == ServingSettings(
        store="memory:", tune="off", budget=timedelta(seconds=3)
    )
    assert serving_settings(None, {"MOE_DIST_STORE": "/x"}).budget == timedelta(seconds=120)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tune": "always"}, r"tune is 'always' \(MOE_DIST_TUNE\); choose one of tune, replay, off"),
        ({"budget_s": "soon"}, r"budget is 'soon' \(MOE_DIST_BUDGET_S\); it must be a number of seconds"),
        ({"budget_s": "inf"}, r"budget is 'inf'"),
        ({"budget_s": 0}, r"budget is 0 s \(MOE_DIST_BUDGET_S\); it must be above 0"),
        ({"store": ""}, "^moe_dist's store is empty; name a folder or URL, or leave it out for MOE_DIST_STORE or the default$"),
        ("replay", r"^moe_dist's settings are 'replay'; they must be a mapping, as \{'tune': 'replay'\}$"),  # as JSON may have it
        ([["tune", "off"]], r"settings are \[\['tune', 'off'\]\]; they must be a mapping"),
        ({"stroe": "x"}, r"no setting 'stroe'; known: budget_s, policy, store, strategy, tune, unserved"),
    ],
)
def test_wrong_settings_are_named(given: Any, message: str) -> None:
    with pytest.raises(md.ConfigError, match=message):
        serving_settings(given, {})


def test_tunes_once_then_starts_warm_and_replays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cold = model(tmp_path)
    assert cold.tune(COUNTS, None, ENGINE_TIMEOUT) > 0
    warm = model(tmp_path)
    caplog.set_level(logging.INFO, "moe_dist.serving")
    assert warm.tune(COUNTS, None, ENGINE_TIMEOUT) == 0
    assert warm.epoch.digest == cold.epoch.digest
    assert len(warm.epoch.winners) == 2 * 3  # two distinct layers, buckets 1, 2 and 3-4
    lines = [record.getMessage() for record in caplog.records if " x (" in record.getMessage()]
    assert [line.partition(" experts")[0] for line in lines] == ["2 x (4", "1 x (6"]
    assert all("[store]" in line and "[default]" not in line for line in lines)
    replayed = model(tmp_path, "replay")
    assert replayed.tune(COUNTS, None, ENGINE_TIMEOUT) == 0
    assert replayed.epoch.winners.keys() == cold.epoch.winners.keys()


def test_a_start_of_several_passes_publishes_one_epoch_and_a_warm_one_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU, where each mode has a pass of its own.
    halves = [(MeasurementPolicy("eager"), (Bucket(1, 1), Bucket(2, 2))), (MeasurementPolicy("eager"), (Bucket(3, 4),))]
    monkeypatch.setattr("moe_dist.serving._passes", lambda settings, counts, device: halves)
    for _ in range(3):
        served = model(tmp_path)
        served.tune(COUNTS, None, ENGINE_TIMEOUT)
        assert [name.table for name in published(FilesystemStore(tmp_path), "test")] == [served.epoch.digest]
        assert len(served.epoch.winners) == 2 * 3


def test_replay_measures_and_stores_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moe_dist.serving")
    served = model(tmp_path, "replay")
    assert served.tune(COUNTS, None, ENGINE_TIMEOUT) == 0
    assert not served.epoch.winners
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "entries" in path.parts]
    assert "1-4: torch_grouped(" in caplog.text
    assert "[default]" in caplog.text


def test_the_line_of_what_is_served_names_the_store_without_its_password() -> None:
    settings = ServingSettings(store="redis://user:hunter2@127.0.0.1:1/3?prefix=a", tune="replay")
    assert "hunter2" not in repr(settings)
    assert " of redis://127.0.0.1:1/3; 0 candidates timed" in ServedModel(settings, deployment="test").summary(0)


def test_off_opens_no_store(tmp_path: Path) -> None:
    served = model(tmp_path / "never", "off")
    assert served.tune(COUNTS, None, ENGINE_TIMEOUT) == 0
    assert not (tmp_path / "never").exists()


def test_tuned_layers_still_compute_the_layer(tmp_path: Path) -> None:
    served = ServedModel(ServingSettings(store="memory:"), deployment="test")
    weights = weights_of(config())
    layer = served.add("layers.0", config(), weights)
    generator = torch.Generator().manual_seed(0)
    acts = md.MoEActivationPack(
        hidden_states=torch.randn(3, 16, generator=generator),
        topk_ids=torch.tensor([[0, 1], [2, 3], [3, 0]], dtype=torch.int32),
        topk_weights=torch.rand(3, 2, generator=generator),
    )
    before = layer((acts, weights))
    served.tune(COUNTS, None, ENGINE_TIMEOUT)
    assert layer.tuner is not None
    torch.testing.assert_close(layer((acts, weights)), before)


def test_a_reloaded_layer_replaces_the_one_of_its_name() -> None:
    served = ServedModel(ServingSettings(store="memory:", tune="off"), deployment="test")
    served.add("layers.0", config(4), weights_of(config(4)))
    served.add("layers.0", config(6), weights_of(config(6)))
    assert [line.partition(" experts")[0] for line in served.describe(COUNTS)] == ["1 x (6"]


def test_graphs_of_an_earlier_tuning_hold_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that warms up again, with the same layers or with new ones: what was captured meanwhile is still replayed."""
    monkeypatch.setattr("moe_dist.tuning.pins._GRACE_S", 0.05)
    served = model("memory:")
    layer = served._layers[0].layer
    assert served.tune(COUNTS, None, ENGINE_TIMEOUT) > 0
    first, epoch = layer.tuner, served.epoch
    assert first is not None
    again = ServedModel(served.settings, deployment="test", earlier=served)
    again.add("layers.0", config(), weights_of(config()))
    with first.pin():  # as a captured graph has one
        for either in (served, again):
            with pytest.raises(PassAborted, match=r"rank 0: pins \(1\) hold the epoch that is served"):
                either.tune(COUNTS, None, ENGINE_TIMEOUT)
        assert (layer.tuner, served.epoch) == (first, epoch)
    for either in (served, again):
        either.tune(COUNTS, None, ENGINE_TIMEOUT)
    assert layer.tuner is not first


def test_tuning_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """Whatever stayed would cost each step of the engine that serves on: threads, children, a changed garbage collector."""

    def state() -> tuple[object, ...]:
        return gc.isenabled(), gc.get_threshold(), list(gc.callbacks), list(sys.meta_path), multiprocessing.active_children()

    before, threads = state(), set(threading.enumerate())
    model(tmp_path).tune(COUNTS, None, ENGINE_TIMEOUT)
    assert state() == before
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)  # it was told to end, and may not have come to it yet
        assert not thread.is_alive(), thread


class Framework(md.Backend):
    """A framework's own experts: they compute nothing right, but say what they need."""

    name = "framework"

    @dataclasses.dataclass(frozen=True)
    class Config(md.BackendConfig):
        name = "framework"

    config_type = Config

    def why_not(self, problem: md.MoEProblem, device: torch.device, params: md.BackendConfig) -> str | None:
        return None

    def tactics(self, problem: md.MoEProblem, bucket: md.Bucket, device: torch.device, params: md.BackendConfig) -> list[md.Tactic]:
        return [md.Tactic.of(self.name, wide=wide) for wide in (False, True)]

    def default(self, problem: md.MoEProblem, bucket: md.Bucket | None, device: torch.device) -> md.Tactic:
        return md.Tactic.of(self.name, wide=False)

    def workspace(self, problem: md.MoEProblem, tactic: md.Tactic, num_tokens: int) -> md.Workspace:
        return md.Workspace((270 if tactic["wide"] else 200) * num_tokens)

    def bind(self, layer: md.BoundLayer, tactic: md.Tactic) -> Callable[[md.MoEActivationPack, torch.Tensor], md.Tactic]:
        return lambda acts, out: tactic


def test_what_is_kept_free_is_what_the_default_s_backend_may_need() -> None:
    served = ServedModel(ServingSettings(store="memory:"), deployment="test")
    served.add("layers.0", config(), weights_of(config()), [Framework()])
    served.add("layers.1", config(), weights_of(config()), [Framework()])
    assert served.workspace_bytes(COUNTS) == 270 * 4  # the wide one at the largest count
    served.tune(COUNTS, None, ENGINE_TIMEOUT, workspace_limit=served.workspace_bytes(COUNTS))
    winners = {bucket.high: tactic for _, bucket, tactic in served.serves(COUNTS)}
    # torch needs 512 to 704 bytes a token count of 1: two tokens may win with 1024 of 1080, four can't, and the default stays.
    assert winners.keys() == {1, 2, 4}
    assert winners[1].backend != "framework"
    assert str(winners[4]) == "framework(wide=False)"


def test_without_a_framework_s_experts_our_own_default_says_what_is_kept_free() -> None:
    served = model("memory:")
    # torch_grouped: 2816 bytes for 4 tokens of 4 experts, as many for those of 6.
    assert served.workspace_bytes(COUNTS) == 2816
    assert served.tune(COUNTS, None, ENGINE_TIMEOUT, workspace_limit=2816) > 0
    assert served.measured > 0
    assert served.tuning > timedelta(0)


def test_too_little_for_the_default_ends_start_up() -> None:
    with pytest.raises(md.NothingRunnable, match="needs 704 bytes of workspace; the limit is 10"):
        model("memory:").tune(COUNTS, None, ENGINE_TIMEOUT, workspace_limit=10)


def test_what_runs_untuned_is_named(tmp_path: Path) -> None:
    served = ServedModel(ServingSettings(store=str(tmp_path)), deployment="test")
    assert served.default_backends() == set()
    for name, backend in (("a", md.TorchLoopConfig()), ("b", md.TorchGroupedConfig()), ("c", md.TorchLoopConfig())):
        asked = dataclasses.replace(config(), backends=md.BackendOptions((backend,)))
        served.add(name, asked, weights_of(asked))
    assert served.default_backends() == {"torch_loop", "torch_grouped"}


def test_faults_are_counted_and_slowness_is_none() -> None:
    cell, loop, grouped = md.Bucket(1, 4), md.Tactic.of("torch_loop"), md.Tactic.of("torch_grouped")
    rejected = ((cell, loop, "1.31x the best after round 0"), (cell, grouped, "ValueError: no"), (cell, loop, "oom"), (cell, loop, "oom"))
    report = md.PassReport((), 0, 0, rejected, 0.0, "reduce", 1, "")  # type: ignore[arg-type]
    assert faults(report) == [
        "2 candidates of backend torch_loop are out: oom",
        "1 candidates of backend torch_grouped are out: ValueError: no",
    ]


def test_what_another_release_of_the_framework_timed_is_no_hit(tmp_path: Path) -> None:
    """Its own experts are in the pool: another release has other kernels of the same names."""

    def started(release: str) -> int:
        served = ServedModel(ServingSettings(store=str(tmp_path)), deployment="test", versions={"framework": release})
        served.add("layers.0", config(), weights_of(config()), [Framework()])
        return served.tune(COUNTS, None, ENGINE_TIMEOUT)

    assert started("1") > 0
    assert started("1") == 0
    assert started("2") > 0


def test_what_is_damaged_in_a_store_hides_no_epoch_that_is_not(tmp_path: Path) -> None:
    served = model(tmp_path)
    served.tune(COUNTS, None, ENGINE_TIMEOUT)
    store = FilesystemStore(tmp_path)
    (key,) = store.list(EPOCHS)
    store.put(f"{key}x", b"no epoch")
    assert [epoch.digest for epoch in stored_epochs(str(tmp_path))] == [served.epoch.digest]


@pytest.mark.parametrize(("policy", "passes"), [("mode", {"cuda_graph": [1, 2], "eager": [4]}), ("auto", {"auto": [1, 2, 4]})])
def test_each_mode_has_its_own_clock_unless_one_is_asked_for_both(policy: str, passes: dict[str, list[int]]) -> None:
    counts = TokenCounts(4, captured=(1, 2))
    found = _passes(ServingSettings(store="memory:", policy=policy), counts, CPU)
    assert {clock.kind: [bucket.high for bucket in buckets] for clock, buckets in found} == passes


def test_every_winner_is_bound_before_anything_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bind may allocate, or wait for the device: neither can be under capture."""
    bound = list[md.Tactic]()

    class Binding(Framework):
        def bind(self, layer: md.BoundLayer, tactic: md.Tactic) -> Callable[[md.MoEActivationPack, torch.Tensor], md.Tactic]:
            bound.append(tactic)

            def run(acts: md.MoEActivationPack, out: torch.Tensor) -> md.Tactic:
                time.sleep(0 if tactic["wide"] else 0.002)  # the default, which was bound from the beginning, does not win
                return tactic

            return run

    monkeypatch.setattr(ServedModel, "describe", lambda self, counts: [])  # which binds too, but one rank of a group alone says its lines
    alone = dataclasses.replace(config(), backends=md.BackendOptions((Framework.Config(),)))
    served, weights = ServedModel(ServingSettings(store="memory:"), deployment="test"), weights_of(config())
    layer = served.add("layers.0", alone, weights, [Binding()])
    served.tune(COUNTS, None, ENGINE_TIMEOUT)
    before = len(bound)
    ids = torch.zeros(3, 2, dtype=torch.int32)
    layer((md.MoEActivationPack(hidden_states=torch.zeros(3, 16), topk_ids=ids, topk_weights=torch.zeros(3, 2)), weights))
    assert len(bound) == before > 0


def test_progress_is_said_at_once_and_then_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    monkeypatch.setattr("moe_dist.serving.time.monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, "moe_dist.serving")
    say, counts = _progress_line(), list[int]()
    for moment in (1000.0, 1009.0, 1010.0):
        now[0] = moment
        for phase in ("plan", "measure"):
            say(SimpleNamespace(phase=phase, done=0, cells=9, cell="a cell"))  # type: ignore[arg-type]
        counts.append(len(caplog.records))
    assert counts == [1, 1, 2]
    assert caplog.records[0].getMessage() == "tuning 1 of 9: a cell"
