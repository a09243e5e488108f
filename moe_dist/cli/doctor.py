"""`moe-dist doctor`: what is installed, which devices there are, which backends run, and whether the store can be used.

Reports; changes nothing but one value that it writes into the store and removes again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import torch

from moe_dist.backends.registry import explain_backends
from moe_dist.cli.checks import positive, store_url, why_not_kept
from moe_dist.config import DEFAULT_MAX_NUM_TOKENS, ExpertConfig, MoEConfig, RoutingConfig
from moe_dist.interop.hf_config import loadable, read_model
from moe_dist.settings import default_store
from moe_dist.stores.layered import ReadOnlyStore
from moe_dist.stores.open import open_store

HELP = "say what is installed, which devices and backends there are, and whether the store can be used"
DISTRIBUTIONS = ("moe-dist", "torch", "triton", "msgpack", "redis", "nvidia-ml-py", "vllm", "sglang", "flashinfer-python")
REPORTS = "moe_dist.doctor"  # entry points: `report(store, model, tp, ep, max_tokens)` gives a plugin's lines
SMALL = MoEConfig(routing=RoutingConfig(8, 2), experts=ExpertConfig(hidden_size=256, intermediate_size=256))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = sorted(point.name for point in importlib.metadata.entry_points(group=REPORTS))
    parser.add_argument("framework", nargs="?", choices=known, help="say also how it stands with this framework's plugin")
    parser.add_argument("--model", help="of the framework's commands that tune")
    parser.add_argument("--tp", type=positive, default=1, help="ranks that cut every expert (default 1)")
    parser.add_argument("--ep", type=positive, default=1, help="ranks that share out the experts (default 1)")
    parser.add_argument(
        "--max-tokens", type=positive, default=DEFAULT_MAX_NUM_TOKENS, help="the largest token count of a step (default 8192)"
    )
    parser.add_argument("--store", type=store_url, help="folder or URL (default: $MOE_DIST_STORE, else the user's cache)")


def run(arguments: argparse.Namespace) -> int:
    """0: this machine can tune; 1: its store can't keep results. ConfigError: `tune` would refuse the model or how it is cut."""
    if arguments.model is not None:
        read_model(arguments.model).moe_config(tp_size=arguments.tp, ep_size=arguments.ep, routed=True)
    print(f"python {platform.python_version()} on {platform.platform()}")
    for name in DISTRIBUTIONS:
        print(f"{name} {_version(name)}")
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        print(f"{device}: {_describe(device)}")
    for device in devices[:2]:
        for name, reason in explain_backends(SMALL, device).items():
            print(f"backend {name} on {device.type}: {'runs a small bf16 layer' if reason is None else reason}")
    for point in importlib.metadata.entry_points(group=REPORTS):
        if point.name == arguments.framework:
            model = None if arguments.model is None else loadable(arguments.model)
            for line in point.load()(arguments.store, model, arguments.tp, arguments.ep, arguments.max_tokens):
                print(line)
    return _check_store(arguments.store or default_store())


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{platform.machine()}, {threads} thread{'s' * (threads != 1)}"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs, {properties.total_memory >> 30} GiB"


def _check_store(url: str) -> int:
    store = open_store(url)
    store.close()
    reason = why_not_kept(url)
    if isinstance(store, ReadOnlyStore) and reason is None:
        reason = "it is read-only"
    if reason is None:
        print(f"store {store.url}: written, read back and removed a value")
        return 0
    lasts = "what is tuned would last as long as its process"
    print(f"store {store.url}: does not keep what is written ({reason}); {lasts}: mend it, or name another with --store")
    return 1
