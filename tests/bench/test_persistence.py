"""The stores' benchmark gives its rows for every durable store and leaves nothing behind. How fast is for the benchmark to say."""

from __future__ import annotations

import json

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
        rows = stores_table(urls, entries=20, winners=8, repeats=3)
        assert [(row["store"], row["what"], row["count"]) for row in rows] == [
            (store, what, count) for store in ("file", "redis", "layered") for what, count in (("attach", 20), ("reload", 8))
        ]
        assert all(0 < row["median_s"] <= row["worst_s"] for row in rows)
        assert all((row["limit_s"], row["holds"]) == (LIMITS_S[row["what"]][1], row["median_s"] < row["limit_s"]) for row in rows)
        assert all(open_store(url).list("") == [] for url in urls)


def test_the_command_writes_its_rows_and_no_place(tmp_path, monkeypatch, capsys):
    """That it runs; how long it takes is the benchmark's to say, on a machine that is not busy with tests."""
    monkeypatch.setattr("moe_dist.cli.bench.stores_table", lambda urls, note: stores_table(urls, entries=20, winners=8, repeats=1))
    code = main(["bench", "stores", str(tmp_path / "store"), "--json", str(tmp_path / "stores.json")])
    assert code == 1
    assert "attach from file: of 20, not 10000" in capsys.readouterr().err
    text = (tmp_path / "stores.json").read_text()
    assert json.loads(text)["command"] == "moe-dist bench stores file"
    assert [row["what"] for row in json.loads(text)["stores"]] == ["attach", "reload"]
    assert str(tmp_path) not in text


def test_a_store_that_takes_no_writes_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="takes no writes: "):
        stores_table([str(tmp_path / "file")], entries=2, winners=1, repeats=1)
    with pytest.raises(StoreError, match="memory: takes no writes: it is not durable"):
        stores_table(["memory:"], entries=2, winners=1, repeats=1)
