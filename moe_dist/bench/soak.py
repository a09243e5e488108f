"""Mixed traffic for a long time over an OpenAI-compatible server that somebody else started: errors, latency and memory by the minute.

Owns the traffic, the windows and what makes them bad. Knows no framework and starts no server. cli imports this.

The load comes in cycles as long as a window, so that windows can be compared: from one request at a time to `MOST` at once, of three
kinds: short questions, long prompts, long answers. One request of a fixed size is always under way: its latency is the window's.
"""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import random
import statistics
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_dist.bench.server import ServerLost

MOST = 64
KINDS = ((24, 16), (600, 8), (64, 192))  # (prompt tokens, new tokens)
CANARY = (64, 32)
WARM_WINDOWS = 2  # the first ones fill caches
# The last third of the windows over the first: median latency; memory of a card, which an engine takes at its start; of the host.
SLOWER, CARD_GROWTH, HOST_GROWTH = 1.25, 1.01, 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """url: of the server. model: its served name. words: token ids are drawn below this. scale: of the numbers of tokens.
    pids: processes of the server, whose resident memory is watched with all their descendants."""

    url: str
    model: str
    words: int
    seconds: float
    window_s: float = 60.0
    scale: float = 1.0
    most: int = MOST
    pids: Sequence[int] = ()


def soak(traffic: Traffic, note: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Rows of window, requests, tokens, errors, first_error, p50_ms, p99_ms (of the fixed request), device_mib (a card each), resident_mib.

    ServerLost: in the last of them no request was answered, and some failed.
    """
    began = time.monotonic()
    stop = threading.Event()
    ledger = _Ledger()
    threads = [threading.Thread(target=_client, args=(traffic, index, began, stop, ledger)) for index in range(traffic.most)]
    threads.append(threading.Thread(target=_canary, args=(traffic, stop, ledger)))
    for thread in threads:
        thread.start()
    try:
        for window in itertools.count():
            if time.monotonic() - began >= traffic.seconds:
                break
            time.sleep(min(traffic.window_s, max(0.05, traffic.seconds - (time.monotonic() - began))))
            row = {"window": window, **ledger.take(), "device_mib": _device_mib(), "resident_mib": _resident_mib(traffic.pids)}
            note(json.dumps(row))
            yield row
            if row["errors"] and not row["requests"]:
                where = urllib.parse.urlsplit(traffic.url)
                host = f"{where.scheme}://{where.hostname}:{where.port or 80}"  # without a login
                raise ServerLost(
                    f"the server {host} was lost: window {window} has no answer, and {row['errors']} errors ({row['first_error']})"
                )
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def soak_objections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the windows: an error, silence, latency or memory that grows from the first third to the last."""
    found = [f"window {row['window']}: {row['errors']} errors, first {row['first_error']}" for row in rows if row["errors"]]
    found += [f"window {row['window']}: no answer" for row in rows if not row["requests"] or row["p50_ms"] is None]
    warm = [row for row in rows[WARM_WINDOWS:] if row["p50_ms"] is not None]
    third = len(warm) // 3
    if third == 0:
        return [*found, f"{len(rows)} windows are too few: {WARM_WINDOWS} warm up, and 3 more are compared"]
    first, last = warm[:third], warm[-third:]
    before, after = (statistics.median(row["p50_ms"] for row in part) for part in (first, last))
    if after > before * SLOWER:
        found.append(f"the fixed request took {before:.0f} ms at first and {after:.0f} ms at last, above {SLOWER:g} times that")
    series = [("resident memory", HOST_GROWTH, [[row["resident_mib"] for row in part] for part in (first, last)])]
    for card in range(len(first[0]["device_mib"])):
        series.append((f"memory of card {card}", CARD_GROWTH, [[row["device_mib"][card] for row in part] for part in (first, last)]))
    for name, growth, (then, now) in series:
        if max(now) > max(then) * growth:
            found.append(f"{name} grew from {max(then)} to {max(now)} MiB, above {growth:g} times")
    return found


class _Ledger:
    """What the clients of one window met."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, self._tokens = 0, 0
        self._errors: list[str] = []
        self._canary_ms: list[float] = []

    def answered(self, tokens: int) -> None:
        with self._lock:
            self._requests += 1
            self._tokens += tokens

    def failed(self, reason: str) -> None:
        with self._lock:
            self._errors.append(reason)

    def canary(self, milliseconds: float) -> None:
        with self._lock:
            self._canary_ms.append(milliseconds)

    def take(self) -> dict[str, Any]:
        """The window's fields; begins the next window."""
        with self._lock:
            times = sorted(self._canary_ms)
            row = {
                "requests": self._requests, "tokens": self._tokens, "errors": len(self._errors), "first_error": next(iter(self._errors), None),
                "p50_ms": round(statistics.median(times), 1) if times else None,
                "p99_ms": round(times[int(0.99 * (len(times) - 1))], 1) if times else None,
            }  # fmt: skip
            self._requests, self._tokens, self._errors, self._canary_ms = 0, 0, [], []
            return row


def _client(traffic: Traffic, index: int, began: float, stop: threading.Event, ledger: _Ledger) -> None:
    """Client `index` is at work in the part of each cycle in which at least `index` + 1 are wanted: up, then down again."""
    draw = random.Random(index)
    for kind in itertools.cycle(range(index % 3, index % 3 + 3)):
        phase = ((time.monotonic() - began) % traffic.window_s) / traffic.window_s
        wanted = traffic.most * (1 - abs(2 * phase - 1))
        if index and index + 1 > wanted:
            if stop.wait(0.2):
                return
            continue
        if stop.is_set():
            return
        prompt, new = (max(1, round(count * traffic.scale * draw.uniform(0.5, 1.5))) for count in KINDS[kind % 3])
        _ask(traffic, draw, prompt, new, ledger)


def _canary(traffic: Traffic, stop: threading.Event, ledger: _Ledger) -> None:
    draw = random.Random(-1)
    prompt, new = (max(1, round(count * traffic.scale)) for count in CANARY)
    while not stop.is_set():
        started = time.perf_counter()
        if _ask(traffic, draw, prompt, new, ledger):
            ledger.canary((time.perf_counter() - started) * 1e3)
        stop.wait(0.05)


def _ask(traffic: Traffic, draw: random.Random, prompt: int, new: int, ledger: _Ledger) -> bool:
    """One completion; whether it was answered in full."""
    asked = {
        "model": traffic.model, "prompt": [draw.randrange(1, traffic.words) for _ in range(prompt)], "max_tokens": new, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(f"{traffic.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            said = json.load(answer)
    except (OSError, ValueError, http.client.HTTPException) as error:  # urllib's own errors are OSErrors; ValueError: no JSON
        ledger.failed(f"{type(error).__name__}: {error}")
        return False
    count = said.get("usage", {}).get("completion_tokens")
    if count != new:
        ledger.failed(f"{count} tokens instead of {new}")
        return False
    ledger.answered(new)
    return True


def _device_mib() -> list[int]:
    """Used memory of each card; empty where there is none."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in said.stdout.split()]


def _resident_mib(pids: Sequence[int]) -> int:
    """Resident memory of the processes and their descendants."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
    family = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    total = 0
    for pid in family:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return total * 4096 // 2**20
