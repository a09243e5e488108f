"""The MoE layers of a benchmarked worker on their own: their time, the kernels that they launch, and how far they are from fp32.

Asked by `bench.py` in a worker; knows no engine's questions. Shapes: T tokens, K slots, E local experts, H hidden, I local intermediate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

SEED = 17  # of whatever both engines are given


def moe_modules(worker: Any) -> list[Any]:
    model = worker.model_runner.get_model()
    found = [m for m in model.modules() if hasattr(m, "w13_weight") and hasattr(m, "quant_method")]
    return [m for m in found if getattr(m.quant_method, "moe_kernel", None) is not None]


def _layer_inputs(layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, distinct experts and weights that sum to one, as a router gives them for unlike tokens."""
    config, device = layer.moe_config, layer.w13_weight.device
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(tokens, config.hidden_dim, generator=generator).to(device, config.in_dtype)
    ids = torch.rand(tokens, config.num_experts, generator=generator).topk(config.experts_per_token).indices.int().to(device)
    return x, ids, torch.full((tokens, config.experts_per_token), 1.0 / config.experts_per_token, device=device)


def _run_layer(layer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer.quant_method.moe_kernel.apply(
        hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight, topk_weights=weights, topk_ids=ids, activation=layer.moe_config.activation,
        global_num_experts=layer.global_num_experts, expert_map=layer.expert_map, apply_router_weight_on_input=False,
    )  # fmt: skip
    return out


def _as_served(run: Callable[[], None], graph: bool) -> Callable[[], None]:
    """`run`, warmed up; graph: captured, to be replayed."""
    run()
    if not graph:
        return run
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        run()
    replay: Callable[[], None] = captured.replay
    return replay


@torch.inference_mode()
def time_layers(worker: Any, tokens: int, graph: bool, names: bool) -> dict[str, Any]:
    modules = moe_modules(worker)
    device = modules[0].w13_weight.device
    inputs = _layer_inputs(modules[0], tokens)

    def run() -> None:
        for module in modules:
            _run_layer(module, *inputs)

    call = _as_served(run, graph)
    call()
    wait(device)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(3):
            call()
        wait(device)
        times.append((time.perf_counter() - start) / 3 * 1e6)
    row: dict[str, Any] = {
        "tokens": tokens,
        "us": round(sorted(times)[len(times) // 2], 2),
        "launch_us": _launch_us(call, device),
        "own": None,
    }
    layer = getattr(modules[0].quant_method.moe_kernel.fused_experts, "_layer", None)
    if layer is not None:
        tactic = layer.lookup(tokens, "cuda_graph" if graph else "eager")
        row |= {"own": tactic.backend != "vllm", "tactic": str(tactic)}
    if names:
        with recorder(device) as recorded:
            call()
            wait(device)
        row["kernels"] = sorted(kernel_us(recorded, device))
    return row


def _launch_us(call: Callable[[], None], device: torch.device) -> float:
    """Host time of one call on an idle device, its work not waited for: the least of many."""
    times = []
    for _ in range(20):
        wait(device)
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    wait(device)
    return round(min(times), 2)


@torch.inference_mode()
def layer_error(worker: Any, tokens: int, graph: bool) -> float:
    layer = moe_modules(worker)[0]
    w13, w2, device = layer.w13_weight, layer.w2_weight, layer.w13_weight.device
    x, ids, weights = _layer_inputs(layer, tokens)
    results: list[torch.Tensor] = []
    call = _as_served(lambda: results.append(_run_layer(layer, x, ids, weights)), graph)
    call()
    wait(device)
    got = results[-1]
    total = off = 0.0
    for row in torch.linspace(0, tokens - 1, min(tokens, 16)).round().long().tolist():
        truth = torch.zeros(x.shape[1], device=device)
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            local = expert if layer.expert_map is None else int(layer.expert_map[expert])
            if local >= 0:
                gate, up = (_meaning(layer, "w13", w13, local) @ x[row].float()).chunk(2)
                truth += weight * (_meaning(layer, "w2", w2, local) @ (torch.nn.functional.silu(gate) * up))
        total, off = total + float(truth.square().sum()), off + float((got[row].float() - truth).square().sum())
    return round(math.sqrt(off / total), 6)


def _meaning(layer: Any, name: str, weight: torch.Tensor, expert: int) -> torch.Tensor:
    """One expert's matrix in fp32, block scales applied."""
    scale = getattr(layer, f"{name}_weight_scale_inv", None)
    matrix = weight[expert].float()
    return matrix if scale is None else matrix * scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recorder(device: torch.device) -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])


def kernel_us(recorded: Any, device: torch.device) -> dict[str, float]:
    """Device microseconds by kernel name; on a CPU, of operators."""
    sums: dict[str, float] = {}
    for event in recorded.events() or ():
        if device.type != "cuda" or "CUDA" in str(event.device_type):
            spent = event.device_time_total if device.type == "cuda" else event.self_cpu_time_total
            sums[event.name] = sums.get(event.name, 0.0) + float(spent)
    return sums
