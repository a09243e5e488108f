"""Two hosts on one machine: network namespaces with a link between them and a disk each, or, where those are not allowed, folders and ports.

Each has a local disk that the other does not see; the first serves the rendezvous and a Redis. `cut` takes the link away as a pulled
cable does: nothing is refused, nothing arrives any more.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

import pytest
from redis_server import RedisServer, free_port

PASSWORD = "0penSesame"


class Hosts:
    """A context manager. interface: what ranks talk through. disks: where each host's lies, as this process sees it."""

    interface = "lo"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disks = [folder / "host0/disk", folder / "host1/disk"]
        for disk in self.disks:
            disk.mkdir(parents=True)
        self.server = RedisServer(password=PASSWORD)

    def __enter__(self) -> Hosts:
        self.server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.server.__exit__()

    def command(self, host: int, command: list[str]) -> list[str]:
        """`command`, run on that host."""
        raise NotImplementedError

    def disk(self, host: int) -> str:
        """Where that host's own disk lies, as its processes see it."""
        raise NotImplementedError

    def rendezvous(self, host: int) -> tuple[str, int]:
        raise NotImplementedError

    def redis(self, host: int) -> str:
        raise NotImplementedError

    def cut(self) -> None:
        raise NotImplementedError

    def mend(self) -> None:
        raise NotImplementedError


class NamespaceHosts(Hosts):
    """One path, /…/disk, is another disk on each host: what a node-local directory of equal name is on real ones."""

    interface = "moe0"
    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names = [f"moe-dist-{os.getpid()}-{host}" for host in (0, 1)]
        (folder / "disk").mkdir()
        self.server = RedisServer(password=PASSWORD, prefix=("ip", "netns", "exec", self.names[0]), host=self.addresses[0])

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0 or shutil.which("ip") is None or _ip("netns", "add", self.names[0]):
            pytest.skip("network namespaces are not allowed here; the hosts of folders and ports stand for them")
        made = _ip("netns", "add", self.names[1])
        made += _ip(
            "link", "add", self.interface, "netns", self.names[0], "type", "veth", "peer", "name", self.interface, "netns", self.names[1]
        )
        for name, address in zip(self.names, self.addresses, strict=True):
            made += _ip("-n", name, "address", "add", f"{address}/24", "dev", self.interface)
            made += _ip("-n", name, "link", "set", "lo", "up")
            made += _ip("-n", name, "link", "set", self.interface, "up")
        if made:
            self._remove()
            pytest.skip(f"no link between network namespaces here ({made.strip()}); the hosts of folders and ports stand for them")
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._remove()

    def _remove(self) -> None:
        for name in self.names:  # its link goes with it
            _ip("netns", "delete", name)

    def command(self, host: int, command: list[str]) -> list[str]:
        mount = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(self.disks[host]), self.disk(host)]
        return ["ip", "netns", "exec", self.names[host], *mount, *command]

    def disk(self, host: int) -> str:
        return str(self.folder / "disk")

    def rendezvous(self, host: int) -> tuple[str, int]:
        return self.addresses[0], 29400

    def redis(self, host: int) -> str:
        return f"redis://:{PASSWORD}@{self.addresses[0]}:{self.server.port}"

    def cut(self) -> None:
        assert not _ip("-n", self.names[1], "link", "set", self.interface, "down")

    def mend(self) -> None:
        assert not _ip("-n", self.names[1], "link", "set", self.interface, "up")


class FolderHosts(Hosts):
    """The second host reaches the first one's ports through relays, which can be told to swallow everything."""

    def __enter__(self) -> Hosts:
        super().__enter__()
        self.port = free_port()
        self.relays = [Relay(self.port), Relay(self.server.port)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for relay in self.relays:
            relay.close()
        super().__exit__(kind, error, trace)

    def command(self, host: int, command: list[str]) -> list[str]:
        return command

    def disk(self, host: int) -> str:
        return str(self.disks[host])

    def rendezvous(self, host: int) -> tuple[str, int]:
        return "127.0.0.1", self.relays[0].port if host else self.port

    def redis(self, host: int) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.relays[1].port if host else self.server.port}"

    def cut(self) -> None:
        for relay in self.relays:
            relay.open.clear()

    def mend(self) -> None:
        for relay in self.relays:
            relay.open.set()


class Relay:
    """Forwards connections to `target` on this machine while `open` is set, and holds back what comes while it is not."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.open = threading.Event()
        self.open.set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self.open.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
            except ConnectionRefusedError:  # nobody listens yet; the client asks again
                near.close()
                continue
            except OSError:
                return
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.open.wait()
                sink.sendall(data)
        except OSError:
            pass
        while not self.open.wait(0.1) and not self._closed:  # over a link that is cut not even the end of a connection arrives
            pass
        for end in (source, sink):
            end.close()


def _ip(*arguments: str) -> str:
    """What `ip` objected to; "" where it did as told."""
    ended = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    return ended.stderr or f"exit code {ended.returncode}\n" if ended.returncode else ""


def wait_for(path: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not appear in {seconds} s"
        time.sleep(0.01)
