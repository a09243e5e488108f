"""The scaling table is made of what ranks really say: what is simulated is what real ranks' rendezvous counts."""

from __future__ import annotations

import pytest

from moe_dist.bench import scaling
from moe_dist.bench.scaling import CASES, COLD, HIT_BYTES, WARM

KEYS = 60


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 5])  # the leader and one; more than a power of two, of which two are cold
def test_what_is_simulated_is_what_real_ranks_send(size: int, case: str) -> None:
    counted, _ = scaling.run_processes(size, KEYS, case)
    simulated, _ = scaling.simulate(size, KEYS, case)
    assert (simulated.said, simulated.read) == (counted.said, counted.read)
    assert simulated.requests <= counted.requests, "a rank that waits long looks at its peers, too"


def test_ranks_that_hold_the_same_send_no_entry_however_many_keys() -> None:
    few, many = (scaling.simulate(64, keys, WARM)[0] for keys in (100, 300))  # answers are long words, too
    assert (few.said, few.read, few.requests) == (many.said, many.read, many.requests)


def test_a_cold_host_costs_its_entries_and_an_offer_for_each_rank() -> None:
    traffic, _ = scaling.simulate(64, KEYS, COLD)
    entries = KEYS * HIT_BYTES
    assert min(traffic.read[56:]) > entries, "eight cold ranks read the entries"
    assert max(traffic.read[1:56]) < entries / 5, "the others read an offer without them"
    assert entries < traffic.said[0] < 2 * entries, "the first that holds them sends them once"


def test_a_round_of_timing_costs_the_same_for_each_rank() -> None:
    assert scaling.round_bytes(4096) / 4096 == pytest.approx(scaling.round_bytes(64) / 64, rel=0.1)


def test_rows_are_measured_by_processes_and_by_simulation() -> None:
    rows = scaling.scaling_table([2, 64], [20])
    assert [(row["ranks"], row["keys"], row["case"], row["how"]) for row in rows] == [
        (size, 20, case, how) for size, how in ((2, "processes"), (64, "simulated")) for case in CASES
    ]
    for row in rows:
        assert row["network_seconds"] == round(row["server_bytes"] * 8 / 10e9, 4)
        assert min(row["seconds"], row["reload_seconds"]) >= 0
        assert row["epoch_bytes"] > 20 * HIT_BYTES
