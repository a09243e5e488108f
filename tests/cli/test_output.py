"""Real processes whose stdout or stderr takes nothing: the reader has left, the disk is full, it is closed, or nobody reads a full pipe."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_dist.cli import output
from moe_dist.cli.output import Stream, counted, guarded
from moe_dist.stores.filesystem import FilesystemStore

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import sys; from moe_dist.cli.main import main; sys.exit(main())"]
PIPE, CLOSED = subprocess.PIPE, -5  # any number that Popen has no meaning for
UNREAD = 128 + signal.SIGPIPE
WITHIN_S = 10.0  # of a signal, a process has ended: PATIENCE_S once for each stream, and the interpreter's end on a busy machine
DEADLINE_S = 120.0
pytestmark = pytest.mark.timeout(300)


def environment(**changes: str) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""} | changes


@contextlib.contextmanager
def left() -> Iterator[int]:
    """A pipe whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@contextlib.contextmanager
def full() -> Iterator[int]:
    """A disk that is full."""
    with open("/dev/full", "w") as file:
        yield file.fileno()


@contextlib.contextmanager
def closed() -> Iterator[int]:
    yield CLOSED


TAKES_NOTHING = {"reader left": left, "full disk": full, "closed": closed}


@contextlib.contextmanager
def small_pipe() -> Iterator[tuple[Callable[[], bool], int]]:
    """(whether it holds all that it can, the writer's end) of a pipe that nobody reads, of the least size."""
    read, write = os.pipe()
    size = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)

    def is_full() -> bool:
        held = bytearray(4)
        fcntl.ioctl(read, termios.FIONREAD, held)
        return int.from_bytes(held, sys.byteorder) >= size

    yield is_full, write
    os.close(read)
    os.close(write)


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    with small_pipe() as (is_full, write):
        os.write(write, bytes(4096))
        assert is_full()
        yield write


@contextlib.contextmanager
def unread_terminal() -> Iterator[int]:
    """A terminal that nobody reads, with room for less than a line: it says that it takes some."""
    (read, write), (other_read, other) = os.openpty(), os.openpty()
    os.set_blocking(other, False)
    held = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            held += os.write(other, b"x")
    for _ in range(held - 10):
        os.write(write, b"x")
    assert select.select([], [write], [], 0)[1]
    yield write
    for fd in (read, write, other_read, other):
        os.close(fd)


@contextlib.contextmanager
def started(command: list[str], *, stdout: int = PIPE, stderr: int = PIPE, **environ: str) -> Iterator[Any]:
    closing = "".join(f" {fd}>&-" for fd, given in ((1, stdout), (2, stderr)) if given == CLOSED)
    if closing:
        command = ["sh", "-c", f'exec "$@"{closing}', "sh", *command]
    streams = {name: None if fd == CLOSED else fd for name, fd in (("stdout", stdout), ("stderr", stderr))}
    process = subprocess.Popen(command, **streams, text=True, env=environment(**environ), start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(what: Callable[[], object], process: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tune(model: str, folder: Path, *more: str) -> list[str]:
    """Of buckets 1 and 2, into a store in `folder`, the results beside it."""
    return ["tune", "--device", "cpu", "--model", model, "--buckets", "1,2", "--store", str(folder / "store"), "--json", str(folder / "out.json"), *more]  # fmt: skip


def keys_of(folder: Path) -> list[str]:
    return [key["source"] for key in json.loads((folder / "out.json").read_text())["keys"]]


@pytest.mark.parametrize("state", TAKES_NOTHING)
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_no_stream_that_takes_nothing_ends_the_work_or_costs_its_results(name: str, state: str, model: str, tmp_path: Path) -> None:
    FilesystemStore(tmp_path / "listed").put("entries/e/1", b"no entry")
    commands = {
        "tune": tune(model, tmp_path),
        "doctor": ["doctor", "--store", str(tmp_path / "listed")],
        "ls": ["store", "--store", str(tmp_path / "listed"), "ls"],
        "lookup": ["bench", "lookup", "--json", str(tmp_path / "lookup.json")],
    }
    other = "stderr" if name == "stdout" else "stdout"
    ends = {}
    with TAKES_NOTHING[state]() as fd, contextlib.ExitStack() as stack:
        running = {each: stack.enter_context(started([*COMMAND, *command], **{name: fd})) for each, command in commands.items()}
        for each, process in running.items():
            said = process.communicate(timeout=DEADLINE_S)[other == "stderr"]
            ends[each] = (process.returncode, said)
    assert keys_of(tmp_path) == ["tuned"] * 2
    assert len(FilesystemStore(tmp_path / "store").list("entries")) == 2
    rows = json.loads((tmp_path / "lookup.json").read_text())["lookup"]
    code = 0 if name == "stderr" else {"reader left": UNREAD, "full disk": 1, "closed": 0}[state]
    codes = dict.fromkeys(commands, code)
    if any(row["nanoseconds"] >= 1000 for row in rows):
        codes["lookup"] = 1  # of a busy machine; what it has failed is its own code
    assert {each: ended for each, (ended, _) in ends.items()} == codes, ends
    assert not [said for _, said in ends.values() if "Traceback" in said or "Exception" in said or said.startswith("\n")], ends
    if name == "stderr":
        assert [each for each, (_, said) in ends.items() if not said.endswith("\n")] == []
        assert "kept in file:" in ends["tune"][1].splitlines()[-1]
        assert ends["ls"][1].startswith("entries/e/1  (unreadable: ")
    elif state == "full disk":
        last = "moe-dist: what is printed can't be written: No space left on device"
        assert [said.splitlines()[-1] for _, said in ends.values()] == [last] * 4


@pytest.mark.parametrize("state", TAKES_NOTHING)
def test_what_was_asked_wrongly_is_a_2_whoever_hears_it(state: str, tmp_path: Path) -> None:
    """And nothing of it goes to stdout, where somebody reads results."""
    FilesystemStore(tmp_path).put("entries/e/1", b"no entry")
    with (
        TAKES_NOTHING[state]() as fd,
        started([*COMMAND, "store", "--store", str(tmp_path), "ls", "nowhere"], stderr=fd) as process,
    ):
        assert process.communicate(timeout=DEADLINE_S)[0] == ""
        assert process.returncode == 2


# A command that logs by our logger and by one whose handler torch has made as it was imported, warns and prints.
SAYS = """
import logging, sys, warnings
warnings.warn("at an import")
from moe_dist.cli import doctor, main
def run(arguments):
    for name in ("moe_dist.stores", "torch.distributed"):
        logging.getLogger(name).warning("logged by %s", name)
    warnings.warn("amid the work")
    sys.stderr.write("a line without an end")
    print("done")
    return 0
doctor.run = run
sys.exit(main.main(["doctor"]))
"""


@pytest.mark.parametrize("state", TAKES_NOTHING)
def test_log_handlers_and_warnings_are_no_other_way_out(state: str) -> None:
    with TAKES_NOTHING[state]() as fd, started([sys.executable, "-c", SAYS], stderr=fd) as process:
        assert process.communicate(timeout=DEADLINE_S)[0] == "done\n"
        assert process.returncode == 0


@pytest.mark.parametrize("unread", [full_pipe, unread_terminal])
def test_log_handlers_and_warnings_wait_for_no_reader_that_does_not_read(unread: Callable[[], Any]) -> None:
    started_s = time.monotonic()
    with unread() as fd, started([sys.executable, "-c", SAYS.replace('warnings.warn("at an import")', "")], stderr=fd) as process:
        assert process.communicate(timeout=DEADLINE_S)[0] == "done\n"
        assert process.returncode == 0
    assert time.monotonic() - started_s < 60.0


def test_whoever_reads_gets_all_of_it_in_order() -> None:
    with started([sys.executable, "-c", SAYS]) as process:
        done, said = process.communicate(timeout=DEADLINE_S)
    assert (done, process.returncode) == ("done\n", 0)
    heard = [
        "at an import",
        "moe-dist: rank 0: logged by moe_dist.stores",
        "logged by torch.distributed",
        "amid the work",
        "a line without an end",
    ]
    assert [said.index(line) for line in heard] == sorted(said.index(line) for line in heard)


@pytest.mark.parametrize("state", ["reader left", "full disk"])
def test_a_rank_whose_summary_nobody_takes_ends_no_other_s_tuning(state: str, model: str, tmp_path: Path) -> None:
    """Of two replicas, which torchrun would end with the first code that isn't 0; as in `2>&1 | head -1`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moe_dist.tune"]
    command = [*launcher, *tune(model, tmp_path, "--dp", "2")[1:]]
    with TAKES_NOTHING[state]() as fd, started(command, stdout=fd, stderr=fd if state == "reader left" else PIPE) as process:
        said = process.communicate(timeout=DEADLINE_S)[1]
        assert process.returncode == 0, said
    assert len(keys_of(tmp_path)) == 2
    assert len(FilesystemStore(tmp_path / "store").list("entries")) == 2
    if state == "full disk":
        told = re.findall(r"^moe-dist: (replica [01]): the summary can't be printed: No space left on device$", said, re.MULTILINE)
        assert sorted(told) == ["replica 0", "replica 1"]


# -- a full pipe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 128 + signal.SIGINT)])
def test_a_signal_is_heard_while_a_listing_waits_for_its_reader(number: int, code: int, tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    for at in range(300):
        store.put(f"entries/e/{at}", b"no entry")
    command = [*COMMAND, "store", "--store", str(tmp_path), "ls"]
    with small_pipe() as (is_full, fd), started(command, stdout=fd) as process:
        until(is_full, process)
        time.sleep(0.2)
        assert process.poll() is None, "whoever reads later gets the rest"
        process.send_signal(number)
        said = process.communicate(timeout=WITHIN_S)[1]
        assert (process.returncode, said) == (code, "" if code < 0 else "moe-dist: ended by SIGINT\n")


# Line by line it waits where a benchmark has something to take away, else at the end, where the system's own handling of SIGTERM stands.
@pytest.mark.parametrize(
    ("number", "unbuffered", "code"),
    [
        (signal.SIGTERM, "1", 128 + signal.SIGTERM),
        (signal.SIGTERM, "", -signal.SIGTERM),
        (signal.SIGINT, "1", 128 + signal.SIGINT),
        (signal.SIGINT, "", 128 + signal.SIGINT),
    ],
)
def test_a_signal_is_heard_while_a_benchmark_waits_for_the_reader_of_its_table(
    number: int, unbuffered: str, code: int, tmp_path: Path
) -> None:
    command = [*COMMAND, "bench", "lookup", "--json", str(tmp_path / "out.json")]
    with full_pipe() as fd, started(command, stdout=fd, stderr=fd, PYTHONUNBUFFERED=unbuffered) as process:
        until((tmp_path / "out.json").exists, process)
        time.sleep(1.0)
        process.send_signal(number)
        process.communicate(timeout=WITHIN_S)
        assert process.returncode == code
    assert json.loads((tmp_path / "out.json").read_text())["lookup"]


# What was printed until then is in a buffer.
WAITS = """
import sys, time
from moe_dist.cli import bench, doctor, main
def waits(arguments):
    print("a result so far")
    open(sys.argv[1], "w").close()
    time.sleep(600)
bench._lookup = doctor.run = waits
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("command", "number"), [(["doctor"], signal.SIGINT), (["bench", "lookup"], signal.SIGINT), (["bench", "lookup"], signal.SIGTERM)]
)
def test_who_is_ended_amid_its_work_waits_for_nobody_to_read_what_it_has(command: list[str], number: int, tmp_path: Path) -> None:
    with full_pipe() as fd, started([sys.executable, "-c", WAITS, str(tmp_path / "waits"), *command], stdout=fd) as process:
        until((tmp_path / "waits").exists, process)
        time.sleep(0.2)
        process.send_signal(number)
        said = process.communicate(timeout=WITHIN_S)[1]
    assert (process.returncode, said) == (128 + number, f"moe-dist: ended by {signal.Signals(number).name}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_tuning_that_a_signal_ends_waits_for_nobody_to_read_its_summary(number: int, model: str, tmp_path: Path) -> None:
    """And writes what it has, before."""
    command = [*COMMAND, *tune(model, tmp_path)]
    command[command.index("1,2")] = "1:8192"
    with full_pipe() as fd, started(command, stdout=fd, stderr=fd) as process:
        until(lambda: len(FilesystemStore(tmp_path / "store").list("entries")) > 1, process)
        process.send_signal(number)
        process.communicate(timeout=WITHIN_S)
        assert process.returncode == 128 + number
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["error"] == f"ended by {signal.Signals(number).name}"
    assert len(document["keys"]) >= 1


FAILS = """
import sys
from moe_dist.cli import doctor, main
from moe_dist.errors import ConfigError
def run(arguments):
    print("a result so far")
    raise ConfigError("wrong")
doctor.run = run
sys.exit(main.main(["doctor"]))
"""


def test_a_rank_that_says_an_error_to_nobody_ends_by_itself_though_a_launcher_s_signal_is_put_off() -> None:
    here = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with full_pipe() as fd, started([sys.executable, "-c", FAILS], stdout=fd, stderr=fd, **here) as process:
        until(lambda: _hears_sigterm(process.pid), process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WITHIN_S)
        assert process.returncode == 2


def _hears_sigterm(pid: int) -> bool:
    """Whether it is not the system's to end the process."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return bool((int(status["SigCgt"], 16) | int(status["SigIgn"], 16)) >> (signal.SIGTERM - 1) & 1)


def test_progress_is_dropped_where_nobody_reads_it_and_shown_again_to_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PATIENCE_S", 0.3)
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    stream = Stream(write, raises=False)
    took = []
    for piece in (b"x" * 4096, b"waited for", b"not waited for"):
        began = time.monotonic()
        assert stream.write(piece) == len(piece)
        took.append(time.monotonic() - began)
    assert took[1] >= 0.3 > max(took[0], took[2]), took
    assert os.read(read, 8192) == b"x" * 4096
    stream.write(b"again")
    assert os.read(read, 8192) == b"again"
    assert os.get_blocking(write), "other processes write there, too"
    stream.close()
    os.close(read)
    os.close(write)


def test_room_that_another_process_takes_first_is_waited_for_and_not_in_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no signal handler is run before the reader reads."""
    with small_pipe() as (is_full, write):
        stream, ready = Stream(write, raises=False), select.poll

        class Ready:
            """Ready when it was asked, and full when it is written."""

            def __init__(self) -> None:
                self.poll_ = ready()

            def register(self, *asked: int) -> None:
                self.poll_.register(*asked)

            def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
                found = self.poll_.poll(timeout_ms)
                if not is_full():
                    os.write(write, bytes(4096))  # another rank's
                return found

        monkeypatch.setattr(output.select, "poll", Ready)
        writer = threading.Thread(target=stream.write, args=(b"a line",), daemon=True)
        writer.start()
        writer.join(10.0)
        assert not writer.is_alive()
        stream.close()


# Writes to the number 2, as libraries in C do, with a file open that would have it.
RAW = """
import os, sys
from moe_dist.cli import doctor, main
def run(arguments):
    with open(sys.argv[1], "w") as file:
        os.write(2, b"raw")
    return 0
doctor.run = run
sys.exit(main.main(["doctor"]))
"""


def test_what_is_written_to_a_closed_stderr_by_its_number_gets_into_no_file(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", RAW, str(tmp_path / "file")]
    assert subprocess.run(command, env=environment(), timeout=DEADLINE_S, check=False).returncode == 0
    assert (tmp_path / "file").read_bytes() == b""


def test_stdout_s_error_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with guarded() as stdout:
            print("lost")
            with pytest.raises(OSError, match="No space left") as raised:
                sys.stdout.flush()
            assert stdout is not None
            assert raised.value is stdout.failed
            print("lost as well", flush=True)
        assert sys.stdout is full


@pytest.mark.parametrize(("count", "said"), [(0, "0 winners"), (1, "1 winner"), (2, "2 winners")])
def test_a_count_has_its_plural(count: int, said: str) -> None:
    assert counted(count, "winner") == said


@pytest.mark.parametrize("state", ["reader left", "full disk"])
def test_all_that_was_named_is_removed_whoever_reads_what_was(state: str, tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    for key in ("entries/a/1", "entries/b/1"):
        store.put(key, b"no entry")
    command = [*COMMAND, "store", "--store", str(tmp_path), "rm", "entries/a", "entries/b"]
    with TAKES_NOTHING[state]() as fd, started(command, stdout=fd, PYTHONUNBUFFERED="1") as process:  # found at the first line
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == {"reader left": UNREAD, "full disk": 1}[state]
    assert store.list("") == []
