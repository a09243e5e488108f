"""What all of `moe-dist` does alike: how it ends where nobody reads on, and which rank says an error."""

from __future__ import annotations

import errno
import io
import json
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
COMMAND = [sys.executable, "-c", "import sys; from moe_dist.cli.main import main; sys.exit(main())"]


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
    if arguments[-1] == "nowhere":
        assert main(arguments) == 2  # nothing was to be printed on stdout, and what it was is no less true where nobody hears it
    elif streams == ("stderr",) and arguments == ["--help"]:
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
    else:
        assert main(arguments) == (0 if streams == ("stderr",) else UNREAD)
    for pipe in pipes.values():
        pipe.close()  # the interpreter's last flush finds somewhere to write to


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frob", "tune"], "unknown flag --frob; moe-dist --help lists what there is"),
        (["store", "--stroe", "x", "ls"], "unknown flag --stroe; did you mean --store?; moe-dist store --help lists what there is"),
        (["store", "ls", "--stroe=x"], "unknown flag --stroe; did you mean --store?; moe-dist store ls --help lists what there is"),
        (["store", "--store", "x", "show", "--sore"], "unknown flag --sore; did you mean --store?; moe-dist store show --help lists what there is"),
        (["tune", "--model", "m", "--budget", "-1"], "argument --budget: '-1' is no number of seconds above 0; moe-dist tune --help lists what there is"),
    ],
)  # fmt: skip
def test_an_unknown_flag_is_named_by_the_parser_whose_it_would_be(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"moe-dist: {message}\n"


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ("tune --model m", "", "tune"),
        ("doctor", "", "doctor"),
        ("store", "ls", "store"),
        ("store ls", "", "store ls"),
        ("bench vllm", "", "bench vllm"),
    ],
)
def test_an_empty_store_is_not_the_default_one(before: str, after: str, where: str, empty: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a script's variable gives that is not set."""
    assert main([*before.split(), f"--store={empty}", *after.split()]) == 2
    said = "argument --store: it is empty; name a folder or URL, or leave the flag out for the default store"
    assert capsys.readouterr().err == f"moe-dist: {said}; moe-dist {where} --help lists what there is\n"


def test_who_asks_for_help_gets_it_whatever_else_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["tune", "--modle", "x", "--help"])
    assert "--model" in capsys.readouterr().out


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
    command = [*COMMAND, "store", "--store", str(tmp_path), "ls"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        assert listing.stdout.readline().startswith("entries/e/0000  (unreadable: ")
        listing.stdout.close()
        assert listing.stderr is not None
        said = listing.stderr.read()
        assert (listing.wait(60), said) == (UNREAD, "")


@pytest.mark.parametrize("unbuffered", ["1", ""])  # found at the first line, or at the last flush
def test_a_full_disk_under_stdout_is_one_line(unbuffered: str, tmp_path: Path) -> None:
    FilesystemStore(tmp_path).put("entries/e/1", b"no entry")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*COMMAND, "store", "--store", str(tmp_path), "ls"],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120,
        )  # fmt: skip
    assert ended.stderr.splitlines()[-1] == "moe-dist: what is printed can't be written: No space left on device"
    assert (ended.returncode, len(ended.stderr.splitlines()) - (unbuffered == "")) == (1, 1), "beside what `ls` says on stderr at its end"


def test_tune_has_written_its_results_before_nobody_reads_on(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, pipe = tmp_path / "results.json", pipe_that_nobody_reads("stdout")
    monkeypatch.setattr(sys, "stdout", pipe)
    asked = ["--model", model, "--device", "cpu", "--buckets", "1", "--store", "memory:", "--json", str(results)]
    assert main(["tune", *asked]) == UNREAD
    pipe.close()
    assert len(json.loads(results.read_text())["keys"]) == 1


def test_another_full_disk_is_not_stdout_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Callable[[], None]:
        raise OSError(errno.ENOSPC, "another file's")

    monkeypatch.setattr("moe_dist.cli.main.rank_settings", full)
    with pytest.raises(OSError, match="another file's"):
        main(["store", "ls"])


def test_a_rank_says_what_only_it_has_found_and_the_first_of_a_host_in_any_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(1 + os.getpid() % 65535)}  # ranks of no other run
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    for rank, said in (("1", "moe-dist: rank 1: unrecognized"), ("0", "moe-dist: unrecognized")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        for _ in range(2):  # to whoever has said it this process is no other
            assert main(["store", "ls", "entries", "stray"]) == 2
            assert capsys.readouterr().err == f"{said} arguments: stray; moe-dist store ls --help lists what there is\n"
    first, other = "moe-dist: unrecognized arguments: stray", "moe-dist: rank 1: unrecognized arguments: other"
    for rank, told, said in ((1, "stray", ""), (0, "stray", first), (1, "other", other)):
        ended = subprocess.run(
            [*COMMAND, "store", "ls", "entries", told],
            env=os.environ | here | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 2
        assert ended.stderr.partition(";")[0] == said
