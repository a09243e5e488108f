"""A loaded model's start-up: what is kept free, which ranks tune together and over what, whose epochs they are."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_stand_ins import HIDDEN, TOP_K, layer_of, method_of

import moe_dist as md

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("published")]


def engine_of(layer: Any, method: Any, **fields: Any) -> Any:
    """A stand-in for the model runner of a model of this one layer."""
    holder = torch.nn.Module()
    holder.experts = FakeExperts(layer, method)
    return SimpleNamespace(
        model=holder, device="cuda", decode_num_tokens_per_req=lambda: 1, is_draft_worker=False, draft_model_idx=None,
        server_args=SimpleNamespace(served_model_name="m", model_path="m"), **fields,
    )  # fmt: skip


class FakeExperts(torch.nn.Module):
    """A `FusedMoE` in name, by `monkeypatch`: what `serve.attach` reads of one."""

    def __init__(self, layer: Any, method: Any) -> None:
        from moe_dist_sglang.runner import MoEDistRunnerCore

        super().__init__()
        for name, value in vars(layer).items():
            setattr(self, name, value)
        self.quant_method = method
        method.runner = self.runner = SimpleNamespace(runner_core=MoEDistRunnerCore(layer.moe_runner_config))
        self.runner_backend = "moe_dist"


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The widths that `serve` reads: one rank, until a test says otherwise."""
    from moe_dist_sglang import serve

    widths = SimpleNamespace(
        tp_size=1, moe_ep_size=1, attn_dp_size=1, pp_size=1, pp_rank=0, attn_cp_size=1, moe_dp_size=1, dist_timeout=None
    )
    monkeypatch.setattr(serve, "FusedMoE", FakeExperts)
    monkeypatch.setattr(serve, "get_parallel", lambda: widths)
    monkeypatch.setattr(
        serve,
        "get_schedule",
        lambda: SimpleNamespace(chunked_prefill_size=16, max_prefill_tokens=64, max_running_requests=4, enable_mixed_chunk=False),
    )
    monkeypatch.setenv("MOE_DIST_STORE", "memory:")
    return widths


@pytest.mark.parametrize("gathered", [1, 4])  # attention data parallelism: a layer sees the rows of all its ranks
def test_scratch_is_kept_free_while_the_kv_cache_is_sized_as_much_on_every_rank(parallel: Any, gathered: int) -> None:
    from moe_dist_sglang import serve

    from moe_dist.serving import TokenCounts

    parallel.attn_dp_size = gathered
    kept = []
    for rank in (0, 1):
        engine = engine_of(layer_of(2, rank, no_combine=True), method_of())  # not one for SGLang's own experts
        serve.attach(engine)
        kept.append(getattr(engine, serve.KEPT).nbytes)
        assert kept[-1] == getattr(engine, serve.SERVED).workspace_bytes(TokenCounts(16 * gathered))
    assert kept[0] == kept[1] > 0
    assert kept[0] > 16 * gathered * TOP_K * HIDDEN * 4  # at least each slot's result: it grows with the rows


def test_nothing_is_kept_where_sglang_s_own_experts_are_the_default(parallel: Any) -> None:
    from moe_dist_sglang import serve

    engine = engine_of(layer_of(), method_of())
    serve.attach(engine)
    assert getattr(engine, serve.KEPT) is None
    assert getattr(engine, serve.SERVED).default_backends() == {"sglang"}


class OwnWay(FakeExperts):
    def forward(self, *args: Any) -> None:
        """As Muse Spark's experts on a CPU: their own routing, then the runner with ids of a rank."""


def model_of(kind: str) -> torch.nn.Module:
    """A layer that our runner serves, then one whose calls never come to it, though its experts may have it."""
    blocks = [torch.nn.Module(), torch.nn.Module()]
    blocks[0].experts = FakeExperts(layer_of(), method_of())
    for block in blocks:
        block.topk = torch.nn.Identity()
    if kind == "own_way":
        blocks[1].experts = OwnWay(layer_of(), method_of())
    if kind == "inkling":
        blocks[1].experts = FakeExperts(layer_of(), method_of())
        blocks[1].experts.inference_moe_w13_interleaved = True
    return torch.nn.ModuleList(blocks)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no_experts", "^1: Module has no FusedMoE: it calls SGLang's kernels itself, whatever runner is chosen$"),
        ("own_way", "^1.experts: OwnWay goes its own way to its experts$"),
        ("inkling", "^1.experts: Inkling's unquantised experts go to a kernel of its own, whatever runner is chosen$"),
    ],
    ids=["no_experts", "own_way", "inkling"],
)
def test_experts_that_no_runner_is_asked_for_end_start_up(
    parallel: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, reason: str
) -> None:
    from moe_dist_sglang import serve

    engine = engine_of(layer_of(), method_of())
    engine.model, engine.device = model_of(kind), "cpu"
    monkeypatch.setattr(serve, "TopK", torch.nn.Identity)
    monkeypatch.delenv("MOE_DIST_UNSERVED", raising=False)
    with pytest.raises(md.UnsupportedBackend) as refused:
        serve.attach(engine)
    assert re.search(reason, refused.value.reason)
    monkeypatch.setenv("MOE_DIST_UNSERVED", "native")
    serve.attach(engine)
    said = [record.getMessage().removeprefix("not served by moe_dist: ") for record in caplog.records if record.name == "moe_dist.sglang"]
    assert [bool(re.search(reason, line)) for line in said] == [True]
    assert [layer.name for layer in getattr(engine, serve.SERVED)._layers] == ["0.experts"]


@pytest.mark.parametrize("other", ["core", "runner"])
def test_after_load_a_layer_runs_our_core_and_by_the_runner_that_its_method_calls(parallel: Any, other: str) -> None:
    """SGLang may make a runner anew: a layer that still holds ours would be bound, and its method would call another."""
    from moe_dist_sglang import serve

    engine = engine_of(layer_of(), method_of())
    experts = engine.model.experts
    if other == "core":
        experts.runner.runner_core = object()
    else:
        experts.quant_method.runner = SimpleNamespace(runner_core=experts.runner.runner_core)
    experts.runner.runner_backend = "triton"
    with pytest.raises(md.UnsupportedBackend) as refused:
        serve.attach(engine)
    assert refused.value.reason == "experts: SGLang gave it the runner triton"


@pytest.mark.parametrize(
    ("fields", "draft", "said"),
    [
        ({"num_experts": 8}, False, "^the model's config has num_experts 8, and none of its modules is a FusedMoE$"),
        ({"num_experts": 8}, True, None),
        ({}, False, "^the model has no MoE layer: moe_dist serves nothing of it$"),
    ],
    ids=["experts", "draft", "dense"],
)
def test_a_model_without_a_layer_to_serve_is_not_served_in_silence(
    parallel: Any, caplog: pytest.LogCaptureFixture, fields: dict[str, int], draft: bool, said: str | None
) -> None:
    from moe_dist_sglang import serve

    engine = engine_of(layer_of(), method_of())
    engine.model, engine.device, engine.is_draft_worker = torch.nn.Linear(2, 2), "cpu", draft
    engine.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(**fields))
    if said and fields:
        with pytest.raises(md.UnsupportedBackend) as refused:
            serve.attach(engine)
        assert re.search(said, refused.value.reason)
        return
    serve.attach(engine)
    lines = [record.getMessage() for record in caplog.records if record.name == "moe_dist.sglang"]
    assert [bool(said and re.search(said, line)) for line in lines] == ([True] if said else [])


def test_kept_memory_is_given_back_and_the_whole_tensor_parallel_group_tunes(parallel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That group spans attention data parallelism and expert parallelism; narrower groups run a layer in step with ranks outside them."""
    from moe_dist_sglang import serve

    from moe_dist.serving import TokenCounts

    engine = engine_of(layer_of(), method_of())
    engine.device = "cpu"
    serve.attach(engine)
    tuned = []
    model = SimpleNamespace(tune=lambda counts, group, timeout: tuned.append((counts, group, timeout.total_seconds())))
    setattr(engine, serve.SERVED, model)
    setattr(engine, serve.KEPT, torch.empty(8))
    monkeypatch.setattr(serve, "token_counts", lambda runner: TokenCounts(16))
    parallel.tp_size, parallel.tp_group, parallel.dist_timeout = 4, SimpleNamespace(cpu_group="all four"), 77
    for name in ("moe_ep_group", "moe_tp_group", "attn_tp_group"):
        setattr(parallel, name, SimpleNamespace(cpu_group=f"some of {name}"))
    serve.tune(engine)
    serve.tune(engine)  # SGLang warms up once more
    assert tuned == [(TokenCounts(16), "all four", 77.0)]
    assert getattr(engine, serve.KEPT) is None


def test_draft_models_and_other_layouts_share_no_epoch(parallel: Any) -> None:
    from moe_dist_sglang import serve

    def named(**fields: Any) -> str:
        engine = engine_of(layer_of(), method_of())
        for name, value in fields.items():
            setattr(engine, name, value)
        return serve.deployment(engine)

    target, draft, second = named(), named(is_draft_worker=True), named(is_draft_worker=True, draft_model_idx=1)
    assert target == "sglang:m:tp1-ep1-dp1-pp1:stage0"
    assert draft == f"{target}:draft0"
    assert second == f"{target}:draft1"
    parallel.attn_cp_size = 2
    assert named() == "sglang:m:tp1-ep1-dp1-pp1-cp2-moedp1:stage0"
    parallel.pp_rank = 1  # another stage has other layers
    assert named() == "sglang:m:tp1-ep1-dp1-pp1-cp2-moedp1:stage1"


def graphs(decode: bool = True, prefill: tuple[int, ...] = ()) -> Any:
    """What SGLang resolved of its CUDA graphs."""
    return SimpleNamespace(
        decode=SimpleNamespace(backend="full" if decode else "disabled"),
        prefill=SimpleNamespace(backend="full" if prefill else "disabled", bs=prefill),
    )


@pytest.mark.parametrize(
    ("config", "fields", "expected"),
    [
        (None, {}, (16, (), None)),
        (graphs(decode=False), {}, (16, (), None)),  # --disable-cuda-graph: every count runs eagerly
        (graphs(), {}, (16, (1, 2, 4), 1)),  # every prefill runs eagerly, however short
        (graphs(), {"rows": 2}, (16, (2, 4, 8), 1)),  # a draft's tokens are verified with their request's
        (graphs(prefill=(8, 16)), {}, (16, (1, 2, 4, 8, 16), None)),
        (graphs(prefill=(8, 16, 64)), {}, (16, (1, 2, 4, 8, 16), None)),  # no step has as many
        (graphs(), {"gathered": 2}, (32, (2, 4, 8), 1)),  # attention data parallelism: the rows of both ranks
        (graphs(), {"mixed": True}, (20, (1, 2, 4), 1)),  # a chunk beside all requests that decode
        (graphs(), {"chunk": -1}, (64, (1, 2, 4), 1)),  # no chunks: whole prompts
        (graphs(), {"device": "cpu"}, (16, (), None)),
    ],
)
def test_what_is_tuned_is_what_the_engine_captures_and_runs(
    parallel: Any, monkeypatch: pytest.MonkeyPatch, config: Any, fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    from moe_dist_sglang import serve

    from moe_dist.serving import TokenCounts

    asked: dict[str, Any] = {"rows": 1, "gathered": 1, "mixed": False, "chunk": 16, "device": "cuda"} | fields
    parallel.attn_dp_size = asked["gathered"]
    schedule = SimpleNamespace(
        chunked_prefill_size=asked["chunk"], max_prefill_tokens=64, max_running_requests=4, enable_mixed_chunk=asked["mixed"]
    )
    monkeypatch.setattr(serve, "get_schedule", lambda: schedule)
    monkeypatch.setattr(serve, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=config)))
    monkeypatch.setattr(serve, "get_batch_sizes_to_capture", lambda runner, width: ([1, 2, 4], []))
    engine = engine_of(layer_of(), method_of(), max_running_requests=4)
    engine.device, engine.decode_num_tokens_per_req = asked["device"], lambda: asked["rows"]
    assert serve.token_counts(engine) == TokenCounts(*expected)


def test_on_cuda_tuning_runs_on_the_stream_that_serves_within_what_was_kept_free(parallel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_dist_sglang import serve

    from moe_dist.serving import TokenCounts

    order: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            order.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            order.append(f"on {self.name}")

        def __exit__(self, *error: object) -> None:
            order.append(f"off {self.name}")

    engine = engine_of(layer_of(), method_of(), forward_stream=Stream("forward"))
    current = Stream("current")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(serve, "token_counts", lambda runner: TokenCounts(16))
    model = SimpleNamespace(
        workspace_bytes=lambda counts: 100 * counts.max_num_tokens,
        tune=lambda counts, group, timeout, workspace_limit: order.append(f"tuned within {workspace_limit}"),
    )
    setattr(engine, serve.SERVED, model)
    serve.tune(engine)
    assert order == ["forward waits for current", "on forward", "tuned within 1600", "off forward", "current waits for forward"]


def test_a_draft_of_the_target_s_shape_tunes_for_itself_once(parallel: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Equal layers in one process: two epochs, and neither takes the other's place in the store."""
    from moe_dist_sglang import serve

    from moe_dist.serving import TokenCounts, stored_epochs

    monkeypatch.setenv("MOE_DIST_STORE", str(tmp_path))
    monkeypatch.setenv("MOE_DIST_BUDGET_S", "120")  # never spent, however busy the machine is
    monkeypatch.setattr(serve, "token_counts", lambda runner: TokenCounts(2))

    def start() -> list[tuple[str, int]]:
        ended = []
        for drafts in (False, True):
            engine = engine_of(layer_of(), method_of())
            engine.device, engine.is_draft_worker = "cpu", drafts
            serve.attach(engine)
            model = getattr(engine, serve.SERVED)
            serve.tune(engine)
            ended.append((model.epoch.deployment, model.measured))
        return ended

    (target, measured), (draft, again) = start()
    assert draft == f"{target}:draft0"
    assert measured > 0
    assert again == 0  # the keys are of the work, not of the model: what the target timed serves both
    assert [epoch.deployment for epoch in stored_epochs(str(tmp_path))] == sorted([target, draft])
    assert start() == [(target, 0), (draft, 0)]
