"""A second vLLM plugin, for tests alone: it counts what our experts execute in every process, and can make a rank fail while it tunes.

With this folder on PYTHONPATH vLLM finds it by its entry point, in workers too. WITNESS_DIR: each process appends the token
count of every call to a file named by its pid. WITNESS_FAULT: "RANK:exit" or "RANK:raise", what becomes of that rank in its first round.
WITNESS_NATIVE: vLLM's own experts for every layer are then `PlainExperts`, since those that it has for a CPU lay weights out anew.
"""

from __future__ import annotations

import os
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
    if os.environ.get("WITNESS_NATIVE"):
        import sys

        from moe_dist_vllm.patch import _AfterImport

        def plain(native: Any) -> None:
            native.sharing = lambda *args: [_plain_experts()]

        sys.meta_path.insert(0, _AfterImport({"moe_dist_vllm.native": plain}))
    if fault := os.environ.get("WITNESS_FAULT"):
        rank, kind = fault.split(":")
        round_of = measure.CellMeasurer.round

        def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch.distributed as dist

            if dist.get_rank() == int(rank):
                if kind == "exit":
                    os._exit(9)
                raise RuntimeError("a fault made by the test")
            return round_of(self, *args, **kwargs)

        measure.CellMeasurer.round = faulty  # type: ignore[method-assign]


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
