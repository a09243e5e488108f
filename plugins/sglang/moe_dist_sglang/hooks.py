"""Where the plugin takes hold of SGLang, all of it: one table of places, and what happens there.

Every hook leaves SGLang as it is unless `moe_dist` is the chosen runner. State lives on SGLang's own objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.choices import add_moe_runner_backend_choices
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.utils import MoeRunnerBackend, get_moe_runner_backend, resolve_moe_runner_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_flags

import moe_dist as md
from moe_dist.settings import serving_settings
from moe_dist_sglang import serve
from moe_dist_sglang.compat import FP8, NAME, UNQUANTISED
from moe_dist_sglang.layers import layer_config, unserved
from moe_dist_sglang.runner import MoEDistRunnerCore

Hook = Callable[..., Any]


def install() -> None:
    """Register every hook, then the core, then the choice."""
    for target, hook in PLACES.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    register_moe_runner_core(NAME, MoEDistRunnerCore)
    add_moe_runner_backend_choices([NAME])


def chosen() -> bool:
    """Whether `moe_dist` is the runner of the model that this process is building: the draft's may be another."""
    return bool(get_moe_runner_backend().value == NAME)


def create_moe_runner(original: Hook, method: Any, layer: Any, moe_runner_config: Any) -> None:
    """SGLang's quantisation methods don't know the choice: unquantised would take Triton in silence, fp8 no runner at all."""
    if not chosen():
        original(method, layer, moe_runner_config)
        return
    try:
        layer_config(layer, method)
    except (md.UnsupportedBackend, md.ConfigError) as error:
        reason = f"{layer.layer_name}: {error.reason if isinstance(error, md.UnsupportedBackend) else error}"
        if serving_settings().unserved == "error":
            raise unserved(reason) from error
        flags = get_flags().moe
        flags.runner_backend = MoeRunnerBackend.AUTO
        try:
            original(method, layer, moe_runner_config)
        finally:
            flags.runner_backend = resolve_moe_runner_backend(NAME)
        return
    method.moe_runner_config = moe_runner_config
    method.runner = MoeRunner(get_moe_runner_backend(), moe_runner_config)
    moe_runner_config.runner_backend = get_moe_runner_backend()  # as SGLang does next itself from 0.5.23 on


def apply(original: Hook, method: Any, layer: Any, dispatch_output: Any) -> Any:
    runner = method.runner
    if runner is None or runner.runner_backend.value != NAME:
        return original(method, layer, dispatch_output)
    return runner.run(dispatch_output, method.get_triton_quant_info(layer))


def make_dispatcher(original: Hook, dispatcher: Any, moe_runner_config: Any) -> None:
    """Ids reach our core as the model's: it knows each rank's experts itself, in every format of the router's output."""
    original(dispatcher, moe_runner_config)
    backend = getattr(moe_runner_config, "runner_backend", None)
    if backend is not None and backend.value == NAME:
        dispatcher.skip_local_expert_mapping = True


def load_model(original: Hook, model_runner: Any) -> None:
    serve.require_choice(model_runner)
    original(model_runner)
    if chosen():
        serve.attach(model_runner)


def warmup(original: Hook, runner: Any) -> None:
    original(runner)
    serve.tune(runner.model_runner)


PLACES: dict[str, Hook] = {
    f"sglang.{UNQUANTISED}.create_moe_runner": create_moe_runner,
    f"sglang.{UNQUANTISED}.apply": apply,
    f"sglang.{FP8}.create_moe_runner": create_moe_runner,
    f"sglang.{FP8}.apply": apply,
    "sglang.srt.layers.moe.token_dispatcher.standard.StandardDispatcher.__init__": make_dispatcher,
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": load_model,
    "sglang.srt.model_executor.runner.base_runner.BaseRunner.warmup": warmup,
}
