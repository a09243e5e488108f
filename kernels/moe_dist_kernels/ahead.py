"""Kernels compiled before their first launch, in processes beside this one: a process compiles one kernel at a time.

Owns `compile_ahead` and the processes behind it (`python -m moe_dist_kernels.ahead`), which touch no device: what they compile lands in
triton's cache on disk, under the very key that a first launch looks for, since both take the same way through triton. What fails here is
no fault yet: the launch will say why. Beside the cache lies an empty file for each kernel that was compiled, so that asking again costs no
process. Knows no tuning; the triton backend calls this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from moe_dist_kernels.launch import Launch
from moe_dist_kernels.plan import ExpertsShape, Plan, RouterShape, all_launches
from moe_dist_kernels.routing import route_launch

log = logging.getLogger("moe_dist.kernels")

SILENCE_S = 120.0  # no kernel takes so long: the processes are given up
FEWEST = 4  # kernels that are worth a process: starting one costs as much as compiling two
_ROUTE = "route"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """All that one plan launches. router: with logits; None: with ids of int32."""

    shape: ExpertsShape
    plan: Plan
    pdl: bool
    router: RouterShape | None = None

    def launches(self) -> dict[str, Launch]:
        found = all_launches(self.shape, self.plan, ids_dtype=torch.int32, pdl=self.pdl)
        if self.router is not None:
            found[_ROUTE] = route_launch(**dataclasses.asdict(self.router), pdl=self.pdl)
        return found


def target_of(device: torch.device) -> GPUTarget:
    """What to compile for, for a CUDA device of this process."""
    major, minor = torch.cuda.get_device_capability(device)
    return target_for(10 * major + minor)


def target_for(arch: int) -> GPUTarget:
    """What to compile for, for a compute capability, 90 for 9.0."""
    return GPUTarget("cuda", arch, 32)


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What a call came to. kernels: distinct ones that the variants launch; compiled: those that were compiled now; failed: name and reason."""

    kernels: int
    compiled: int
    failed: tuple[str, ...]


def compile_ahead(
    variants: Iterable[Variant],
    target: GPUTarget,
    *,
    processes: int,
    first: float = 0.0,
    deadline: float | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Ahead:
    """Compile what `variants` launch, each kernel once, unless it was compiled here before.

    first: where in the list to begin, 0 to 1: ranks that share a cache and begin apart share the work. deadline: `time.monotonic`
    at which to stop; what is left is compiled when it is first launched. progress: called as kernels are done.
    """
    wanted = distinct(variants, target)
    folder = Path(triton.knobs.cache.dir) / "moe_dist_ahead"
    missing = [(mark, *wanted[mark]) for mark in wanted if not (folder / mark).exists()]
    if len(missing) < FEWEST:
        return Ahead(len(wanted), 0, ())
    missing.sort(key=lambda work: _KIND_ORDER.get(work[2], len(_KIND_ORDER)))  # the longest first, so that none is left alone at the end
    turn = round(first * len(missing))
    missing = missing[turn:] + missing[:turn]
    done: set[str] = set()
    failed = []
    for place, said in _results("compile", [work[1:] for work in missing], target, min(processes, len(missing)), deadline):
        progress()
        if place is None:
            continue
        if said:
            failed.append(f"{missing[place][2]}: {said}")
            continue
        done.add(missing[place][0])
    with contextlib.suppress(OSError):  # a cache that takes no files: triton itself says so
        folder.mkdir(parents=True, exist_ok=True)
        for name in done:
            (folder / name).touch()
    if failed:
        log.info("%d of %d kernels did not compile ahead, first %s", len(failed), len(missing), failed[0])
    return Ahead(len(wanted), len(done), tuple(failed))


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes: registers and bytes of local memory of a thread (spilled registers go there), bytes of shared memory
    of a block, and the matrix instructions that it uses, "" for none."""

    registers: int
    local_bytes: int
    shared_bytes: int
    matrix_unit: str


def distinct(variants: Iterable[Variant], target: GPUTarget) -> dict[str, tuple[Variant, str]]:
    """Every kernel that `variants` launch, once: {its identity: (the first variant that launches it, its name there)}."""
    found: dict[str, tuple[Variant, str]] = {}
    for variant in dict.fromkeys(variants):
        for name, launch in variant.launches().items():
            found.setdefault(_identity(launch, target), (variant, name))
    return found


def usages(work: Sequence[tuple[Variant, str]], target: GPUTarget, *, processes: int) -> list[Usage | str]:
    """What kernels take when they are compiled for `target`, present or not: its usage, or why it does not compile, in the order of `work`."""
    found: dict[int, Usage | str] = {}
    for place, said in _results("usage", work, target, min(processes, len(work)), None):
        if place is not None:
            found[place] = Usage(**json.loads(said)) if said.startswith("{") else said
    return [found.get(place, "the process that compiles ended before it") for place in range(len(work))]


_KIND_ORDER = {"up": 0, "down": 1}


def _identity(launch: Launch, target: GPUTarget) -> str:
    """Equal for launches that are one kernel to the compiler, whatever they are called."""
    options = (launch.num_warps, launch.num_stages, launch.pdl, launch.max_registers)
    what = (launch.kernel.__module__, launch.kernel.__name__, tuple(launch.params), tuple(launch.constants.items()), options)
    return hashlib.sha256(repr((what, target, triton.__version__, _sources())).encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def _results(
    task: str, work: Sequence[tuple[Variant, str]], target: GPUTarget, processes: int, deadline: float | None
) -> Iterable[tuple[int | None, str]]:
    """(place in `work`, what `task` says) of each kernel as it is done; (None, "") once a second while nothing is.

    Ends early at the deadline, or when the processes fall silent; they are gone when this ends, however it ends.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "TRITON_CACHE_DIR": triton.knobs.cache.dir,
    }
    environment.pop("TRITON_INTERPRET", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_dist_kernels.ahead"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(pickle.dumps((task, list(work), (target.backend, target.arch, target.warp_size), max(1, processes))))
            process.stdin.close()
        heard, rest = time.monotonic(), b""
        while True:
            now = time.monotonic()
            if (deadline is not None and now > deadline) or now - heard > SILENCE_S:
                log.warning("kernels are not compiled ahead any further: %s", "no time is left" if now - heard <= SILENCE_S else "silence")
                return
            if not select.select([process.stdout], [], [], 1.0)[0]:
                yield None, ""
                continue
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                if process.wait() != 0:
                    log.warning("the process that compiles kernels ahead ended with %d", process.returncode)
                return
            heard = now
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                place, _, reason = line.decode(errors="replace").partition(" ")
                yield int(place), reason
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


class _Stub:
    """Triton's driver of a process without a device: says what to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def _do_one(task: str, place: int) -> tuple[int, str]:
    """ "compile": "" or why not; "usage": a `Usage` as JSON, or why not."""
    variant, name = _WORK[place]
    try:
        compiled = variant.launches()[name].compile_for_cache()
        if task == "usage":
            return place, json.dumps(dataclasses.asdict(_usage_of(compiled)))
        _build_launcher(compiled)
    except Exception as error:  # compilers raise types of their own; the launch will meet it again and tell
        return place, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return place, ""


def _usage_of(compiled: Any) -> Usage:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    ptx = compiled.asm["ptx"]
    unit = next((name for name in ("wgmma", "tcgen05", "mma.sync") if name in ptx), "")
    return Usage(found["REG"], found["STACK"] + found.get("LOCAL", 0), compiled.metadata.shared, unit)


def _build_launcher(compiled: Any) -> None:
    """Triton 3.6 also builds a C module for each signature at a first launch; later releases have one for all."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with contextlib.suppress(
            AssertionError, ImportError, OSError, RuntimeError, subprocess.CalledProcessError
        ):  # no libcuda, no compiler
            driver.CudaLauncher(compiled.src, compiled.metadata)


_WORK: list[tuple[Variant, str]] = []


def _main() -> None:
    """Read the work from standard input, compile it in forks of this process, write a line for each kernel."""
    task, work, target, processes = pickle.loads(sys.stdin.buffer.read())
    _WORK.extend(work)
    triton.runtime.driver.set_active(_Stub(GPUTarget(*target)))
    with get_context("fork").Pool(processes) as pool:
        for place, said in pool.imap_unordered(functools.partial(_do_one, task), range(len(work))):
            print(place, said.replace("\n", " "), flush=True)


if __name__ == "__main__":
    # Under its own name, so that what is unpickled and what is defined here are one.
    from moe_dist_kernels import ahead

    ahead._main()
