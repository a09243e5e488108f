"""What vLLM answers for a layer that moe_dist does not serve: our reason in vLLM's own error, or its own experts where that is set."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch
from vllm_layer import layer, stand_in

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("plugins")]


def select(config: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    return unquantized.select_unquantized_moe_backend(config)


@pytest.mark.usefixtures("engine")
def test_a_layer_that_we_serve_gets_ours_in_the_checkpoint_s_layout() -> None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    backend, experts = select(layer())
    assert experts.__name__ == "MoEDistExperts"
    assert backend == UnquantizedMoeBackend.TRITON
    assert backend in [UnquantizedMoeBackend.TRITON]
    assert backend != UnquantizedMoeBackend.CPU
    assert backend.value == "moe_dist"


@pytest.mark.usefixtures("engine")
def test_other_choices_stay_vllm_s_own() -> None:
    _, experts = select(layer(moe_backend="auto"))
    assert experts.__name__.endswith("CPUUnquantizedExperts")
    with pytest.raises(ValueError, match="moe_backend='cutlass' is not supported for unquantized MoE"):
        select(layer(moe_backend="cutlass"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"is_lora_enabled": True},
            "moe_backend='moe_dist' can't serve this layer: it does not run LoRA adapters; choose another --moe-backend",
        ),
        ({"parallel": {"enable_eplb": True}}, "keeps each expert where it was loaded, so it can't run with EPLB"),
        # An all-to-all that hands over rows of its own layout; only with data parallelism does vLLM use one.
        (
            {"parallel": {"use_ep": True, "ep_size": 2, "dp_size": 2, "all2all_backend": "deepep_high_throughput"}},
            "does not take the rows of --all2all-backend deepep_high_throughput; choose allgather_reducescatter",
        ),
        ({"activation": "SWIGLUOAI"}, "has no activation 'swigluoai'"),  # gate and up rows interleaved
        ({"in_dtype": torch.float64}, "runs bf16, fp16, fp32, not torch.float64"),
        ({"has_bias": True, "parallel": {"tp_size": 2}}, "can't share out an expert's bias over TP ranks"),
    ],
    ids=["lora", "eplb", "deepep", "activation", "dtype", "bias"],
)
@pytest.mark.usefixtures("engine")
def test_what_we_do_not_serve_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if "activation" in changes:
        changes = changes | {"activation": MoEActivation[changes["activation"]]}
    with pytest.raises(ValueError, match=reason):
        select(layer(**changes))


@pytest.mark.usefixtures("engine")
def test_static_activation_scales_are_refused() -> None:
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import select_fp8_moe_backend
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTensorSym, kFp8StaticTensorSym

    _, experts = select_fp8_moe_backend(config=layer(), weight_key=kFp8StaticTensorSym, activation_key=kFp8DynamicTensorSym)
    assert experts.__name__ == "MoEDistExperts"
    with pytest.raises(ValueError, match="it can't use a checkpoint's static activation scales"):
        select_fp8_moe_backend(config=layer(), weight_key=kFp8StaticTensorSym, activation_key=kFp8StaticTensorSym)


@pytest.mark.usefixtures("engine")
def test_batch_invariance_is_refused_in_vllm_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=r"backend moe_dist does not support .* kernel does not support batch invariance"):
        select(layer())


@pytest.mark.usefixtures("engine")
def test_formats_without_experts_of_ours_are_refused_by_name() -> None:
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import select_mxfp4_moe_backend

    with pytest.raises(ValueError, match="moe_backend='moe_dist' can't serve this layer: it has no experts for mxfp4 weights"):
        select_mxfp4_moe_backend(layer())


@pytest.mark.parametrize("engine", [{"unserved": "native"}], indirect=True)
@pytest.mark.usefixtures("engine")
def test_an_explicit_setting_gives_such_a_layer_vllm_s_own_experts(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    config = layer(activation=MoEActivation.SWIGLUOAI)
    _, experts = select(config)
    assert experts.__name__.endswith("CPUUnquantizedExperts")
    assert config.moe_backend == "moe_dist"  # the request is not rewritten
    _, experts = select(layer())
    assert experts.__name__ == "MoEDistExperts"  # the setting leaves the layers that we serve to us


@pytest.mark.parametrize("engine", [{"unservd": "native"}], indirect=True)
@pytest.mark.usefixtures("engine")
def test_a_wrong_name_in_the_engine_s_config_is_named() -> None:
    import moe_dist as md

    with pytest.raises(md.ConfigError, match="moe_dist has no setting 'unservd'"):
        select(layer(is_lora_enabled=True))


@pytest.mark.usefixtures("engine")
def test_weights_that_are_reloaded_are_served_with_what_was_tuned_before() -> None:
    from datetime import timedelta

    from moe_dist_vllm.experts import MoEDistExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from moe_dist.serving import ServedModel, TokenCounts
    from moe_dist.settings import ServingSettings

    generator = torch.Generator().manual_seed(0)
    w1, w2 = (torch.randn(*shape, generator=generator) * 0.2 for shape in ((8, 128, 128), (8, 128, 64)))
    x, ids = torch.randn(3, 128, generator=generator), torch.tensor([[0, 5], [7, 1], [2, 2]], dtype=torch.int32)
    scores, out = torch.rand(3, 2, generator=generator), torch.empty(3, 128)

    def truth(w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        rows = []
        for token in range(3):
            parts = [torch.nn.functional.linear(x[token], w1[expert]).chunk(2) for expert in ids[token]]
            hidden = [torch.nn.functional.silu(gate) * up for gate, up in parts]
            rows.append(sum(scores[token, k] * w2[expert] @ hidden[k] for k, expert in enumerate(ids[token])))
        return torch.stack(rows)

    config = layer(in_dtype=torch.float32)
    experts = MoEDistExperts(config, FusedMoEQuantConfig.make())
    model = ServedModel(ServingSettings(store="memory:"), deployment="test")
    experts.serve(model, "layer", w1, w2, None, 4)
    model.tune(TokenCounts(4), None, timedelta(seconds=100))
    experts.run(out, x, w1, w2, scores, ids, None)
    torch.testing.assert_close(out, truth(w1, w2))
    w1.mul_(1.5)  # vLLM copies new weights into the old storage, where captured graphs expect them
    experts.run(out, x, w1, w2, scores, ids, None)
    torch.testing.assert_close(out, truth(w1, w2))
    again = MoEDistExperts(config, FusedMoEQuantConfig.make())
    other = w2.flip(0).contiguous()
    again.run(out, x, w1, other, scores, ids, None)
    torch.testing.assert_close(out, truth(w1, other))
    assert again._layer is not None
    assert again._layer.tuner is experts._layer.tuner is not None
    number = experts._number  # a compiled graph has it as a constant
    del experts
    out.fill_(torch.nan)
    torch.ops.moe_dist_vllm.experts(out, x, w1, other, scores, ids, None, number)
    torch.testing.assert_close(out, truth(w1, other))


@pytest.mark.parametrize("setting", ["error", "native"])
def test_an_engine_that_ignored_the_flag_is_told_apart(setting: str) -> None:
    """As vLLM 0.26 does on a CPU, which picks its own experts before it reads the flag: equal tokens, none of them ours."""
    from types import SimpleNamespace

    from moe_dist_vllm.warmup import tune

    class Experts(torch.nn.Module):
        moe_config = SimpleNamespace(moe_backend="moe_dist")
        w13_weight = torch.empty(0)
        quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=torch.nn.Identity()))

    class Stock(Experts):
        moe_config = SimpleNamespace(moe_backend="auto")  # a draft model may ask for others

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Stock(), Experts()])})
    config = SimpleNamespace(additional_config={"moe_dist": {"unserved": setting}})
    worker = SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(get_model=lambda: model))
    if setting == "error":
        with pytest.raises(RuntimeError, match=r"vLLM runs its own experts in 1 layers, first layers\.1: Identity; choose another"):
            tune(worker)
    else:
        with pytest.raises(AttributeError, match="parallel_config"):  # past the check: it goes on to ask what the engine will run
            tune(worker)


@pytest.mark.parametrize(
    ("fields", "stages", "setting", "said"),
    [
        (
            {"num_experts": 8},
            1,
            "error",
            r"has num_experts 8, and none of its modules asks for the experts of --moe-backend; choose another",
        ),
        ({"num_experts": 8}, 1, "native", "moe_dist serves nothing: the model's config has num_experts 8,"),
        ({"num_experts": 8}, 2, "error", None),
        ({}, 1, "error", "moe_dist serves nothing: the model has no MoE layer"),
    ],
    ids=["error", "native", "a stage", "dense"],
)
def test_a_model_without_a_layer_to_serve_is_not_served_in_silence(
    fields: dict[str, int], stages: int, setting: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    from types import SimpleNamespace

    from moe_dist_vllm.warmup import served_model

    config = SimpleNamespace(
        additional_config={"moe_dist": {"unserved": setting}},
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**fields)),
    )
    worker = SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(get_model=lambda: torch.nn.Linear(2, 2)))
    refused = (
        RuntimeError if fields and setting == "error" and stages == 1 else AttributeError
    )  # past it: what the engine will run is asked
    with pytest.raises(refused) as caught:
        served_model(worker)
    lines = [str(caught.value)] if refused is RuntimeError else [record.getMessage() for record in caplog.records]
    assert [bool(said and re.search(said, line)) for line in lines] == ([True] if said else [])


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.usefixtures("engine")
def test_vllm_s_cutlass_experts_join_as_auto_would_choose_them(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read fp8 by channel as it lies. vLLM runs them for checkpoints of compressed-tensors, and not for those of its own format."""
    from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym

    for experts in (CutlassExpertsFp8, TritonExperts):  # as on a Hopper card
        monkeypatch.setattr(experts, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(TritonExperts, "_supports_quant_scheme", staticmethod(lambda *keys: True))
    _, ours = fp8.select_fp8_moe_backend(layer(), kFp8StaticChannelSym, kFp8DynamicTokenSym, allow_vllm_cutlass=allowed)
    assert ours.__name__ == "MoEDistExperts"
    natives = ["TritonOrCutlassExperts", "TritonExperts"] if allowed else ["TritonExperts"]
    assert [experts.__name__ for experts in ours.natives] == natives  # the first is the default tactic


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.usefixtures("engine")
def test_fp8_scales_mean_what_they_mean_in_vllm(granularity: str) -> None:
    """Each form of scales as vLLM's loaders leave it: [E], [E, rows, 1], [E, row blocks, column blocks]."""
    from moe_dist_vllm.experts import MoEDistExperts, _weight_format
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.quantization.utils import quant_utils

    generator = torch.Generator().manual_seed(1)

    def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = (torch.randn(8, rows, columns, generator=generator) * 50).to(torch.float8_e4m3fn)
        shape = {"tensor": (8, 1, 1), "channel": (8, rows, 1), "block": (8, rows // 64, columns // 64)}[granularity]
        scale = (torch.rand(shape, generator=generator) + 0.5) * 0.004
        spread = scale.repeat_interleave(64, 1).repeat_interleave(64, 2) if granularity == "block" else scale
        return values, scale.view(8) if granularity == "tensor" else scale, values.float() * spread

    w1, s1, meant1 = weight(128, 128)
    w2, s2, meant2 = weight(128, 64)
    quant = fp8_w8a8_moe_quant_config(
        w1_scale=s1, w2_scale=s2, per_act_token_quant=granularity == "channel", per_out_ch_quant=granularity == "channel",
        block_shape=[64, 64] if granularity == "block" else None,
    )  # fmt: skip
    experts = MoEDistExperts(layer(in_dtype=torch.float16), quant)
    x, ids = torch.randn(5, 128, generator=generator).half(), torch.tensor([[0, 5], [7, 1], [2, 2], [3, 4], [6, 0]], dtype=torch.int32)
    scores, out = torch.rand(5, 2, generator=generator), torch.empty(5, 128, dtype=torch.float16)
    experts.run(out, x, w1, w2, scores, ids, None)
    gate, up = torch.einsum("th,tkih->tki", x.float(), meant1[ids.long()]).chunk(2, dim=-1)
    truth = torch.einsum("tki,tkhi,tk->th", torch.nn.functional.silu(gate) * up, meant2[ids.long()], scores)
    # Activations are scaled to fp8 on a GPU; on a CPU they stay fp16, so rounding to fp16 is all that differs.
    torch.testing.assert_close(out.float(), truth, rtol=2e-3, atol=2e-3 * float(truth.abs().max()))
    keys = {"tensor": "kFp8StaticTensorSym", "channel": "kFp8StaticChannelSym", "block": "kFp8Static128BlockSym"}
    assert _weight_format(getattr(quant_utils, keys[granularity]))["granularity"] == granularity
    assert experts.config(w1, 4).quant.granularity == granularity


class Worker:
    """What the plugin asks of vLLM's worker, around one layer of ours."""

    def __init__(self, config: Any) -> None:
        from types import SimpleNamespace

        from moe_dist_vllm.experts import MoEDistExperts
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

        moe_config = layer(in_dtype=torch.float32)
        self.experts = MoEDistExperts(moe_config, FusedMoEQuantConfig.make())

        class Layer(torch.nn.Module):
            w13_weight, w2_weight, expert_map = torch.randn(8, 128, 128), torch.randn(8, 128, 64), None
            quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=self.experts))

        module = Layer()
        module.moe_config = moe_config
        model = torch.nn.ModuleDict({"layer": module})

        class Runner:
            def get_model(self) -> torch.nn.Module:
                return model

            def profile_run(runner) -> str:
                out = torch.empty(4, 128)
                ids = torch.tensor([[0, 1]] * 4, dtype=torch.int32)
                self.experts.run(out, torch.randn(4, 128), module.w13_weight, module.w2_weight, torch.ones(4, 2), ids, None)
                return "profiled"

        self.vllm_config, self.model_runner = config, Runner()


def test_the_profile_run_takes_what_a_winner_may_take_and_tuning_keeps_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: counted before the KV cache is sized, and no candidate may need more afterwards."""
    from moe_dist_vllm import warmup
    from vllm.config import VllmConfig, set_current_vllm_config

    from moe_dist.serving import ServedModel, TokenCounts

    monkeypatch.setattr(warmup, "token_counts", lambda config: TokenCounts(4))
    monkeypatch.setattr(warmup, "deployment", lambda config: "test")
    monkeypatch.setattr(warmup, "group_in_step", lambda: None)
    config = VllmConfig(additional_config={"moe_dist": {"store": "memory:"}})
    with set_current_vllm_config(config):
        worker = Worker(config)
    taken: list[int] = []
    empty = torch.empty

    def counted(*shape: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") == torch.uint8:
            taken.append(shape[0])
        return empty(*shape, **kwargs)

    monkeypatch.setattr("moe_dist_vllm.experts.torch.empty", counted)
    with warmup.scratch_counted(worker):
        assert worker.model_runner.profile_run() == "profiled"
    model, counts = warmup.served_model(worker)
    # torch_grouped's, the default on a CPU: inputs and outputs of 8 rows of both products and more, in fp32.
    assert taken == [model.workspace_bytes(counts)]
    assert taken[0] > 8 * (128 + 128 + 64) * 4
    worker.model_runner.profile_run()
    assert len(taken) == 1  # a run that sizes nothing takes nothing
    limits: list[int | None] = []
    monkeypatch.setattr(ServedModel, "tune", lambda self, counts, group, timeout, workspace_limit: limits.append(workspace_limit))
    warmup.tune(worker)
    assert limits == taken


@pytest.mark.parametrize("proposer", ["drafter", "speculator"])
@pytest.mark.usefixtures("engine")
def test_the_layers_of_a_draft_model_are_tuned_too(proposer: str) -> None:
    """vLLM's two model runners keep it in places of unlike names; an n-gram proposer has no model."""
    from types import SimpleNamespace

    from moe_dist_vllm.warmup import moe_layers

    worker, draft = Worker(None), Worker(None)
    setattr(worker.model_runner, proposer, SimpleNamespace(model=draft.model_runner.get_model()))
    assert [name for name, _ in moe_layers(worker)] == ["layer", "draft.layer"]
    setattr(worker.model_runner, proposer, SimpleNamespace())
    assert [name for name, _ in moe_layers(worker)] == ["layer"]


def test_a_choice_that_ignores_the_flag_is_left_as_it_is() -> None:
    """As vLLM 0.26 chooses on a CPU: no class at all. What serves is checked before tuning."""
    from types import ModuleType, SimpleNamespace

    from moe_dist_vllm import patch

    oracle = ModuleType("oracle")
    oracle.select = lambda config: ("CPU", None)  # type: ignore[attr-defined]
    patch._wrap_select(oracle, "select", lambda config: None, backends=object())
    assert oracle.select(SimpleNamespace(moe_backend="moe_dist")) == ("CPU", None)


@pytest.mark.usefixtures("engine")
def test_a_call_adds_no_operator_to_what_its_tactic_runs() -> None:
    """Each would be one more node in every captured graph: no cast of ids or weights, no copy of rows, no fill, no output beside vLLM's."""
    from moe_dist_vllm.experts import MoEDistExperts
    from moe_dist_vllm.native import VllmBackend
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    import moe_dist as md

    class Operators(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    class Silent(VllmBackend):
        def bind(self, layer: md.BoundLayer, tactic: md.Tactic) -> Any:
            return lambda acts, out: tactic

    class Experts(MoEDistExperts):
        def native(self) -> tuple[VllmBackend, ...]:
            return (Silent((object,), self.moe_config, self.quant_config),)

    config = layer(in_dtype=torch.bfloat16)
    experts = Experts(config, FusedMoEQuantConfig.make())
    w1, w2 = torch.zeros(8, 128, 128, dtype=torch.bfloat16), torch.zeros(8, 128, 64, dtype=torch.bfloat16)
    x, out = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(3, 128, dtype=torch.bfloat16)
    ids, scores = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    experts.run(out, x, w1, w2, scores, ids, None)
    with Operators():
        experts.run(out, x, w1, w2, scores, ids, None)
    # On a CPU the bounds of ids are looked at, since that waits for nobody; on a GPU they are not.
    assert Operators.names == ["aten::min", "aten::_local_scalar_dense", "aten::max", "aten::_local_scalar_dense"]


@pytest.mark.usefixtures("engine")
def test_vllm_s_own_experts_read_the_scales_that_a_reload_writes() -> None:
    """DeepGEMM takes fp32 block scales as they lie: a copy of them would go on serving the weights of before."""
    from moe_dist_vllm.experts import MoEDistExperts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    class DeepGemmExperts(stand_in()):  # type: ignore[misc]
        """Answers with the sum of its scales."""

        def apply(self, output: torch.Tensor, *args: Any, **named: Any) -> None:
            output.fill_(float(self.w1_scale.sum() + self.w2_scale.sum()))

    w1, w2 = (torch.zeros(8, *shape, dtype=torch.float8_e4m3fn) for shape in ((256, 128), (128, 128)))
    s1, s2 = torch.ones(8, 2, 1), torch.ones(8, 1, 1)
    quant = fp8_w8a8_moe_quant_config(w1_scale=s1, w2_scale=s2, block_shape=[128, 128])
    config = layer(in_dtype=torch.float16, intermediate_size=128)
    experts = MoEDistExperts.with_natives([DeepGemmExperts])(config, quant)
    x, ids = torch.zeros(3, 128, dtype=torch.float16), torch.zeros(3, 2, dtype=torch.int32)
    out = torch.empty(3, 128, dtype=torch.float16)
    experts.run(out, x, w1, w2, torch.zeros(3, 2), ids, None)
    assert out.unique().tolist() == [24.0]
    s1.mul_(2), s2.mul_(3)  # as vLLM's reload does, into the storage that captured graphs know
    experts.run(out, x, w1, w2, torch.zeros(3, 2), ids, None)
    assert out.unique().tolist() == [56.0]
