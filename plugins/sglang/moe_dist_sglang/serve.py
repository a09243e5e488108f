"""From a loaded model to served layers: every MoE layer gets its `MoELayer`, or start-up ends with the reason.

Called by `hooks.py` after SGLang has loaded a model and when it warms up.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

import moe_dist as md
from moe_dist_sglang.layers import layer_config, layer_weights, routed_scale, unserved, why_not
from moe_dist_sglang.runner import MoEDistRunnerCore

log = logging.getLogger("moe_dist.sglang")


def attach(model_runner: Any) -> None:
    """Bind every MoE layer of the loaded model. UnsupportedBackend: a layer doesn't have our runner, and why."""
    layers = [(name, layer) for name, layer in model_runner.model.named_modules() if isinstance(layer, FusedMoE)]
    for name, layer in layers:
        core = getattr(layer.runner, "runner_core", None)
        if not isinstance(core, MoEDistRunnerCore) or layer.runner is not layer.quant_method.runner:
            reason = why_not(layer, layer.quant_method) or f"SGLang gave it the runner {layer.runner_backend}"
            raise unserved(f"{name}: {reason}")
        weights = layer_weights(layer, layer.quant_method)
        served = md.MoELayer(**layer_config(layer, layer.quant_method))
        core.bind(served, weights, routed_scale(layer))
    log.info("moe_dist serves %d MoE layers", len(layers))


def tune(model_runner: Any) -> None:
    pass
