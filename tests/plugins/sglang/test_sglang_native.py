"""SGLang's own experts as a backend: the pool's default, what they can't do, and a call that they serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang_stand_ins import CPU, HIDDEN, TOKENS, inputs, layer_of, method_of, rows, standard, untuned

import moe_dist as md

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("published")]


@pytest.mark.parametrize(("ep_size", "ep_rank"), [(1, 0), (2, 1)])  # all experts here; half of them, not the first
def test_native_experts_are_the_default_and_pass_the_tuners_check(ep_size: int, ep_rank: int) -> None:
    from moe_dist_sglang.layers import layer_config, layer_weights
    from moe_dist_sglang.native import SGLangBackend

    from moe_dist.serving import untuned_layer

    layer, method = layer_of(ep_size, ep_rank), method_of()
    native = SGLangBackend(layer, method)
    config = untuned_layer(layer_config(layer, method), CPU, [native]).config
    operation = md.MoEOperation(
        md.MoEProblem.of(config, routed=True), layer_weights(layer, method), CPU, config.options, extra_backends=[native]
    )
    bucket = md.Bucket(1, TOKENS)
    default = operation.default(bucket, "eager")
    assert str(default) == "sglang(runner=torch)"
    assert {tactic.backend for tactic in operation.candidates(bucket, "eager")} >= {"sglang", "torch_grouped", "torch_loop"}
    probe = operation.probe(TOKENS, md.ProbeSpec())
    assert probe.check(probe.bind(default)) is None


def test_native_experts_leave_empty_slots_out() -> None:
    from moe_dist_sglang.layers import layer_config, layer_weights
    from moe_dist_sglang.native import SGLangBackend

    from moe_dist.serving import untuned_layer

    layer, method = layer_of(), method_of()
    native = SGLangBackend(layer, method)
    served = untuned_layer(layer_config(layer, method), CPU, [native])
    x, weights, ids = inputs()
    acts = md.MoEActivationPack(hidden_states=x, topk_ids=ids, topk_weights=weights)
    out = served((acts, layer_weights(layer, method)))
    assert served.lookup(TOKENS).backend == "sglang"
    torch.testing.assert_close(out, (rows(layer, x, ids) * weights[..., None]).sum(1), rtol=1e-4, atol=1e-4)


def test_triton_experts_run_in_place_on_a_copy_with_local_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own output would lie in SGLang's symmetric pool: a collective, which one rank must not enter alone while tuning."""
    from moe_dist_sglang import native
    from moe_dist_sglang.layers import layer_config, layer_weights

    seen = []

    def kernels(dispatched: Any, info: Any, config: Any) -> None:
        seen.append(
            (dispatched.topk_output.topk_ids.tolist(), dispatched.hidden_states.clone(), config.inplace, config.routed_scaling_factor)
        )
        dispatched.hidden_states.mul_(2)

    monkeypatch.setattr(native, "fused_experts_none_to_triton", kernels)
    layer, method = layer_of(ep_size=2, ep_rank=1, routed_scaling_factor=2.5), method_of()
    backend = native.SGLangBackend(layer, method)
    problem = md.MoEProblem.of(layer_config(layer, method), routed=True)
    expert_map = torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3], dtype=torch.int32)
    bound = md.BoundLayer(problem, layer_weights(layer, method), expert_map)
    x, weights, ids = inputs()
    before, out = x.clone(), torch.full_like(x, torch.nan)
    tactic = md.Tactic.of("sglang", runner="triton")
    acts = md.MoEActivationPack(hidden_states=x, topk_ids=ids, topk_weights=weights)
    assert backend.bind(bound, tactic)(acts, out) == tactic
    ((local, given, inplace, scaling),) = seen
    assert local == [[-1, 3], [-1, -1], [1, 1], [0, -1], [-1, -1]]
    assert torch.equal(given, x)
    assert (inplace, scaling) == (True, None)
    assert torch.equal(out, 2 * before)
    assert torch.equal(x, before)


def test_tuning_times_triton_experts_with_the_very_ids_that_they_serve_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations around the ids, which a served call does without, would be timed as SGLang's, and let slower tactics win."""
    from moe_dist_sglang import native
    from moe_dist_sglang.layers import layer_config, layer_weights

    seen: list[torch.Tensor] = []
    monkeypatch.setattr(native, "fused_experts_none_to_triton", lambda given, info, config: seen.append(given.topk_output.topk_ids))
    layer, method = layer_of(), method_of()
    bound = md.BoundLayer(md.MoEProblem.of(layer_config(layer, method), routed=True), layer_weights(layer, method), None)
    x, weights, ids = inputs()
    run = native.SGLangBackend(layer, method).bind(bound, md.Tactic.of("sglang", runner="triton"))
    run(md.MoEActivationPack(hidden_states=x, topk_ids=ids, topk_weights=weights), torch.empty_like(x))
    assert [given is ids for given in seen] == [True]


@pytest.mark.parametrize(("ep_size", "ep_rank"), [(1, 0), (2, 1)])
def test_a_call_that_sglang_s_experts_serve_has_nothing_around_it(monkeypatch: pytest.MonkeyPatch, ep_size: int, ep_rank: int) -> None:
    """Its own config, so that scaling, allocation and in-place output are as without us; ids are local, as its dispatcher would make them."""
    from moe_dist_sglang import native as natives
    from moe_dist_sglang import runner
    from moe_dist_sglang.layers import layer_config, layer_weights
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    seen: list[Any] = []
    monkeypatch.setattr(natives, "fused_experts_none_to_triton", lambda *given: seen.append(given) or "combined")
    layer, method = layer_of(ep_size, ep_rank, routed_scaling_factor=2.5, inplace=True), method_of()
    native = natives.SGLangBackend(layer, method)
    served = untuned(layer_config(layer, method), native)
    core, info = runner.MoEDistRunnerCore(layer.moe_runner_config), method.get_triton_quant_info(layer)
    weights_of_layer = layer_weights(layer, method)
    x, weights, ids = inputs()
    served((md.MoEActivationPack(hidden_states=x, topk_ids=ids, topk_weights=weights), weights_of_layer))  # binds, as start-up does
    core.bind(served, weights_of_layer, 2.5, native)
    given = StandardDispatchOutput(x, None, standard(weights, ids))
    assert core.run_from_dispatch(given, info, layer.moe_runner_config) == "combined"
    ((dispatched, quant_info, config),) = seen
    assert quant_info is info
    assert config is layer.moe_runner_config
    assert dispatched.hidden_states is x
    if ep_size == 1:
        assert dispatched is given
    else:
        assert dispatched.topk_output.topk_ids.tolist() == [[-1, 3], [-1, -1], [1, 1], [0, -1], [-1, -1]]
    empty = StandardDispatchOutput(x[:0], None, standard(weights[:0], ids[:0]))  # which its kernels don't take
    assert core.run_from_dispatch(empty, info, layer.moe_runner_config).hidden_states.shape == (0, HIDDEN)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"no_combine": True}, "summed results"),
        ({"apply_router_weight_on_input": True, "top_k": 1}, "router's weight to the input"),
        ({"swiglu_limit": 10.0}, "limit=10.0"),
    ],
)
def test_native_experts_say_what_they_cannot_do(changes: dict[str, Any], reason: str) -> None:
    from moe_dist_sglang.layers import layer_config, layer_weights
    from moe_dist_sglang.native import SGLangBackend

    from moe_dist.serving import untuned_layer

    layer, method = layer_of(**changes), method_of()
    native = SGLangBackend(layer, method)
    config = layer_config(layer, method)
    assert reason in str(md.explain_backends(config, CPU, extra_backends=[native])["sglang"])
    served = untuned_layer(config, CPU, [native])
    served(
        (
            md.MoEActivationPack(
                hidden_states=(x := inputs()[0]),
                topk_ids=inputs()[2][:, : served.config.routing.slots].contiguous(),
                topk_weights=inputs()[1][:, : served.config.routing.slots].contiguous(),
            ),
            layer_weights(layer, method),
        )
    )
    assert served.lookup(len(x)).backend != "sglang"
