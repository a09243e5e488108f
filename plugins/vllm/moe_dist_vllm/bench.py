"""One vLLM engine that a benchmark drives: a process that starts it, answers questions in JSON lines, and knows nothing of other engines.

`python -m moe_dist_vllm.bench SPEC` (SPEC: JSON, see `Spec`). It loads vLLM, says {"loaded": true}, and then does what each line of its
input asks for, with one line of answer: {"do": "start"}, {"do": "generate", ...}, {"do": "host", ...}, {"do": "moe_us", ...},
{"do": "profile", ...}, {"do": "end"}. `moe_dist.bench.engines` is the other side. Everything that vLLM prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import resource
import sys
import threading
import time
from typing import Any

import torch

from moe_dist_vllm.bench_layers import SEED, kernel_us, layer_error, moe_modules, recorder, time_layers, wait
from moe_dist_vllm.bench_weights import draw_weights

SWITCH = "moe_dist_bench"  # in --additional-config: {"draw": whether to draw weights}


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
        """The experts that run here and on what, the KV cache's tokens, and what moe_dist tuned, if it serves."""
        import vllm

        blocks = getattr(getattr(self.model_runner, "kv_cache_config", None), "num_blocks", None) or self.cache_config.num_gpu_blocks
        report: dict[str, Any] = {
            "rank": self.rank,
            "experts": sorted({type(m.quant_method.moe_kernel.fused_experts).__name__ for m in moe_modules(self)}),
            "layers": len(moe_modules(self)),
            "kv_tokens": int(blocks) * int(self.cache_config.block_size),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "versions": {"vllm": vllm.__version__, "torch": str(torch.__version__)},
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
        return [time_layers(self, count, count <= largest, names) for count in counts]

    def moe_dist_moe_error(self: Any, count: int) -> dict[str, float]:
        """How far the first MoE layer's experts are from fp32 on the weights' meaning, over 16 of `count` tokens, relative to the truth."""
        return {"tokens": count, "error": layer_error(self, count, count <= _largest_captured(self))}

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
            self._moe_dist_recorder = recorder(self.device)
            self._moe_dist_recorder.__enter__()
            return {}
        wait(self.device)
        self._moe_dist_recorder.__exit__(None, None, None)
        return kernel_us(self._moe_dist_recorder, self.device)


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
        generator = torch.Generator().manual_seed(SEED)
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
