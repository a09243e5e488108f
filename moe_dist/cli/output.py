"""What becomes of the command's own stdout and stderr where they take nothing: a reader that has left or does not read, a full disk, a closed one.

stdout has the result: what it does not take is an `OSError`, raised once, and a reader is waited for until the process is told to end. stderr
has words about it: what it does not take is dropped, and its reader is waited for `PATIENCE_S`. A rank that waited longer for somebody to turn
a page would be lost to its peers. The subcommands import this.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

PATIENCE_S = 2.0  # below any deadline that ranks are given, and long for a reader that reads
_LOOK_S = 0.1  # how soon a wait without an end learns that it has one now


class Stream(io.RawIOBase):
    """File descriptor `fd`, written as the two are. failed: what was raised, after which nothing is written any more. bounded: a reader
    is waited for PATIENCE_S and, where that was in vain, not at all until it reads again."""

    def __init__(self, fd: int, *, raises: bool) -> None:
        self.failed: OSError | None = None
        self.bounded = not raises
        self._fd, self._raises, self._late = fd, raises, False
        self._own = _without_waiting(fd)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        """All of `data` is written, dropped, or the reason why no more is."""
        rest, until = memoryview(data).cast("B"), time.monotonic() + PATIENCE_S
        try:
            while rest and self.failed is None:
                if taken := self._written(rest):
                    rest, until, self._late = rest[taken:], time.monotonic() + PATIENCE_S, False
                elif self.bounded and (self._late or time.monotonic() > until):
                    self._late = True
                    break
        except OSError as error:
            if self._raises:
                self.failed = error
                raise
        return len(data)

    def _written(self, rest: memoryview) -> int:
        """How much of `rest` was taken within _LOOK_S; at once, if the reader is late."""
        ready = select.poll()
        ready.register(self._own, select.POLLOUT)
        if not ready.poll(_LOOK_S * 1000 * (not self._late)):
            return 0
        try:
            return os.write(self._own, rest[: select.PIPE_BUF])  # a pipe that is ready takes so much
        except BlockingIOError:  # others were faster
            time.sleep(_LOOK_S * (not self._late))
            return 0

    def close(self) -> None:
        if not self.closed and self._own != self._fd:
            os.close(self._own)
        super().close()


def _without_waiting(fd: int) -> int:
    """A descriptor of the pipe or terminal `fd` that never waits: a terminal that is ready has room for one
    character, and waits for the rest. That can't be asked of `fd` itself, which other processes write, too."""
    with contextlib.suppress(OSError):  # its reader has left, or it is somebody else's
        if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return fd


@contextlib.contextmanager
def guarded() -> Iterator[Stream | None]:
    """Inside, `sys.stdout` and `sys.stderr` are as above, also for the log handlers that are there. Gives stdout's `Stream`; None: it is no file.

    One that was closed takes all and keeps nothing, and its number is no other file's: some write to the number.
    """
    for fd in range(3):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = _guard(before[0], raises=True), _guard(before[1], raises=False)
        _move_handlers(before[1], sys.stderr)
        yield stream if isinstance(stream := getattr(sys.stdout, "buffer", None), Stream) else None
    finally:
        sys.stdout, sys.stderr = before


def _guard(stream: Any, *, raises: bool) -> Any:
    if stream is None:
        return open(os.devnull, "w")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        raw = Stream(stream.fileno(), raises=raises)
    except (OSError, ValueError):  # no file
        return stream
    _drop_unwritten(stream)
    return io.TextIOWrapper(
        raw,  # which is what it is given under `python -u`
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=not raises or stream.line_buffering,
        write_through=raises and stream.write_through,
    )


def _drop_unwritten(stream: Any) -> None:
    """What a warning at some module's import has left there: the interpreter's last flush would fail on it, and end with 120."""
    try:
        stream.flush()
    except OSError:
        fd = stream.fileno()
        kept, nowhere = os.dup(fd), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, fd)
        stream.flush()
        os.dup2(kept, fd)
        os.close(kept)
        os.close(nowhere)


def _move_handlers(before: Any, now: Any) -> None:
    """Those that write to `before`, which they were given as their modules were imported: torch's."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is before is not now:
                handler.setStream(now)


def hurry() -> None:
    """The process was told to end: from now on stdout's reader is waited for as stderr's is."""
    if isinstance(stream := getattr(sys.stdout, "buffer", None), Stream):
        stream.bounded = True


def note(line: str) -> None:
    """A line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def counted(count: int, noun: str, plural: str = "") -> str:
    """As in "1 winner", "2 winners"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
