"""One vLLM engine that a benchmark drives: a process that starts it, answers questions in JSON lines, and knows nothing of other engines.

`python -m moe_dist_vllm.bench SPEC` (SPEC: JSON, see `Spec`). It loads vLLM, says {"loaded": true}, and then does what each line of its
input asks for, with one line of answer: {"do": "start"}, {"do": "generate", ...}, {"do": "host", ...}, {"do": "moe_us", ...},
{"do": "profile", ...}, {"do": "end"}. `moe_dist.bench.engines` is the other side. Everything that vLLM prints goes to stderr.

Weights are drawn when the engine loads, from each parameter's name, so that two engines hold the same model: vLLM's own dummy
weights are so small that fp8 rounds them all to zero. That needs experts in the checkpoint's layout, which Triton's and ours are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import resource
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

SWITCH = "moe_dist_bench"  # in --additional-config: {"draw": whether to draw weights}
PROMPT_SEED = 17


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """backend: "auto" or "moe_dist". keywords: of `vllm.LLM`. draw: draw the weights anew after loading; "dequantised": those that an fp8
    model of this shape would draw, as they are meant. settings: of moe_dist. environment: variables to set before vLLM is loaded."""

    backend: str
    keywords: dict[str, Any]
    draw: bool | str = True
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


# -- in the worker ---------------------------------------------------------------------------------------------------------


class Questions:
    """What a worker answers about itself: mixed into vLLM's worker class by `worker_extension_cls`, which imports this module there."""

    def moe_dist_report(self: Any) -> dict[str, Any]:
        """The experts that run here, the KV cache's tokens, and what moe_dist tuned, if it serves."""
        blocks = getattr(getattr(self.model_runner, "kv_cache_config", None), "num_blocks", None) or self.cache_config.num_gpu_blocks
        report: dict[str, Any] = {
            "rank": self.rank,
            "experts": sorted({type(m.quant_method.moe_kernel.fused_experts).__name__ for m in _moe_modules(self)}),
            "layers": len(_moe_modules(self)),
            "kv_tokens": int(blocks) * int(self.cache_config.block_size),
        }
        model = getattr(self, "moe_dist", None)
        if model is not None:
            from moe_dist_vllm.warmup import token_counts

            counts = token_counts(self.vllm_config)
            report |= {
                "epoch": model.epoch.digest,
                "measured": model.measured,
                "tuning_seconds": round(model.tuning.total_seconds(), 2),
                "lines": model.describe(counts),
                "executed": dict(_EXECUTED),
                "buckets": [
                    {"mode": mode, "bucket": [bucket.low, bucket.high], "tactic": str(tactic), "own": tactic.backend != "vllm"}
                    for mode, bucket, tactic in model.serves(counts)
                ],
            }
        return report

    def moe_dist_moe_us(self: Any, counts: list[int], names: bool = False) -> list[dict[str, Any]]:
        """Microseconds of all MoE layers' experts in a row, for each token count: rows of tokens, us, launch_us (host time), own (None: not moe_dist), kernels.

        As a graph where the engine captures calls of that size.
        """
        largest = _largest_captured(self)
        return [_time_layers(self, count, count <= largest, names) for count in counts]

    def moe_dist_moe_error(self: Any, count: int) -> dict[str, float]:
        """How far the first MoE layer's experts are from fp32 on the weights' meaning, over 16 of `count` tokens, relative to the truth."""
        return {"tokens": count, "error": _layer_error(self, count, count <= _largest_captured(self))}

    def moe_dist_watch(self: Any, on: bool) -> dict[str, float]:
        """Begin to watch what this process does on the host; or end it: see `HostWatch.end`."""
        if on:
            self._moe_dist_watch = HostWatch()
            return {}
        found: dict[str, float] = self._moe_dist_watch.end()
        return found

    def moe_dist_record(self: Any, on: bool) -> dict[str, float]:
        """Begin to record what the device runs; or end it: microseconds by kernel name."""
        if on:
            self._moe_dist_recorder = _recorder(self.device)
            self._moe_dist_recorder.__enter__()
            return {}
        _wait(self.device)
        self._moe_dist_recorder.__exit__(None, None, None)
        return _sums(self._moe_dist_recorder, self.device)


class HostWatch:
    """What this process spends on the host, from its making to `end`: graph launches above all, since a step that waits for the host
    is as long as they are."""

    def __init__(self) -> None:
        self._replays, self._replay_ns, self._collections, self._collect_ns, self._began = 0, 0, 0, 0, 0
        self._replay = replay = torch.cuda.CUDAGraph.replay

        def timed(graph: torch.cuda.CUDAGraph) -> None:
            began = time.perf_counter_ns()
            replay(graph)
            self._replay_ns += time.perf_counter_ns() - began
            self._replays += 1

        torch.cuda.CUDAGraph.replay = timed  # type: ignore[method-assign, assignment]
        gc.callbacks.append(self._collected)
        self._cpu, self._switches = time.process_time_ns(), self._count_switches()

    def end(self) -> dict[str, float]:
        """replays of CUDA graphs and microseconds of host time in them; collections of garbage and microseconds in them; cpu_us: of this
        process, all threads; switches: times that it was put aside, waiting or not; threads: of Python, now."""
        found = {"cpu_us": (time.process_time_ns() - self._cpu) / 1e3, "switches": self._count_switches() - self._switches}
        torch.cuda.CUDAGraph.replay = self._replay  # type: ignore[method-assign]
        gc.callbacks.remove(self._collected)
        return found | {
            "replays": self._replays, "replay_us": self._replay_ns / 1e3, "collections": self._collections,
            "collect_us": self._collect_ns / 1e3, "threads": threading.active_count(),
        }  # fmt: skip

    def _collected(self, phase: str, info: object) -> None:
        if phase == "start":
            self._began = time.perf_counter_ns()
        elif self._began:
            self._collect_ns += time.perf_counter_ns() - self._began
            self._collections += 1

    @staticmethod
    def _count_switches() -> int:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_nvcsw + used.ru_nivcsw


def _largest_captured(worker: Any) -> int:
    from moe_dist_vllm.warmup import token_counts

    return max(token_counts(worker.vllm_config).captured, default=0)


def _moe_modules(worker: Any) -> list[Any]:
    model = worker.model_runner.get_model()
    found = [m for m in model.modules() if hasattr(m, "w13_weight") and hasattr(m, "quant_method")]
    return [m for m in found if getattr(m.quant_method, "moe_kernel", None) is not None]


def _layer_inputs(layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, distinct experts and weights that sum to one, as a router gives them for unlike tokens."""
    config, device = layer.moe_config, layer.w13_weight.device
    generator = torch.Generator().manual_seed(PROMPT_SEED)
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
def _time_layers(worker: Any, tokens: int, graph: bool, names: bool) -> dict[str, Any]:
    modules = _moe_modules(worker)
    device = modules[0].w13_weight.device
    inputs = _layer_inputs(modules[0], tokens)

    def run() -> None:
        for module in modules:
            _run_layer(module, *inputs)

    call = _as_served(run, graph)
    call()
    _wait(device)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(3):
            call()
        _wait(device)
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
        with _recorder(device) as recorded:
            call()
            _wait(device)
        row["kernels"] = sorted(_sums(recorded, device))
    return row


def _launch_us(call: Callable[[], None], device: torch.device) -> float:
    """Host time of one call on an idle device, its work not waited for: the least of many."""
    times = []
    for _ in range(20):
        _wait(device)
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    _wait(device)
    return round(min(times), 2)


@torch.inference_mode()
def _layer_error(worker: Any, tokens: int, graph: bool) -> float:
    layer = _moe_modules(worker)[0]
    w13, w2, device = layer.w13_weight, layer.w2_weight, layer.w13_weight.device
    x, ids, weights = _layer_inputs(layer, tokens)
    results: list[torch.Tensor] = []
    call = _as_served(lambda: results.append(_run_layer(layer, x, ids, weights)), graph)
    call()
    _wait(device)
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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _recorder(device: torch.device) -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])


def _sums(recorded: Any, device: torch.device) -> dict[str, float]:
    """Device microseconds by kernel name; on a CPU, of operators."""
    sums: dict[str, float] = {}
    for event in recorded.events() or ():
        if device.type != "cuda" or "CUDA" in str(event.device_type):
            spent = event.device_time_total if device.type == "cuda" else event.self_cpu_time_total
            sums[event.name] = sums.get(event.name, 0.0) + float(spent)
    return sums


_EXECUTED: dict[str, int] = {}  # calls of our experts in this process, by mode; a replayed graph calls nothing anew


def _count_executions() -> None:
    from moe_dist_vllm.experts import MoEDistExperts

    run = MoEDistExperts.run

    @functools.wraps(run)
    def counted(self: Any, output: torch.Tensor, hidden_states: torch.Tensor, *args: Any) -> None:
        run(self, output, hidden_states, *args)
        mode = "captured" if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing() else "eager"
        _EXECUTED[mode] = _EXECUTED.get(mode, 0) + 1

    MoEDistExperts.run = counted  # type: ignore[method-assign, assignment]


@torch.no_grad()
def draw_weights(model: torch.nn.Module, dequantised: bool = False) -> None:
    """Weights as a trained model's might be, from each parameter's name: deviation of the fan-in, norms about one, fp8 well filled.

    dequantised: experts get what the fp8 model's numbers mean."""
    for name, parameter in model.named_parameters():
        value = parameter.data
        if "norm" in name:
            value.copy_(1 + 0.1 * torch.randn(value.shape, generator=_seeded(name, value.device), device=value.device))
        elif value.ndim == 3 and "scale" not in name and (dequantised or value.dtype == torch.float8_e4m3fn):
            scales = (
                _draw_scales(f"{name}_scale_inv", (value.shape[0], value.shape[1] // 128, value.shape[2] // 128), value.device)
                if dequantised
                else None
            )
            generator = _seeded(name, value.device)
            for expert in range(value.shape[0]):
                drawn = 100 * torch.randn(value.shape[1:], generator=generator, device=value.device)
                stored = drawn.clamp_(-448, 448).to(torch.float8_e4m3fn)
                if scales is None:
                    value[expert].copy_(stored)
                else:
                    value[expert].copy_(stored.float() * scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1))
        elif "scale" in name:
            value.copy_(_draw_scales(name, tuple(value.shape), value.device))
        elif value.ndim > 1:
            value.normal_(0, 0.5 if "embed" in name else value.shape[-1] ** -0.5, generator=_seeded(name, value.device))
        if name.endswith("lm_head.weight"):
            value.mul_(4)  # logits apart by more than rounding moves them


def _seeded(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def _draw_scales(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Block scales [E, row blocks, column blocks], by which fp8 values of deviation 100 become those of the fan-in."""
    drawn: torch.Tensor = 0.5 + torch.rand(shape, generator=_seeded(name, device), device=device)
    return drawn * (0.01 / math.sqrt(128 * shape[2]))


def _draw_after_loading() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    load = Worker.load_model
    if hasattr(load, "_moe_dist_draws"):
        return

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        asked = self.vllm_config.additional_config.get(SWITCH) if isinstance(self.vllm_config.additional_config, dict) else None
        if asked is not None:
            _count_executions()
            if asked["draw"]:
                draw_weights(self.model_runner.get_model(), dequantised=asked["draw"] == "dequantised")

    load_model._moe_dist_draws = True  # type: ignore[attr-defined]
    Worker.load_model = load_model


# -- in the engine's process -----------------------------------------------------------------------------------------------


class Engine:
    """The questions that a driver may ask, as `{"do": name, **arguments}`."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._llm: Any = None

    def start(self) -> dict[str, Any]:
        """Start the engine; seconds, and every worker's report."""
        from vllm import LLM

        began = time.perf_counter()
        self._llm = LLM(
            moe_backend=self._spec.backend, skip_tokenizer_init=True, max_logprobs=-1, logprobs_mode="raw_logits", disable_log_stats=False, enable_prefix_caching=False, seed=0,
            worker_extension_cls=f"{__package__}.bench.Questions",
            additional_config={SWITCH: {"draw": self._spec.draw}, "moe_dist": self._spec.settings}, **self._spec.keywords,
        )  # fmt: skip
        return {"seconds": round(time.perf_counter() - began, 1), "workers": self.report()}

    def report(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._llm.collective_rpc("moe_dist_report")
        return found

    def generate(self, batch: int, prompt: int, new: int, keep: bool = False) -> dict[str, Any]:
        """`batch` prompts of `prompt` tokens, `new` tokens each: seconds, output tokens/s, inter-token latency; keep: the tokens."""
        from vllm import SamplingParams

        prompts = self._prompts(batch, prompt)
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        answer: dict[str, Any] = {"seconds": seconds, "tokens_per_s": batch * new / seconds, "itl_us": _inter_token_us(outputs)}
        if keep:
            answer["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        return answer

    def host(self, batch: int, prompt: int, new: int) -> dict[str, float]:
        """What rank 0 spends on the host in `generate`, for each of the `new` tokens: as `HostWatch.end`, but threads; and step_us."""
        self._llm.collective_rpc("moe_dist_watch", args=(True,))
        seconds = self.generate(batch, prompt, new)["seconds"]
        found = self._llm.collective_rpc("moe_dist_watch", args=(False,))[0]
        threads = found.pop("threads")
        return {
            "step_us": round(seconds / new * 1e6, 1),
            **{name: round(spent / new, 2) for name, spent in found.items()},
            "threads": threads,
        }

    def moe_us(self, counts: list[int]) -> list[dict[str, Any]]:
        found: list[list[dict[str, Any]]] = self._llm.collective_rpc("moe_dist_moe_us", args=(counts,))
        return found[0]

    def moe_error(self, counts: list[int]) -> list[dict[str, float]]:
        return [self._llm.collective_rpc("moe_dist_moe_error", args=(count,))[0] for count in counts]

    def logits(self, batch: int, prompt: int) -> list[list[float]]:
        """Of the token after each of `batch` prompts. The engine must have been started with max_logprobs -1 and raw logits."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, logprobs=-1)
        found = []
        for output in self._llm.generate(self._prompts(batch, prompt), sampling, use_tqdm=False):
            said = output.outputs[0].logprobs[0]
            found.append([round(float(said[token].logprob), 4) for token in range(len(said))])
        return found

    def profile(self, batch: int, prompt: int, new: int) -> dict[str, Any]:
        """Rank 0's device time in `generate`: moe_share: of it in kernels that the MoE layers launch when they run alone; busy: of the
        wall clock. Whatever the profiler raises is the answer's "error": it is a diagnostic."""
        try:
            most = self._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
            rows = self._llm.collective_rpc("moe_dist_moe_us", args=(sorted({batch, min(batch * prompt, most)}), True))[0]
            kernels = {name for row in rows for name in row["kernels"]}
            self._llm.collective_rpc("moe_dist_record", args=(True,))
            seconds = self.generate(batch, prompt, new)["seconds"]
            sums = self._llm.collective_rpc("moe_dist_record", args=(False,))[0]
            total = sum(sums.values())
            ranked = sorted(sums.items(), key=lambda item: -item[1])
            return {
                "moe_share": round(sum(us for name, us in sums.items() if name in kernels) / total, 4),
                "busy": round(total / seconds / 1e6, 4),
                "top": [[name[:90], round(us / total, 4), name in kernels] for name, us in ranked[:14]],
            }
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _prompts(self, batch: int, prompt: int) -> list[dict[str, Any]]:
        vocabulary = self._llm.llm_engine.vllm_config.model_config.get_vocab_size()
        generator = torch.Generator().manual_seed(PROMPT_SEED)
        return [{"prompt_token_ids": row} for row in torch.randint(1, vocabulary, (batch, prompt), generator=generator).tolist()]


def _inter_token_us(outputs: list[Any]) -> float | None:
    """The mean over requests of the time between two of their tokens; None: vLLM kept no times."""
    gaps = []
    for output in outputs:
        stats, count = output.metrics, len(output.outputs[0].token_ids)
        if stats is not None and count > 1 and getattr(stats, "last_token_ts", 0.0) > getattr(stats, "first_token_ts", 0.0) > 0:
            gaps.append((stats.last_token_ts - stats.first_token_ts) / (count - 1) * 1e6)
    return sum(gaps) / len(gaps) if gaps else None


def main(text: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints is no answer
    spec = Spec(**json.loads(text))
    os.environ.update(spec.environment)
    engine = Engine(spec)

    def answer(content: object) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_worker  # what a worker loads, which is forked from this process
    from vllm.engine.arg_utils import EngineArgs

    with contextlib.suppress(Exception):  # what it finds out about the model is kept in a cache; if it can't, the start will say why
        EngineArgs(model=spec.keywords["model"], skip_tokenizer_init=True).create_model_config()
    answer({"loaded": True, "vllm": vllm.__version__, "cuda_initialized": bool(torch.cuda.is_initialized())})  # type: ignore[no-untyped-call]
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.pop("do")
        if what == "end":
            break
        try:
            answer({"answer": getattr(engine, what)(**asked)})
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    answers.close()


if __name__ == "__main__":
    main(sys.argv[1])
elif __name__ != "__mp_main__":  # a worker imports this by name, before it loads its model
    _draw_after_loading()
