"""What must be equal for a result to be reused: environment and key. Knows no store and no rank.

One function builds an environment, one a key; both are frozen dataclasses whose every field counts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe_dist.tuning.problem import Cell, ProbeSpec, canonical, digest
from moe_dist.versions import digest_of_sources, release_of

FORMAT_VERSION = 1
ENTRIES = "entries"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """Changing any one field makes every stored result of the other a miss."""

    format_version: int
    device_type: str
    device_name: str
    compute_capability: str
    sm_count: int
    driver: str
    cuda: str
    torch: str
    triton: str
    moe_dist: str
    kernel_sources: str
    host_threads: int
    backends: tuple[tuple[str, str], ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        return digest(self)

    @property
    def folder(self) -> str:
        """Where its entries lie in a store."""
        return f"{ENTRIES}/{self.digest}"

    def to_plain(self) -> dict[str, Any]:
        return {field.name: canonical(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Environment:
        return cls(**{name: canonical(value) for name, value in plain.items()})

    def differences(self, other: Environment) -> dict[str, tuple[Any, Any]]:
        """{field: (ours, theirs)} for every field that differs."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: (getattr(self, name), getattr(other, name)) for name in names if getattr(self, name) != getattr(other, name)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """Where a winner may be reused: environment + problem + bucket + mode + policy + objective + probe."""

    environment: Environment
    cell: Cell
    policy: str
    objective: str
    probe: ProbeSpec

    def canonical(self) -> Any:
        return canonical(self)

    @property
    def digest(self) -> str:
        return digest(self)

    @property
    def path(self) -> str:
        """The store key of its entry: the environment chooses the folder, the rest the entry."""
        return f"{self.environment.folder}/{self.digest}"


def build_environment(device: torch.device, versions: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process on `device`. versions: those of the foreign backends in the pool."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return Environment(
        format_version=FORMAT_VERSION,
        device_type=device.type,
        device_name=properties.name if properties else _cpu_name(),
        compute_capability=f"{properties.major}.{properties.minor}" if properties else platform.machine(),
        sm_count=properties.multi_processor_count if properties else 0,
        driver=_driver_version() if cuda else "",
        cuda=str(torch.version.cuda or ""),
        torch=str(torch.__version__),
        triton=release_of("triton"),
        moe_dist=release_of("moe-dist"),
        kernel_sources=_kernel_sources(),
        host_threads=0 if cuda else torch.get_num_threads(),
        backends=tuple(sorted((versions or {}).items())),
    )


@functools.cache
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the platform module knows a coarser name
    return platform.processor() or platform.machine()


def _driver_version() -> str:
    try:
        return driver_in(Path("/proc/driver/nvidia/version").read_text())
    except (OSError, ValueError):
        try:
            import pynvml

            pynvml.nvmlInit()
            return str(pynvml.nvmlSystemGetDriverVersion())
        except Exception as error:  # any failure of an optional library means one thing: the driver can't be told
            raise RuntimeError("the NVIDIA driver's version can't be read from /proc or NVML; install nvidia-ml-py") from error


def driver_in(text: str) -> str:
    """The version in what the kernel module says of itself, which names its build before it on some systems. ValueError: none is there."""
    found = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)*)\s", text)
    if found is None:
        raise ValueError(f"no driver version in {text[:200]!r}")
    return found.group(1)


@functools.cache
def _kernel_sources() -> str:
    """Digest of the kernel package's sources, found without importing it (that would load triton)."""
    spec = importlib.util.find_spec("moe_dist_kernels")
    if spec is None or not spec.submodule_search_locations:
        return "absent"
    return digest_of_sources(map(Path, spec.submodule_search_locations))
