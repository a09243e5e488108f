"""`moe-dist doctor vllm`: what is installed, what would be patched, what is tuned, and how to tune. Imports no engine, changes nothing.

Found by the command through the entry point group `moe_dist.doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_dist_vllm.compat import NAME, VLLM


def report(store: str | None, model: str | None, tp: int, ep: int, max_tokens: int) -> Iterator[str]:
    """Lines for people. store: its URL; None: as an engine would choose it. model, tp, ep, max_tokens: of the commands that tune."""
    model, ranks = model or "MODEL", tp * ep
    parallel = f" --tensor-parallel-size={ranks}" + (" --enable-expert-parallel" if ep > 1 else "") if ranks > 1 else ""
    serve = f"vllm serve {model} --moe-backend={NAME}{parallel} --max-num-batched-tokens={max_tokens}"
    return VLLM.report(serve, store, model, tp, ep, max_tokens)
