"""A slow link to a server: a proxy that holds each request for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class SlowEnd:
    """In front of the server at `port`; a context manager. Each piece of a request waits for `delay_s` on its way. trips: how many did."""

    def __init__(self, port: int, delay_s: float) -> None:
        self.server_port, self.delay_s, self.trips = port, delay_s, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def __enter__(self) -> SlowEnd:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.server_port))
                threading.Thread(target=self._carry, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, False), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if slow:
                    self.trips += 1
                    time.sleep(self.delay_s)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
