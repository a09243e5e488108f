"""Mixed traffic over a small HTTP server, and what makes its windows bad."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from moe_dist.bench.soak import Traffic, soak, soak_objections


class Server(ThreadingHTTPServer):
    """Answers completions with as many tokens as were asked for; every `short`-th with one less; keeps what it was asked."""

    daemon_threads = True
    short = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        short = self.server.short and len(self.server.asked) % self.server.short == 0
        body = json.dumps({"usage": {"completion_tokens": asked["max_tokens"] - bool(short)}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def traffic(server: Server, **fields: Any) -> Traffic:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    return Traffic(**{"url": url, "model": "m", "words": 50, "seconds": 1.5, "window_s": 0.5, "most": 4, "pids": [os.getpid()], **fields})


def test_every_window_has_answers_of_all_kinds(server: Server) -> None:
    rows = soak(traffic(server), lambda line: None)
    assert [row["window"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= 3
    assert all(row["requests"] and row["p50_ms"] and row["resident_mib"] > 10 for row in rows[:3])
    assert not any(row["errors"] for row in rows)
    lengths = {len(asked["prompt"]) for asked in server.asked}
    assert 64 in lengths  # the fixed request
    assert min(lengths) < 40  # short questions: 12 to 36
    assert max(lengths) >= 300  # long prompts: 300 to 900
    assert all(0 < token < 50 for asked in server.asked for token in asked["prompt"])


def test_an_answer_that_is_too_short_is_an_error(server: Server) -> None:
    server.short = 5
    rows = soak(traffic(server), lambda line: None)
    assert any(row["errors"] and "tokens instead of" in row["first_error"] for row in rows)


def test_a_server_that_is_gone_is_an_error(server: Server) -> None:
    rows = soak(traffic(server, url="http://127.0.0.1:9"), lambda line: None)
    assert all(row["errors"] and "refused" in row["first_error"] for row in rows[:2])
    assert any("no answer" in objection for objection in soak_objections(rows))


def windows(count: int = 8, **last: Any) -> list[dict[str, Any]]:
    good = {
        "requests": 9,
        "tokens": 9,
        "errors": 0,
        "first_error": None,
        "p50_ms": 100.0,
        "p99_ms": 200.0,
        "device_mib": [1000],
        "resident_mib": 100,
    }
    return [{"window": at, **good, **(last if at == count - 1 else {})} for at in range(count)]


def test_steady_windows_have_no_objection() -> None:
    assert soak_objections(windows()) == []
    # What the first two windows do is warming up, latency and growth included.
    assert soak_objections([{**row, "p50_ms": 9.0, "device_mib": [10]} for row in windows(2)] + windows()) == []


@pytest.mark.parametrize(
    ("last", "objection"),
    [
        ({"errors": 2, "first_error": "it broke"}, "window 7: 2 errors, first it broke"),
        ({"requests": 0}, "window 7: no answer"),
        ({"device_mib": [1011]}, "memory of card 0 grew from 1000 to 1011 MiB, above 1.01 times"),
        ({"resident_mib": 106}, "resident memory grew from 100 to 106 MiB, above 1.05 times"),
        # Two windows are the last third of six: 151 and 100 are 125.5 in the median.
        ({"p50_ms": 151.0}, "the fixed request took 100 ms at first and 126 ms at last, above 1.25 times that"),
    ],
)
def test_what_is_wrong_is_named(last: dict[str, Any], objection: str) -> None:
    assert soak_objections(windows(**last)) == [objection]


def test_too_few_windows_prove_nothing() -> None:
    assert soak_objections(windows(4)) == ["4 windows are too few: 2 warm up, and 3 more are compared"]
