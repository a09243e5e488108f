"""Clocks on a real GPU: what a captured candidate reads must live as long as its graph, and a lost device is no candidate's cell."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from fakes import FakeOperation, FakeProbe, tactic

from moe_dist.tuning.journal import Journal
from moe_dist.tuning.measure import CellMeasurer, journal_key
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import Bucket, Cell, Failed, ProbeSpec, Tactic, Timed

pytestmark = pytest.mark.gpu

POLICY = MeasurementPolicy("cuda_graph", window=timedelta(milliseconds=1))


class Reading(FakeOperation):
    """Its tactic reads a tensor that only the bound run holds, and leaves what it read in `self.out`."""

    def probe(self, num_tokens: int, spec: ProbeSpec) -> FakeProbe:
        return ReadingProbe(self)


class ReadingProbe(FakeProbe):
    def bind(self, wanted: Tactic) -> Callable[[int], Tactic]:
        table = torch.full((1 << 20,), 7.0, device="cuda")
        out = self.operation.out = torch.zeros(1 << 20, device="cuda")  # type: ignore[attr-defined]
        broken, waits = wanted["name"] == "broken", wanted["name"] == "waits"

        def run(index: int) -> Tactic:
            out.copy_(table)
            if waits:
                out.sum().item()
            if broken and torch.cuda.is_current_stream_capturing():
                torch._assert_async(torch.zeros((), device="cuda"))
            return wanted

        return run


def measurer(operation: FakeOperation, journal: Journal | None = None) -> CellMeasurer:
    return CellMeasurer(operation, Cell(operation.problem, "cuda_graph", Bucket(1, 1)), POLICY, ProbeSpec(), journal=journal)


def test_a_graph_keeps_what_it_reads_alive() -> None:
    operation = Reading("a", {"plain": 1.0}, device=torch.device("cuda"))
    timed = measurer(operation)
    timed.prepare([tactic("plain")])
    gc.collect()
    # Whoever allocates next gets the memory of whatever was let go.
    others = [torch.full((1 << 20,), 3.0, device="cuda") for _ in range(8)]
    assert isinstance(timed.round([tactic("plain")])[tactic("plain")], Timed)
    assert torch.equal(operation.out, torch.full((1 << 20,), 7.0, device="cuda"))  # type: ignore[attr-defined]
    assert len(others) == 8


def test_a_capture_that_fails_spoils_no_other() -> None:
    operation = Reading("a", {"plain": 1.0, "waits": 1.0, "after": 1.0}, device=torch.device("cuda"))
    timed = measurer(operation)
    names = [tactic(name) for name in ("plain", "waits", "after")]
    timed.prepare(names)
    measured = timed.round(names)
    assert isinstance(measured[names[0]], Timed)
    failed = measured[names[1]]
    assert isinstance(failed, Failed)
    assert "captur" in failed.reason
    assert isinstance(measured[names[2]], Timed), measured[names[2]]


BREAK = """
import sys, torch
from pathlib import Path
from test_measure_gpu import Reading, measurer
from fakes import tactic
from moe_dist.errors import DeviceLost
from moe_dist.tuning.journal import Journal
from moe_dist.tuning.measure import journal_key

operation = Reading("a", {"broken": 1.0}, device=torch.device("cuda"))
timed = measurer(operation, Journal(Path(sys.argv[1]), "ab"))
try:
    timed.prepare([tactic("broken")])
except DeviceLost as error:
    print("lost:", error)
"""


def test_a_lost_device_ends_the_process_and_counts_as_a_death(tmp_path: Path) -> None:
    here = Path(__file__).parent
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n{BREAK}", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
        assert "lost: cuda is lost to this process" in done.stdout, done.stderr[-2000:]
    operation = Reading("a", {"broken": 1.0}, device=torch.device("cuda"))
    cell = Cell(operation.problem, "cuda_graph", Bucket(1, 1))
    reason = Journal(tmp_path, "ab").quarantined().get(journal_key(cell, tactic("broken")))
    assert reason is not None
    assert "was running when its process died" in reason
