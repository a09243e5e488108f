"""`moe-dist doctor sglang`: what is installed, what would be patched, what is tuned, and how to tune. Imports no engine, changes nothing.

Found by the command through the entry point group `moe_dist.doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_dist_sglang.compat import NAME, SGLANG


def report(store: str | None, model: str | None, tp: int, ep: int, max_tokens: int) -> Iterator[str]:
    """Lines for people. store: its URL; None: as an engine would choose it. model, tp, ep, max_tokens: of the commands that tune."""
    model, ranks = model or "MODEL", tp * ep
    parallel = (f" --tp {ranks}" if ranks > 1 else "") + (f" --ep {ep}" if ep > 1 else "")
    serve = f"python -m sglang.launch_server --model-path {model} --moe-runner-backend {NAME}{parallel} --chunked-prefill-size {max_tokens}"
    return SGLANG.report(serve, store, model, tp, ep, max_tokens)
