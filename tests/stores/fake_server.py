"""A peer that speaks Redis's protocol and says what no real server can be brought to say."""

from __future__ import annotations

import contextlib
import socket
import threading


@contextlib.contextmanager
def fake_server(answer):
    """A peer that sends `answer(words)` back for each command; words: the command's name in capitals and what follows it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(peer):
        with peer, peer.makefile("rb") as sent, contextlib.suppress(OSError):
            while head := sent.readline():
                name, *more = [sent.read(int(sent.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]
                peer.sendall(answer([name.upper(), *more]))

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
