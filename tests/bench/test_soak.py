"""Mixed traffic over a small HTTP server, and what makes its windows bad."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moe_dist.bench.soak import Traffic, soak, soak_objections
from moe_dist.cli import bench
from moe_dist.cli.main import main


class Server(ThreadingHTTPServer):
    """Answers completions with as many tokens as were asked for; every `short`-th with one less, every `cut`-th by half; keeps what it was asked."""

    daemon_threads = True
    short = cut = 0

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
        cut = self.server.cut and len(self.server.asked) % self.server.cut == 0
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

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
    rows = list(soak(traffic(server), lambda line: None))
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
    rows = list(soak(traffic(server), lambda line: None))
    assert any(row["errors"] and "tokens instead of" in row["first_error"] for row in rows)


def test_a_server_that_ends_amid_an_answer_is_an_error_of_that_request(server: Server) -> None:
    server.cut = 5
    rows = list(soak(traffic(server), lambda line: None))
    assert any(row["errors"] and row["requests"] and row["first_error"].startswith("IncompleteRead: ") for row in rows)


def test_a_server_that_goes_away_ends_the_command_with_a_line_and_the_windows_before_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    noted: list[str] = []

    def note(line: str) -> None:
        noted.append(line)
        if len(noted) == 2:
            server.shutdown()
            server.server_close()

    monkeypatch.setattr(bench, "note", note)
    url, path = f"http://127.0.0.1:{server.server_address[1]}", tmp_path / "soak.json"
    sizes = ["--seconds", "600", "--window-s", "0.5", "--most", "4"]
    assert main(["bench", "soak", "--url", url, "--model", "m", *sizes, "--json", str(path)]) == 1
    said, rows = capfd.readouterr().err, json.loads(path.read_text())["soak"]
    assert said.startswith(f"moe-dist bench: the server {url} was lost: window {len(rows) - 1} has no answer, and ")
    assert "refused" in said
    assert said.endswith(f"; {len(rows)} rows before it are in {path}; see that it runs, then run this again\n")
    assert said.count("\n") == 1
    assert len(rows) <= 4, "it did not go on for the rest of its time"


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
