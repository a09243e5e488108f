"""The stores' benchmark gives its rows for every durable store and leaves nothing behind. How fast is for the benchmark to say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from redis_server import RedisServer

from moe_dist.bench.persistence import LIMITS_S, stores_table
from moe_dist.cli.main import main
from moe_dist.errors import StoreError
from moe_dist.stores.open import open_store


def test_rows_for_each_store_and_nothing_left_behind(tmp_path):
    with RedisServer(password="hidden") as server:
        urls = [
            str(tmp_path / "one"),
            f"redis://:hidden@127.0.0.1:{server.port}?timeout=20",
            f"layered:{tmp_path}/two,unix://:hidden@{server.socket}?timeout=20",
        ]
        rows = list(stores_table(urls, entries=20, winners=8, repeats=2))
        assert [(row["store"], row["what"], row["count"]) for row in rows] == [
            (store, what, count)
            for store in ("file", "redis", "layered")
            for what, count in (("attach", 20), ("reload", 8), ("first reload", 8))
        ]
        assert all(0 < row["median_s"] <= row["worst_s"] for row in rows)
        assert all((row["limit_s"], row["holds"]) == (LIMITS_S[row["what"]][1], row["median_s"] < row["limit_s"]) for row in rows)
        assert all(open_store(url).list("") == [] for url in urls)


SMALL = ["--entries", "20", "--winners", "8", "--repeats", "1"]


def test_the_command_writes_its_rows_and_no_place(tmp_path, capsys):
    """That it runs; how long it takes is the benchmark's to say, on a machine that is not busy with tests."""
    code = main(["bench", "stores", str(tmp_path / "store"), *SMALL, "--json", str(tmp_path / "stores.json")])
    said = capsys.readouterr().err
    assert "the bars are of 10000 entries and 1000 winners\n" in said, "a smaller size that was asked for is no failure"
    assert " of 20, not " not in said
    assert code == ("; the bar is " in said)
    text = (tmp_path / "stores.json").read_text()
    assert json.loads(text)["command"] == "moe-dist bench stores file --entries=20 --winners=8 --repeats=1"
    assert [(row["what"], row["count"]) for row in json.loads(text)["stores"]] == [("attach", 20), ("reload", 8), ("first reload", 8)]
    assert str(tmp_path) not in text
    assert [path.name for path in tmp_path.iterdir()] == ["stores.json"], "the store was not there before"


def test_a_store_that_is_there_is_left_as_it_was(tmp_path):
    for folder in ("local/entries/e", "shared"):
        (tmp_path / folder).mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    list(stores_table([f"layered:{tmp_path}/local,{tmp_path}/shared"], entries=2, winners=1, repeats=1))
    assert set(tmp_path.rglob("*")) == before


def test_a_size_of_nothing_is_refused(tmp_path, capsys):
    assert main(["bench", "stores", str(tmp_path / "store"), "--entries", "0"]) == 2
    assert "argument --entries: '0' is no integer of at least 1" in capsys.readouterr().err


# Of one entry the benchmark soon comes to reloading, which goes on for minutes; of many it is attaching for as long.
@pytest.mark.parametrize(("during", "entries", "repeats"), [("attach", 500, 1_000_000), ("reload", 1, 600)])
def test_a_benchmark_that_is_ended_leaves_nothing_behind(during, entries, repeats):
    """Neither keys, whether of entries or of an epoch, nor a folder."""
    code = "import sys; from moe_dist.cli.main import main; sys.exit(main())"
    sizes = ["--entries", str(entries), "--winners", "100", "--repeats", str(repeats)]
    # Short: multiprocessing keeps sockets there, whose paths have at most 107 characters.
    with (
        tempfile.TemporaryDirectory() as temporary,
        RedisServer() as server,
        open_closing(f"unix://{server.socket}?timeout=20") as store,
    ):
        command = [sys.executable, "-c", code, "bench", "stores", store.url.replace("?", "?timeout=20&"), *sizes]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": temporary}) as bench:
            try:
                until = time.monotonic() + 120
                while len(store.list("bench" if during == "attach" else "epochs")) < 1 and time.monotonic() < until:
                    time.sleep(0.01)
                bench.send_signal(signal.SIGTERM)
                said = bench.communicate(timeout=60)[1]
            finally:
                bench.kill()
        assert store.list("") == []
        assert list(Path(temporary).glob("moe-dist-*")) == []
    assert (bench.returncode, said) == (128 + signal.SIGTERM, "moe-dist: ended by SIGTERM\n")


# Killed or stopped while its entries are attached, and while an epoch is reloaded: what was measured before is kept.
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("during", "entries", "repeats", "kept"), [("attach", 500, 1_000_000, 0), ("reload", 1, 600, 1)])
def test_a_server_that_goes_away_ends_the_command_with_a_line_and_the_rows_before_it(how, during, entries, repeats, kept, tmp_path):
    code = "import sys; from moe_dist.cli.main import main; sys.exit(main())"
    sizes = ["--entries", str(entries), "--winners", "100", "--repeats", str(repeats), "--json", str(tmp_path / "stores.json")]
    with RedisServer() as server, server.client() as client:
        url = f"redis://127.0.0.1:{server.port}/0"
        command = [sys.executable, "-c", code, "bench", "stores", f"{url}?timeout=1", *sizes]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as bench:
            try:
                until = time.monotonic() + 120
                wanted = "moe_dist:{bench/*" if during == "attach" else "moe_dist:{epochs/*"
                while not any(client.scan_iter(wanted, count=1000)) and time.monotonic() < until:
                    time.sleep(0.01)
                server.send(how)
                said = bench.communicate(timeout=60)[1]
            finally:
                bench.kill()
    said = said.replace("the bars are of 10000 entries and 1000 winners\n", "")
    assert bench.returncode == 1, said
    assert said.startswith(f"moe-dist bench: {'a reload from ' if during == 'reload' else ''}store {url} "), said
    assert said.endswith(
        f"; {kept} row{'s' * (kept != 1)} before it {'are' if kept != 1 else 'is'} in {tmp_path}/stores.json; see that it runs, then run this again\n"
    )
    assert said.count("\n") == 1
    held = json.loads((tmp_path / "stores.json").read_text())
    assert [row["what"] for row in held["stores"]] == ["attach"] * kept
    assert held["incomplete"] in said


@contextlib.contextmanager
def open_closing(url):
    store = open_store(url)
    yield store
    store.close()


def test_a_store_that_takes_no_writes_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="takes no writes: "):
        list(stores_table([str(tmp_path / "file")], entries=2, winners=1, repeats=1))
    with pytest.raises(StoreError, match="memory: takes no writes: it is not durable"):
        list(stores_table(["memory:"], entries=2, winners=1, repeats=1))
