"""The stores' benchmark gives its rows for every durable store and leaves nothing behind. How fast is for the benchmark to say."""

from __future__ import annotations

import pytest
from redis_server import RedisServer

from moe_dist.bench.persistence import measure_stores
from moe_dist.errors import StoreError
from moe_dist.stores.open import open_store


def test_rows_for_each_store_and_nothing_left_behind(tmp_path):
    with RedisServer() as server:
        urls = [
            str(tmp_path / "one"),
            f"redis://127.0.0.1:{server.port}?timeout=20",
            f"layered:{tmp_path}/two,unix://{server.socket}?timeout=20",
        ]
        rows = measure_stores(urls, entries=20, winners=8, repeats=2)
        assert [(row["store"], row["what"], row["count"]) for row in rows] == [
            (store, what, count) for store in ("file", "redis", "layered") for what, count in (("attach", 20), ("reload", 8))
        ]
        assert all(0 < row["median_s"] <= row["worst_s"] for row in rows)
        assert all(open_store(url).list("") == [] for url in urls)


def test_a_store_that_takes_no_writes_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="takes no writes: "):
        measure_stores([str(tmp_path / "file")], entries=2, winners=1, repeats=1)
    with pytest.raises(StoreError, match="memory: takes no writes: it is not durable"):
        measure_stores(["memory:"], entries=2, winners=1, repeats=1)
