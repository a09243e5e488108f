"""The choice, where SGLang's quantisation methods make their runners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang_stand_ins import layer_of, method_of

import moe_dist as md

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("published")]


def make_runner(monkeypatch: pytest.MonkeyPatch, layer: Any, method: Any) -> list[str]:
    """Create the runner as SGLang does, with `moe_dist` chosen; which runners were chosen when SGLang's own code was called."""
    from moe_dist_sglang import hooks
    from sglang.srt.layers.moe.utils import get_moe_runner_backend, register_moe_runner_backend_name, resolve_moe_runner_backend
    from sglang.srt.runtime_context import get_flags

    register_moe_runner_backend_name("moe_dist")
    monkeypatch.setattr(get_flags().moe, "runner_backend", resolve_moe_runner_backend("moe_dist"))
    layer.layer_name, seen = "model.layers.3.mlp.experts", []

    def original(method: Any, layer: Any, config: Any) -> None:
        seen.append(get_moe_runner_backend().value)

    hooks.create_moe_runner(original, method, layer, layer.moe_runner_config)
    assert get_moe_runner_backend().value == "moe_dist"
    return seen


def test_a_layer_that_is_not_served_ends_start_up_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_DIST_UNSERVED", raising=False)
    with pytest.raises(md.UnsupportedBackend, match=r"model\.layers\.3\.mlp\.experts: activation 'situ'"):
        make_runner(monkeypatch, layer_of(activation="situ"), method_of())
    with pytest.raises(md.UnsupportedBackend, match=r"model\.layers\.3\.mlp\.experts: num_experts 8 is not divisible by ep_size 3"):
        make_runner(monkeypatch, layer_of(ep_size=3), method_of())


def test_a_layer_that_is_not_served_may_be_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_DIST_UNSERVED", "native")
    assert make_runner(monkeypatch, layer_of(activation="situ"), method_of()) == ["auto"]


def test_a_layer_with_another_runner_keeps_sglang_s_way() -> None:
    from moe_dist_sglang import hooks

    def backend(name: str) -> Any:
        return SimpleNamespace(value=name)

    ran: list[str] = []

    def method(name: str) -> Any:
        runner = SimpleNamespace(runner_backend=backend(name), run=lambda given, info: ran.append(f"{given} {info}") or "core's")
        return SimpleNamespace(runner=runner, get_triton_quant_info=lambda layer: f"weights of {layer}")

    def original(method: Any, layer: str, given: str) -> str:
        return f"SGLang's {layer} {given}"

    assert hooks.apply(original, method("triton"), "layer", "rows") == "SGLang's layer rows"
    assert hooks.apply(original, SimpleNamespace(runner=None), "layer", "rows") == "SGLang's layer rows"
    assert ran == []
    assert hooks.apply(original, method("moe_dist"), "layer", "rows") == "core's"
    assert ran == ["rows weights of layer"]


@pytest.mark.parametrize(("runner", "skips"), [("moe_dist", True), ("triton", False), (None, False)])
def test_ids_stay_the_model_s_where_our_core_runs(runner: str | None, skips: bool) -> None:
    from moe_dist_sglang import hooks

    def original(dispatcher: Any, config: Any) -> None:
        dispatcher.skip_local_expert_mapping = False

    dispatcher, config = SimpleNamespace(), SimpleNamespace(runner_backend=runner and SimpleNamespace(value=runner))
    hooks.make_dispatcher(original, dispatcher, config)
    assert dispatcher.skip_local_expert_mapping == skips
    hooks.make_dispatcher(original, dispatcher, SimpleNamespace())  # before 0.5.23: a layer with a runner of SGLang's
    assert not dispatcher.skip_local_expert_mapping
