"""What all of `moe-dist` does alike: how it ends where nobody reads on."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_dist.cli.main import main
from moe_dist.stores.filesystem import FilesystemStore

UNREAD = 128 + signal.SIGPIPE


def pipe_that_nobody_reads(name: str) -> io.TextIOWrapper:
    """Buffered as the interpreter's own stream of that name is."""
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w", buffering=1 if name == "stderr" else -1)


@pytest.mark.parametrize("streams", [("stdout",), ("stdout", "stderr"), ("stderr",)])
@pytest.mark.parametrize(
    "arguments",
    [
        ["store", "ls"],  # prints, and ends with a line on stderr
        ["store", "ls", "nowhere"],  # an error's one line
        ["--help"],  # ends by an exception of its own
    ],
    ids=" ".join,
)
def test_it_ends_quietly_where_nobody_reads(
    arguments: list[str], streams: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FilesystemStore(tmp_path).put("entries/e/1", b"no entry")
    monkeypatch.setenv("MOE_DIST_STORE", str(tmp_path))
    pipes = {name: pipe_that_nobody_reads(name) for name in streams}
    for name, pipe in pipes.items():
        monkeypatch.setattr(sys, name, pipe)
    if streams == ("stdout",) and arguments[-1] == "nowhere":
        assert main(arguments) == 2  # nothing was to be printed there
    elif streams == ("stderr",) and arguments == ["--help"]:
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
    else:
        assert main(arguments) == UNREAD
    for pipe in pipes.values():
        pipe.close()  # the interpreter's last flush finds somewhere to write to


def test_another_broken_pipe_is_no_reader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> Callable[[], None]:
        raise BrokenPipeError("a server's")

    monkeypatch.setattr("moe_dist.cli.main.rank_settings", lost)
    with pytest.raises(BrokenPipeError, match="a server's"):
        main(["store", "ls"])


def test_head_takes_a_line(tmp_path: Path) -> None:
    """The whole process, into a pipe that is read once: more lines than it holds."""
    store = FilesystemStore(tmp_path)
    for number in range(2000):
        (tmp_path / "entries/e").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"entries/e/{number:04d}+value").write_bytes(b"no entry")
    assert len(store.list("entries")) == 2000
    code = "import sys; from moe_dist.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "store", "--store", str(tmp_path), "ls"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        assert listing.stdout.readline().startswith("entries/e/0000  (unreadable: ")
        listing.stdout.close()
        assert listing.stderr is not None
        said = listing.stderr.read()
        assert (listing.wait(60), said) == (UNREAD, "")
