"""A second vLLM plugin, for tests alone: it counts what our experts execute in every process, and can make a rank fail while it tunes.

With this folder on PYTHONPATH vLLM finds it by its entry point, in workers too. WITNESS_DIR: each process appends the token
count of every call to a file named by its pid. WITNESS_FAULT: "RANK:exit" or "RANK:raise", what becomes of that rank in its first round,
which it says with the time.
WITNESS_GATHER: vLLM's communicator for CPUs gets the two collectives that it lacks, of parts of unlike sizes, which data parallelism needs.
WITNESS_STAGES: later stages of a pipeline get the buffers that vLLM makes in a profile run, which it leaves out for eager engines on a CPU.
WITNESS_QUANTISE: vLLM gets the operator that quantises to fp8, which its CPU build only names: it merges gate's and up's scales of a tensor with it, and quantises what it loads.
While they are set, for engines that share a process with others: WITNESS_REFUSE: our experts say of every layer that they don't serve it.
WITNESS_EPLB: vLLM thinks that a CPU can move experts between ranks, which it refuses by itself. WITNESS_NATIVE: vLLM's own experts for every
layer are then `PlainExperts`, since those that it has for a CPU lay weights out anew.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def register() -> None:
    import moe_dist.layer as layer
    import moe_dist.tuning.measure as measure

    if hasattr(layer, "_witnessed"):
        return
    layer._witnessed = True  # type: ignore[attr-defined]
    if folder := os.environ.get("WITNESS_DIR"):
        execute = layer._execute

        def counted(problem: Any, runner: Any, acts: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            result = execute(problem, runner, acts, num_tokens, *args, **kwargs)
            if num_tokens:
                with (Path(folder) / str(os.getpid())).open("a") as file:
                    file.write(f"{num_tokens}\n")
            return result

        layer._execute = counted
    if os.environ.get("WITNESS_GATHER"):
        _after("vllm.distributed.device_communicators.cpu_communicator", _give_uneven_collectives)
    if os.environ.get("WITNESS_STAGES"):
        _after("vllm.v1.worker.gpu_model_runner", _make_stage_buffers)
    if os.environ.get("WITNESS_QUANTISE"):
        _after("vllm._custom_ops", _quantise_to_fp8)
    _after("moe_dist_vllm.experts", _refuse_layers)
    _after("vllm.config.parallel", _allow_eplb)
    _after("moe_dist_vllm.native", _give_plain_experts)
    if fault := os.environ.get("WITNESS_FAULT"):
        rank, kind = fault.split(":")
        round_of = measure.CellMeasurer.round

        def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch.distributed as dist

            if dist.get_rank() == int(rank):
                print(f"a fault at {time.monotonic()}", flush=True)
                if kind == "exit":
                    os._exit(9)
                raise RuntimeError("a fault made by the test")
            return round_of(self, *args, **kwargs)

        measure.CellMeasurer.round = faulty  # type: ignore[method-assign]


def _after(module: str, hook: Any) -> None:
    """Call `hook(module)` once it is loaded."""
    import sys

    from moe_dist_vllm.patch import _AfterImport

    if module in sys.modules:
        hook(sys.modules[module])
    else:
        sys.meta_path.insert(0, _AfterImport({module: hook}))


def _make_stage_buffers(module: Any) -> None:
    gather = module.GPUModelRunner.sync_and_gather_intermediate_tensors

    def gather_into(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **kwargs)

    module.GPUModelRunner.sync_and_gather_intermediate_tensors = gather_into


def _quantise_to_fp8(module: Any) -> None:
    import torch

    def scaled_fp8_quant(
        input: torch.Tensor, scale: torch.Tensor | None = None, use_per_token_if_dynamic: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        most = torch.finfo(torch.float8_e4m3fn).max
        if scale is None:
            scale = (input.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else input.abs().amax()).float() / most
        return (input.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale

    module.scaled_fp8_quant = scaled_fp8_quant


def _refuse_layers(module: Any) -> None:
    why_not = module.why_not
    module.why_not = lambda *layer: "does not serve this layer, says the test" if os.environ.get("WITNESS_REFUSE") else why_not(*layer)


def _allow_eplb(module: Any) -> None:
    class Platform:
        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def is_xpu(self) -> bool:
            return bool(os.environ.get("WITNESS_EPLB")) or bool(self._real.is_xpu())

    module.current_platform = Platform(module.current_platform)


def _give_uneven_collectives(module: Any) -> None:
    import torch
    import torch.distributed as dist

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        def gather(mine: torch.Tensor) -> torch.Tensor:
            parts = [mine.new_empty((size, *mine.shape[1:])) for size in sizes or [mine.shape[0]] * self.world_size]
            parts[self.rank_in_group].copy_(mine)
            for rank, part in zip(self.ranks, parts, strict=True):
                dist.broadcast(part, rank, group=self.device_group)
            return torch.cat(parts)

        return [gather(mine) for mine in input_] if isinstance(input_, list) else gather(input_)

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        whole = input_.clone()
        dist.all_reduce(whole, group=self.device_group)
        return whole.split(sizes or input_.shape[0] // self.world_size)[self.rank_in_group].clone()

    module.CpuCommunicator.all_gatherv, module.CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def _give_plain_experts(native: Any) -> None:
    sharing = native.sharing
    native.sharing = lambda *args: [_plain_experts()] if os.environ.get("WITNESS_NATIVE") else sharing(*args)


def _plain_experts() -> type:
    """Experts of vLLM's own interface that compute in plain torch, one after the other."""
    import torch.nn.functional as F
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class PlainExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
        expects_unquantized_inputs = True

        def _yes(*args: Any) -> bool:
            return True

        _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = staticmethod(_yes)
        _supports_activation = _supports_parallel_config = staticmethod(_yes)
        activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.Standard)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:
            return (M, topk, N // 2), (M, topk, N), (M, K)

        def apply(
            self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *rest: Any, **named: Any
        ) -> None:
            expert_map, workspace13, workspace2 = named["expert_map"], named["workspace13"], named["workspace2"]
            rows = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
            output.zero_()
            for expert in range(w1.shape[0]):
                token, slot = (rows == expert).nonzero(as_tuple=True)
                workspace2[token, slot] = F.linear(hidden_states[token], w1[expert])
                gate, up = workspace2[token, slot].chunk(2, dim=-1)
                workspace13[token, slot] = F.silu(gate) * up
                output.index_add_(0, token, F.linear(workspace13[token, slot], w2[expert]) * topk_weights[token, slot, None])

    return PlainExperts
