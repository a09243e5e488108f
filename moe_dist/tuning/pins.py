"""What keeps an epoch and its symmetric memory in force: a pin, held by whoever asked for it or by a captured CUDA graph.

Owns the pins of one tuner, or of one layer without a tuner, and how it is learned that a graph is gone. The tuner asks before it
takes another epoch; `layer.py` pins what a graph will read at each replay.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from types import TracebackType

import torch

log = logging.getLogger("moe_dist.tuning")

_GRACE_S = 2.0  # the driver may tell of a graph's end a moment after it
_UNTOLD = -1  # the place of all graphs whose end is not told
_CAPTURING, _NO_SYNC_IN_DESTRUCTOR, _GRAPH_OWNS_IT = 1, 1, 1  # the driver's constants


class Pin:
    """While it lives the tuner takes no other epoch. It ends by `release`, with its `with` block, or with its graph."""

    def __init__(self, graph: Flag | None = None) -> None:
        self._graph = graph
        self._held: list[object] = []  # alive as long as the pin: what the graph reads
        self._released = False

    def hold(self, *what: object) -> None:
        self._held += [thing for thing in what if not any(thing is other for other in self._held)]

    @property
    def lives(self) -> bool:
        return not self._released and (self._graph is None or not self._graph.raised)

    def release(self) -> None:
        """For a pin of one's own, and for a graph that will never be replayed again. Idempotent."""
        self._released = True
        self._held.clear()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Pins:
    """The pins on one table of winners."""

    def __init__(self) -> None:
        self._pins: list[Pin] = []
        self._graphs: dict[int, Pin] = {}  # by the number that the driver gave the capture

    def add(self) -> Pin:
        self._pins.append(Pin())
        return self._pins[-1]

    def add_captured(self, device: torch.device, *held: object) -> None:
        """Hold `held` as long as the graph lives that is being captured on the current stream of `device`. One pin a graph."""
        self._sweep()
        try:
            number, graph = _captured_graph(device)
            pin = self._graphs.get(number) or Pin(_flag_at_the_end_of(graph))
        except (OSError, AttributeError, RuntimeError) as error:
            if _UNTOLD not in self._graphs:
                log.warning("the driver can't tell when a captured graph ends (%s): it is taken to live as long as its tuner", error)
            number, pin = _UNTOLD, self._graphs.get(_UNTOLD) or Pin()
        self._graphs[number] = pin
        pin.hold(*held)

    def why_not_replace(self) -> str | None:
        """Why another epoch can't be adopted now; None: nothing holds this one. Waits a moment for graphs that were just dropped."""
        deadline, tried = time.monotonic() + _GRACE_S, False
        while self._sweep() and self._graphs and time.monotonic() < deadline:
            if not tried:
                gc.collect()  # a graph in a cycle is nobody's any more
                tried = True
            time.sleep(0.01)
        holders = [f"{what} ({len(held)})" for what, held in (("captured graphs", self._graphs), ("pins", self._pins)) if held]
        if not holders:
            return None
        return f"{' and '.join(holders)} hold the epoch that is served; delete or release them, try again, and capture anew after that"

    def _sweep(self) -> bool:
        """Forget what has ended; whether anything is left."""
        self._pins = [pin for pin in self._pins if pin.lives]
        self._graphs = {number: pin for number, pin in self._graphs.items() if pin.lives}
        return bool(self._pins or self._graphs)


class Flag:
    """Raised once, from any thread and without the interpreter: a semaphore of the C library, whose address the driver gets.

    A Python function would need the interpreter's lock, which whoever destroys the graph may hold. The few bytes are never given
    back: the driver may write them after this object is gone.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.calloc.restype = ctypes.c_void_p
        self.address: int = self._libc.calloc(1, 64)
        self._libc.sem_init(ctypes.c_void_p(self.address), 0, 0)
        self.raise_function = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)

    @property
    def raised(self) -> bool:
        value = ctypes.c_int()
        self._libc.sem_getvalue(ctypes.c_void_p(self.address), ctypes.byref(value))
        return value.value > 0


def _captured_graph(device: torch.device) -> tuple[int, ctypes.c_void_p]:
    """Number and handle of the graph that is being captured on the current stream."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    _call("cuStreamGetCaptureInfo_v2", stream, ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None)
    assert status.value == _CAPTURING, "called outside a capture"
    return number.value, graph


def _flag_at_the_end_of(graph: ctypes.c_void_p) -> Flag:
    """A flag that the driver raises when `graph` and everything instantiated from it is destroyed: the graph owns it."""
    flag, owned = Flag(), ctypes.c_void_p()
    _call("cuUserObjectCreate", ctypes.byref(owned), ctypes.c_void_p(flag.address), flag.raise_function, 1, _NO_SYNC_IN_DESTRUCTOR)
    _call("cuGraphRetainUserObject", graph, owned, 1, _GRAPH_OWNS_IT)
    return flag


def _call(name: str, *arguments: object) -> None:
    """RuntimeError: the driver refused."""
    if error := getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments):
        raise RuntimeError(f"{name} failed: CUDA driver error {error}")
