"""The scaling table is made of what ranks really say, and a rank's work does not grow with the number of ranks that agree."""

from __future__ import annotations

from moe_dist.bench import scaling


def test_rows_are_measured_by_processes_and_by_simulation() -> None:
    rows = scaling.scaling_table([2, 64], [20])
    assert [(row["ranks"], row["keys"], row["how"]) for row in rows] == [(2, 20, "processes"), (64, 20, "simulated")]
    few, many = rows
    assert few["word_bytes"] == many["word_bytes"] > 20 * len(scaling.HIT)
    # Equal words are published once: a bundle grows by a byte or two a rank and step.
    assert many["bundle_bytes"] - few["bundle_bytes"] < 62 * scaling.STEPS * 2 + 20
    assert many["server_bytes"] == 64 * (many["word_bytes"] + many["bundle_bytes"])
    assert all(row["seconds"] >= 0 and row["reload_seconds"] >= 0 for row in rows)
    assert all(row["epoch_bytes"] > 20 * len(scaling.HIT) for row in rows)
