"""What one layer of vLLM's means to ours, which experts of vLLM's own may stand beside them, and what of an engine's config is tuned."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_layer import layer, stand_in

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("plugins")]
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 3, 128, 64, 8


class Call:
    """Inputs of one call in fp32, and what it should give: plain loops over tokens and slots."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.w1, self.w2 = (
            torch.randn(EXPERTS, *shape, generator=generator) * 0.2 for shape in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
        )
        self.b1, self.b2 = torch.randn(EXPERTS, 2 * INTERMEDIATE, generator=generator), torch.randn(EXPERTS, HIDDEN, generator=generator)
        self.x, self.scores = torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, 2, generator=generator)
        self.ids = torch.tensor([[0, 5], [7, 1], [2, 3]], dtype=torch.int32)

    def run(self, experts: Any) -> torch.Tensor:
        out = torch.full((TOKENS, HIDDEN), torch.nan)
        experts.run(out, self.x, self.w1, self.w2, self.scores, self.ids, None)
        return out

    def truth(self, *, biased: bool = False, limit: float | None = None, weighted: bool = True) -> torch.Tensor:
        out = torch.zeros(TOKENS, HIDDEN)
        for token in range(TOKENS):
            for slot, expert in enumerate(self.ids[token]):
                gate, up = (self.w1[expert] @ self.x[token] + biased * self.b1[expert]).chunk(2)
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                down = self.w2[expert] @ (torch.nn.functional.silu(gate) * up) + biased * self.b2[expert]
                out[token] += (self.scores[token, slot] if weighted else 1) * down
        return out


def ours(quant: Any = None, **fields: Any) -> Any:
    from moe_dist_vllm.experts import MoEDistExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    return MoEDistExperts(layer(in_dtype=torch.float32, **fields), quant or FusedMoEQuantConfig.make())


@pytest.mark.usefixtures("engine")
def test_a_router_s_weight_that_vllm_has_applied_to_the_rows_is_not_applied_again() -> None:
    """As vLLM's prepare step does for Llama 4."""
    call, experts, out = Call(), ours(), torch.empty(TOKENS, HIDDEN)
    for applied in (True, False):
        experts.apply(
            output=out, hidden_states=call.x, w1=call.w1, w2=call.w2, topk_weights=call.scores, topk_ids=call.ids, activation=None,
            global_num_experts=EXPERTS, expert_map=None, a1q_scale=None, a2_scale=None, workspace13=out[:0], workspace2=out[:0],
            expert_tokens_meta=None, apply_router_weight_on_input=applied,
        )  # fmt: skip
        torch.testing.assert_close(out, call.truth(weighted=not applied))


@pytest.mark.parametrize("replaced", ["w1", "w2"])
@pytest.mark.usefixtures("engine")
def test_either_matrix_that_is_another_tensor_is_read(replaced: str) -> None:
    call, experts = Call(), ours()
    call.run(experts)
    setattr(call, replaced, getattr(call, replaced).flip(0).contiguous())
    torch.testing.assert_close(call.run(experts), call.truth())


@pytest.mark.usefixtures("engine")
def test_biases_of_both_products_are_added() -> None:
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config

    call = Call()
    experts = ours(biased_moe_quant_config(call.b1, call.b2), has_bias=True)
    torch.testing.assert_close(call.run(experts), call.truth(biased=True))


@pytest.mark.parametrize("named", ["swiglu_limit", "gemm1_clamp_limit"])
@pytest.mark.usefixtures("engine")
def test_the_limit_of_swiglu_is_kept_wherever_vllm_says_it(named: str) -> None:
    """vLLM looks at the quant config first, and then at the layer's."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    call = Call()
    experts = ours(swiglu_limit=0.5) if named == "swiglu_limit" else ours(FusedMoEQuantConfig.make(gemm1_clamp_limit=0.5), swiglu_limit=2.0)
    out = call.run(experts)
    torch.testing.assert_close(out, call.truth(limit=0.5))
    assert not torch.allclose(out, call.truth())


@pytest.mark.parametrize(("changed", "value"), [("scale", torch.float8_e8m0fnu), ("symmetric", False), ("dtype", torch.int8)])
@pytest.mark.usefixtures("engine")
def test_fp8_whose_numbers_mean_something_else_is_refused(changed: str, value: Any) -> None:
    """Scales that are exponents, a zero point, other numbers than fp8's: each read as ours would be another weight."""
    import dataclasses

    from vllm.model_executor.layers.fused_moe.oracle.fp8 import select_fp8_moe_backend
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

    key = kFp8Static128BlockSym
    other = dataclasses.replace(key, **{changed: dataclasses.replace(key.scale, dtype=value) if changed == "scale" else value})
    config = layer(intermediate_size=128)
    assert select_fp8_moe_backend(config, key, kFp8Dynamic128Sym)[1].__name__ == "MoEDistExperts"
    with pytest.raises(ValueError, match=r"moe_dist has no experts for QuantKey\(.* weights"):
        select_fp8_moe_backend(config, other, kFp8Dynamic128Sym)


# -- vLLM's own experts beside ours ------------------------------------------------------------------------------------------


def natives_for(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of vLLM's own for fp8 by block, on a machine that would have all kinds of them."""
    from vllm.model_executor.layers.fused_moe.experts.triton_deep_gemm_moe import TritonOrDeepGemmExperts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

    for experts in (TritonExperts, TritonOrDeepGemmExperts):
        monkeypatch.setattr(experts, "is_supported_config", staticmethod(lambda *layer: (True, None)))
    _, chosen = fp8.select_fp8_moe_backend(layer(intermediate_size=128), kFp8Static128BlockSym, kFp8Dynamic128Sym)
    assert chosen.__name__ == "MoEDistExperts"
    return [experts.__name__ for experts in chosen.natives]


@pytest.mark.parametrize(("supported", "e8m0"), [(True, False), (True, True), (False, False)])
@pytest.mark.usefixtures("engine")
def test_experts_that_would_rewrite_the_weights_in_place_do_not_join(supported: bool, e8m0: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM with E8M0 scales quantises them anew; where it does not run at all it has nothing to add."""
    monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_supported", lambda: supported)
    monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_e8m0_used", lambda: e8m0)
    assert ("TritonOrDeepGemmExperts" in natives_for("fp8", monkeypatch)) == (supported and not e8m0)


@pytest.mark.parametrize("monolithic", [False, True])
@pytest.mark.usefixtures("engine")
def test_experts_that_route_by_themselves_do_not_join(monolithic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    monkeypatch.setattr(TritonExperts, "is_monolithic", staticmethod(lambda: monolithic))
    assert ("TritonExperts" in natives_for("fp8", monkeypatch)) is not monolithic


@pytest.mark.usefixtures("engine")
def test_vllm_s_log_says_no_choice_that_was_only_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    said = list[str]()

    class Logger:
        disabled = False

        def __getattr__(self, name: str) -> Any:
            return lambda line, *values: None if self.disabled or name.startswith("debug") else said.append(line)

    monkeypatch.setattr(unquantized, "logger", Logger())
    unquantized.select_unquantized_moe_backend(layer())
    assert len(said) == 1
    assert "moe_dist" in said[0]
    unquantized.select_unquantized_moe_backend(layer(moe_backend="auto"))
    assert len(said) == 2  # and what is chosen later is said again


@pytest.mark.usefixtures("engine")
def test_experts_that_leave_the_sum_to_vllm_are_told_apart_before_they_run() -> None:
    """Ours hand vLLM rows that are summed over experts: a tactic that does not sum would be taken for one that does."""
    from moe_dist_vllm.experts import MoEDistExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    class Unsummed(stand_in()):  # type: ignore[misc]
        finalize_weight_and_reduce_impl = staticmethod(object)

        def apply(self, output: torch.Tensor, *args: Any, **named: Any) -> None:
            output.zero_()

    experts = MoEDistExperts.with_natives([Unsummed])(layer(in_dtype=torch.float32), FusedMoEQuantConfig.make())
    with pytest.raises(TypeError, match="Unsummed leaves the sum over experts to its caller"):
        Call().run(experts)


@pytest.mark.usefixtures("engine")
def test_experts_that_vllm_makes_anew_keep_its_own_beside_ours() -> None:
    """As after some reloads, of a layer that is tuned: what serves it may be vLLM's."""
    from datetime import timedelta

    from moe_dist_vllm.experts import MoEDistExperts
    from moe_dist_vllm.native import VllmBackend
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from moe_dist.serving import ServedModel, TokenCounts
    from moe_dist.settings import ServingSettings

    class Silent(VllmBackend):
        def bind(self, layer: Any, tactic: Any) -> Any:
            return lambda acts, out: (out.fill_(7), tactic)[1]

        def workspace(self, *args: Any) -> Any:
            import moe_dist as md

            return md.Workspace(0)

    class Experts(MoEDistExperts):
        def native(self) -> tuple[VllmBackend, ...]:
            return (Silent((object,), self.moe_config, self.quant_config),)

    call, config = Call(), layer(in_dtype=torch.float32)
    model = ServedModel(ServingSettings(store="memory:", tune="replay"), deployment="test")  # the default serves: vLLM's
    experts = Experts(config, FusedMoEQuantConfig.make())
    experts.serve(model, "layer", call.w1, call.w2, None, 4)
    model.tune(TokenCounts(4), None, timedelta(seconds=100))
    assert call.run(experts).unique().tolist() == [7]
    assert call.run(Experts(config, FusedMoEQuantConfig.make())).unique().tolist() == [7]


# -- the engine's config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "changes", "captured", "eager_from"),
    [
        ("FULL_AND_PIECEWISE", {}, (2, 16), None),
        ("FULL_DECODE_ONLY", {}, (2, 16), 1),  # every prefill is eager
        ("NONE", {}, (), None),
        ("FULL_AND_PIECEWISE", {"enforce_eager": True}, (), None),
        ("FULL_AND_PIECEWISE", {"device": "cpu"}, (), None),  # which has none, whatever its config lists
    ],
)
def test_what_is_tuned_is_what_the_engine_captures(
    mode: str, changes: dict[str, Any], captured: tuple[int, ...], eager_from: int | None
) -> None:
    from moe_dist_vllm.warmup import token_counts

    from moe_dist.serving import TokenCounts

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=mode), cudagraph_capture_sizes=[8, 1, 128]),
        model_config=SimpleNamespace(enforce_eager=changes.get("enforce_eager", False)),
        device_config=SimpleNamespace(device_type=changes.get("device", "cuda")),
    )
    assert token_counts(config) == TokenCounts(128, captured, eager_from)


def test_ranks_in_step_are_the_expert_parallel_group_or_else_the_tensor_parallel_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_dist_vllm import warmup

    expert, tensor, alone = (SimpleNamespace(world_size=size, cpu_group=name) for size, name in ((4, "ep"), (2, "tp"), (1, "one")))
    monkeypatch.setattr(warmup.parallel_state, "get_tp_group", lambda: tensor)
    monkeypatch.setattr(warmup.parallel_state, "_EP", expert)
    assert warmup.group_in_step() == "ep"
    monkeypatch.setattr(warmup.parallel_state, "_EP", None)  # a model that is dense
    assert warmup.group_in_step() == "tp"
    monkeypatch.setattr(warmup.parallel_state, "_EP", alone)
    assert warmup.group_in_step() is None


@pytest.mark.parametrize(
    ("model", "draft", "asked"), [("moe_dist", None, True), ("auto", "moe_dist", True), ("auto", None, False), ("auto", "triton", False)]
)
def test_a_worker_tunes_if_the_model_or_its_draft_asks_for_us(
    model: str, draft: str | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speculative decoding has a --moe-backend of its own, for the draft model."""
    from moe_dist_vllm import patch, warmup

    class Worker:
        vllm_config = SimpleNamespace(
            kernel_config=SimpleNamespace(moe_backend=model), speculative_config=draft and SimpleNamespace(moe_backend=draft)
        )

        def compile_or_warm_up_model(self) -> str:
            return "warm"

        def determine_available_memory(self) -> int:
            return 7

    tuned = list[str]()

    class Counted:
        def __init__(self, worker: Worker) -> None:
            tuned.append("counted")

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(warmup, "tune", lambda worker: tuned.append("tuned"))
    monkeypatch.setattr(warmup, "scratch_counted", Counted)
    patch._patch_worker("Worker", SimpleNamespace(Worker=Worker))  # type: ignore[arg-type]
    assert (Worker().determine_available_memory(), Worker().compile_or_warm_up_model()) == (7, "warm")
    assert tuned == (["counted", "tuned"] if asked else [])


@pytest.mark.parametrize("weight", ["w13_weight", "w13_qweight", "w13_weight_packed"])
def test_layers_that_are_left_to_vllm_are_said_however_it_came_to_that(weight: str, caplog: pytest.LogCaptureFixture) -> None:
    """Some of vLLM's methods ask no oracle, so that no choice of theirs is seen."""
    from moe_dist_vllm import patch
    from moe_dist_vllm.warmup import served_model

    patch.say_once.cache_clear()
    module = torch.nn.Module()
    module.moe_config, module.quant_method = SimpleNamespace(moe_backend="moe_dist"), SimpleNamespace(moe_kernel=None)
    setattr(module, weight, torch.empty(0))
    config = SimpleNamespace(additional_config={"moe_dist": {"unserved": "native"}})
    worker = SimpleNamespace(
        vllm_config=config, model_runner=SimpleNamespace(get_model=lambda: torch.nn.ModuleDict({"a": module, "again": module}))
    )
    for _ in range(2):  # before the KV cache is sized, and after
        with pytest.raises(AttributeError, match="parallel_config"):  # past it: what the engine will run is asked
            served_model(worker)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == "of --moe-backend=moe_dist 1 layers run vLLM's own experts, first a: SimpleNamespace"  # one module, of two names


def test_a_second_register_changes_nothing() -> None:
    """vLLM loads its plugins in each process, and in some of them again."""
    from moe_dist_vllm import register
    from vllm.model_executor.layers.fused_moe.oracle import fp8

    before = fp8.select_fp8_moe_backend, fp8.backend_to_kernel_cls, list(sys.meta_path)
    register()
    assert (fp8.select_fp8_moe_backend, fp8.backend_to_kernel_cls, list(sys.meta_path)) == before


@pytest.mark.usefixtures("engine")
def test_uneven_shares_of_experts_are_served() -> None:
    from moe_dist_vllm.experts import why_not

    assert why_not(layer(num_experts=9, num_local_experts=5, parallel={"use_ep": True, "ep_size": 2}), None, None) is None


def test_vllm_s_own_experts_find_room_for_the_output_in_their_workspace() -> None:
    """As vLLM's modular kernel gives it, whose kernels may put the output there; and as much is counted."""
    from moe_dist_vllm.native import VllmBackend
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    import moe_dist as md

    room = list[int]()

    class Small:
        expects_unquantized_inputs, a2_scale = True, None
        finalize_weight_and_reduce_impl = staticmethod(TopKWeightAndReduceNoOP)
        moe_problem_size = staticmethod(lambda a1, w1, w2, ids: (8, len(a1), w1.shape[1], a1.shape[1], ids.shape[1]))
        workspace_shapes = staticmethod(lambda M, N, K, *rest: ((M,), (M, 2), (M, K)))
        workspace_dtype = staticmethod(lambda dtype: dtype)

        def __init__(self, *configs: object) -> None: ...

        def apply(self, *, output: torch.Tensor, workspace13: torch.Tensor, **named: Any) -> None:
            room.append(workspace13.untyped_storage().nbytes())
            output.zero_()

    config = md.MoEConfig(
        routing=md.RoutingConfig(EXPERTS, 2), experts=md.ExpertConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE),
        quant=md.QuantConfig(dtype="fp32"),
    )  # fmt: skip
    backend = VllmBackend([Small], SimpleNamespace(activation=None), None)
    call, out = Call(), torch.empty(TOKENS, HIDDEN)
    bound = SimpleNamespace(
        weights=SimpleNamespace(w13=call.w1, w2=call.w2), problem=SimpleNamespace(config=config), num_local_experts=EXPERTS, expert_map=None
    )
    tactic = md.Tactic.of("vllm", experts="Small")
    backend.bind(bound, tactic)(SimpleNamespace(hidden_states=call.x, topk_ids=call.ids, topk_weights=call.scores), out)  # type: ignore[arg-type]
    assert room == [TOKENS * HIDDEN * 4]
    assert backend.workspace(md.MoEProblem.of(config, routed=True), tactic, TOKENS).nbytes == TOKENS * (HIDDEN + 2) * 4


def test_where_auto_has_nothing_for_a_layer_the_rest_may_still_join() -> None:
    from moe_dist_vllm.native import sharing

    def select(config: Any) -> Any:
        raise ValueError("no backend")

    oracle = SimpleNamespace(logger=logging.getLogger("oracle"), backend_to_kernel_cls=lambda backend: [])
    config = SimpleNamespace(moe_backend="moe_dist")
    assert sharing(oracle, SimpleNamespace(TRITON="triton"), select, config, [config], {}) == []  # type: ignore[arg-type]
    assert not oracle.logger.disabled


def test_a_name_that_others_have_imported_is_replaced_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    from moe_dist_vllm import patch

    owner, importer, other = (ModuleType(f"vllm.{name}") for name in ("owner", "importer", "other"))
    owner.select = importer.select = object()  # type: ignore[attr-defined]
    other.select = kept = object()  # type: ignore[attr-defined]
    for module in (owner, importer, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    new = object()
    patch._replace(owner, "select", new)
    assert (owner.select, importer.select, other.select) == (new, new, kept)


def test_deployments_that_differ_share_no_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_dist_vllm import warmup

    def named(*, served: str | None = "served", stage: int = 0, **parallel: Any) -> str:
        fields = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}
        monkeypatch.setattr(warmup.parallel_state, "get_pp_group", lambda: SimpleNamespace(rank_in_group=stage))
        return warmup.deployment(
            SimpleNamespace(
                parallel_config=SimpleNamespace(**fields | parallel), model_config=SimpleNamespace(served_model_name=served, model="folder")
            )
        )

    assert named() == "vllm:served:tp1-pp1-dp1:stage0"
    assert named(served=None) == "vllm:folder:tp1-pp1-dp1:stage0"
    assert named(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=4, enable_expert_parallel=True, stage=1) == (
        "vllm:served:tp2-pp3-dp4-ep:stage1"
    )


@pytest.mark.parametrize("natives", [False, True])
@pytest.mark.usefixtures("engine")
def test_what_tuning_is_told_of_the_engine(natives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's release where its experts are in the pool, its start-up timeout, and what served this worker's model before."""
    import vllm
    from moe_dist_vllm import warmup
    from vllm.config import get_current_vllm_config

    from moe_dist.serving import TokenCounts

    monkeypatch.setattr(warmup, "token_counts", lambda config: TokenCounts(4))
    monkeypatch.setattr(warmup, "deployment", lambda config: "test")
    monkeypatch.setattr(warmup, "group_in_step", lambda: None)
    monkeypatch.setattr(warmup.envs, "VLLM_ENGINE_READY_TIMEOUT_S", 77)
    told = dict[str, Any]()

    class Model:
        def __init__(self, settings: Any, **named: Any) -> None:
            told.update(named)

        def add(self, *layer: Any) -> None: ...

        def tune(self, counts: Any, group: Any, timeout: Any, workspace_limit: Any) -> None:
            told["timeout"] = timeout.total_seconds()

    monkeypatch.setattr(warmup, "ServedModel", Model)
    call, experts, module = Call(), ours(), torch.nn.Module()
    monkeypatch.setattr(type(experts), "natives", (object,) if natives else ())
    module.moe_config, module.expert_map = experts.moe_config, None
    module.w13_weight, module.w2_weight = call.w1, call.w2
    module.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))
    worker = SimpleNamespace(
        vllm_config=get_current_vllm_config(), model_runner=SimpleNamespace(get_model=lambda: module), moe_dist="what served before"
    )
    warmup.tune(worker)
    versions = {"vllm": vllm.__version__} if natives else {}
    assert told == {"deployment": "test", "versions": versions, "earlier": "what served before", "timeout": 77}
