"""SGLang's own experts beside our runner core, through SGLang's own layer, in one process: `python -m moe_dist_sglang.bench --json FILE`.

Starts of SGLang what a scheduler starts for one rank, makes its `FusedMoE` in each shape with drawn weights, and binds and tunes it as the
plugin does when an engine starts, SGLang's experts in the pool. Both are timed from SGLang's dispatch to its combine, in turns, on inputs
and routing that rotate, and held against fp32 truth. A row that FILE holds is not taken again: a run that is cut is continued by the same
command. `moe_dist/bench/kernels.py` times the kernels alone, and what it calls with is what is called with here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

import moe_dist as md
from moe_dist.bench import report
from moe_dist.bench.kernel_inputs import SHAPES, Shape, copies_of, draw_inputs, error_of, spread_experts, truth_of
from moe_dist.serving import ServedModel, TokenCounts
from moe_dist.tuning.identity import build_environment
from moe_dist.tuning.measure import Run, make_clock
from moe_dist.tuning.policy import MeasurementPolicy

TOKENS, EAGER_TOKENS = (1, 16, 64, 256, 1024, 4096), (1, 16, 256, 4096)
ROUNDS, WINDOW_US = 7, 6000.0  # visits of each side, and the least length of one
# What a SGLang process knows of itself before it builds a layer: the one rank of every group.
RANKS = ("tp_rank", "pp_rank", "moe_ep_rank", "moe_tp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "moe_dp_rank", "attn_dcp_rank")

Call = Callable[[md.MoEActivationPack], torch.Tensor]


def start_sglang(device: torch.device) -> None:
    """What a scheduler of one rank does before it loads a model, with our plugin and no other."""
    os.environ |= {"SGLANG_PLUGINS": "moe_dist", "MOE_DIST_STORE": "memory:", "MOE_DIST_POLICY": "mode"}
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import get_context, get_parallel

    where = {} if device.type == "cuda" else {"device": device.type}
    get_context().override_server_args(moe_runner_backend="moe_dist", **where).install()
    get_parallel().override_permanently(**dict.fromkeys(RANKS, 0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "nccl" if device.type == "cuda" else "gloo")
    initialize_model_parallel()
    initialize_moe_config()


def make_layer(shape: Shape, dtype: str, device: torch.device) -> Any:
    """SGLang's `FusedMoE` of this shape with drawn weights of a model's size, as after a load."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    quant = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128]) if dtype == "fp8" else None
    with device:
        layer = FusedMoE(
            num_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden, intermediate_size=shape.inter, layer_id=0,
            params_dtype=torch.bfloat16, quant_config=quant, prefix="model.layers.0.mlp.experts", inplace=False,
        )  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in (layer.w13_weight, layer.w2_weight):
            for expert in weight:  # one at a time: the fp32 draws of all would not fit beside them
                drawn = torch.randn(expert.shape, generator=generator, device=device)
                expert.copy_((drawn * (0.02 if quant is None else 1.0)).to(expert.dtype))
        if quant is not None:
            for scale in (layer.w13_weight_scale_inv, layer.w2_weight_scale_inv):
                scale.copy_((torch.rand(scale.shape, generator=generator, device=device) + 0.5) * 0.02)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def attach(name: str, layer: Any) -> ServedModel:
    """The plugin's own start-up for a model of this one layer: bound and not yet tuned."""
    from moe_dist_sglang import serve

    model = torch.nn.Module()
    model.experts = layer
    runner = SimpleNamespace(
        model=model, server_args=SimpleNamespace(served_model_name=name, model_path=name), is_draft_worker=False, device="cpu"
    )  # no memory is sized here, so none is kept free
    serve.attach(runner)
    served: ServedModel = getattr(runner, serve.SERVED)
    return served


def sides(layer: Any) -> dict[str, Call]:
    """ "sglang": its Triton runner, off CUDA its experts in plain torch; "ours": our core. Each from SGLang's dispatch to its combine."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    config, info = layer.moe_runner_config, layer.quant_method.get_triton_quant_info(layer)

    def chosen(acts: md.MoEActivationPack) -> Any:
        return StandardTopKOutput(acts.topk_weights, acts.topk_ids, acts.topk_weights)

    def through(runner: Any) -> Call:
        return lambda acts: runner.run(StandardDispatchOutput(acts.hidden_states, None, chosen(acts)), info).hidden_states

    if layer.w13_weight.is_cuda:
        native = through(MoeRunner(MoeRunnerBackend.TRITON, config))
    else:

        def native(acts: md.MoEActivationPack) -> torch.Tensor:
            out: torch.Tensor = moe_forward_native(layer, acts.hidden_states, chosen(acts), config)
            return out

    return {"sglang": native, "ours": through(layer.quant_method.runner)}


def measure(
    shape: Shape, dtype: str, cells: Sequence[tuple[str, int]], device: torch.device, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The rows of `cells`, pairs of mode and token count, of one shape: microseconds a call and the distance from the truth, of both sides."""
    from moe_dist_sglang.layers import layer_config, layer_weights

    layer = make_layer(shape, dtype, device)
    served = attach(shape.name, layer)
    graphs = tuple(count for mode, count in cells if mode == "cuda_graph")
    counts = TokenCounts(max(count for _, count in cells), graphs, eager_from=1)
    if device.type == "cuda":  # as SGLang does, beside the default stream: graphs can't be captured on it
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            timed = served.tune(counts, None, timedelta(hours=1))
        torch.cuda.current_stream().wait_stream(stream)
    else:
        timed = served.tune(counts, None, timedelta(hours=1))
    note(f"{shape.name} {dtype}: {timed} candidates timed in {served.tuning.total_seconds():.1f} s")
    tactics = served.serves(counts)
    problem = md.MoEProblem.of(layer_config(layer, layer.quant_method), routed=True)
    bound = md.MoEOperation(problem, layer_weights(layer, layer.quant_method), device, problem.config.options).layer
    rows = []
    for mode, tokens in cells:
        inputs = [draw_inputs(problem, tokens, "uniform", seed, device) for seed in range(copies_of(tokens))]
        if tokens == 1:
            spread_experts(inputs, shape.experts)
        truth, both = truth_of(bound, inputs[0]), sides(layer)
        tactic = next(str(tactic) for kind, bucket, tactic in tactics if kind == mode and bucket.low <= tokens <= bucket.high)
        row: dict[str, Any] = {"shape": shape.name, "dtype": dtype, "tokens": tokens, "mode": mode}
        for side, call in both.items():
            result = call(inputs[0])
            if bool(result.isnan().any()):
                raise RuntimeError(f"{shape.name} {dtype} {tokens}: {side} left NaN in its result")
            row[f"{side}_error"] = error_of(result, truth)
        row |= {f"{side}_us": us for side, us in _times(both, mode, inputs, device).items()}
        row |= {"ratio": float(f"{row['sglang_us'] / row['ours_us']:.5g}"), "tactic": tactic}
        note(f"  {mode} {tokens}: sglang {row['sglang_us']:.1f} us, ours {row['ours_us']:.1f} ({row['ratio']:.2f}x) {row['tactic']}")
        rows.append(row)
    return rows


def _run_of(call: Call, inputs: Sequence[md.MoEActivationPack]) -> Run:
    return lambda index: cast(md.Tactic, call(inputs[index]))  # a clock looks at no result


def _times(both: dict[str, Call], mode: str, inputs: Sequence[md.MoEActivationPack], device: torch.device) -> dict[str, float]:
    """Median microseconds a call of each side, in turns."""
    policy = MeasurementPolicy("cuda_graph" if mode == "cuda_graph" else "eager")
    clocks, calls = {}, {}
    for side, call in both.items():
        for acts in inputs:  # what is built at a first call is built before a clock starts
            call(acts)
        clocks[side] = make_clock(policy, _run_of(call, inputs), len(inputs), device)
        clocks[side].window(len(inputs))
        calls[side] = max(len(inputs), min(200, round(WINDOW_US / max(clocks[side].window(len(inputs)), 1.0))))
    found: dict[str, list[float]] = {side: [] for side in both}
    for _ in range(ROUNDS):
        for side, clock in clocks.items():
            found[side].append(clock.window(calls[side]))
    return {side: round(statistics.median(times), 2) for side, times in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    names = [shape.name for shape in SHAPES]
    parser = argparse.ArgumentParser(prog="python -m moe_dist_sglang.bench", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, required=True, help="the rows; those that it holds are not taken again")
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help=f"eager cells: those of {EAGER_TOKENS}")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: eager cells alone, beside SGLang's experts in plain torch"
    )
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device in this process; --device cpu compares what runs without one")
    if not asked.json.parent.is_dir():
        parser.error(f"--json {asked.json}: there is no folder {asked.json.parent}; make it first")
    device = torch.device(asked.device, *([torch.cuda.current_device()] if asked.device == "cuda" else []))
    began, environment = time.monotonic(), build_environment(device)
    command = ["python", "-m", "moe_dist_sglang.bench"]
    for name, default in (("shapes", names), ("dtypes", ["bf16", "fp8"]), ("tokens", list(TOKENS))):
        if (value := getattr(asked, name)) != default:
            command += [f"--{name}", *map(str, value)]
    document = report.document(" ".join(command), {"core": []})
    document["machine"] |= {"gpu": environment.device_name, "driver": environment.driver}
    document["versions"] |= {"triton": environment.triton, "sglang": importlib.metadata.version("sglang")}
    rows = json.loads(asked.json.read_text())["core"] if asked.json.exists() else []
    held = {(row["shape"], row["dtype"], row["mode"], row["tokens"]) for row in rows}
    start_sglang(device)
    for shape in (shape for shape in SHAPES if shape.name in asked.shapes):
        for dtype in (dtype for dtype in shape.dtypes if dtype in asked.dtypes):
            cells = [("cuda_graph", count) for count in asked.tokens if device.type == "cuda"]
            cells += [("eager", count) for count in asked.tokens if count in EAGER_TOKENS]
            if missing := [cell for cell in cells if (shape.name, dtype, *cell) not in held]:
                rows += measure(
                    shape,
                    dtype,
                    missing,
                    device,
                    lambda line: print(f"[{time.monotonic() - began:5.1f}] {line}", file=sys.stderr, flush=True),
                )
                report.write(asked.json, document | {"core": rows})
    report.show("SGLang's layer, its own experts beside ours", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
