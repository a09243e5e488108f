"""A second vLLM plugin, for tests alone: it counts what our experts execute in every process, and can make a rank fail while it tunes.

With this folder on PYTHONPATH vLLM finds it by its entry point, in workers too. WITNESS_DIR: each process appends the token
count of every call to a file named by its pid. WITNESS_FAULT: "RANK:exit" or "RANK:raise", what becomes of that rank in its first round.
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
