"""How compute-sanitizer's words are read, and its cases under Triton's interpreter; test_sanitizer_gpu.py runs them under the tool itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from sanitizer import Said, known_pairs, run_cases

RACES = """\
COMPUTE-SANITIZER
Error: Race reported between Read access at product_kernel+0x1b0 in hopper.py:286
and Write access at product_kernel+0x90 in /src/kernels/moe_dist_kernels/hopper.py:286 [96 hazards]
and Write access at product_kernel+0x40 in hopper.py:345 [8 hazards]

Warning: Race reported between Write access at 0x278 in /src/a b/hopper_tiles.py:137:product_kernel
and Read access at 0x298 in /src/a b/hopper_tiles.py:140:product_kernel [6144 hazards]

RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_races_are_read_two_by_two() -> None:
    """Both ways in which versions of the tool name a place; several accesses that race with one."""
    assert Said(0, RACES, "").pairs() == {
        frozenset({"Read hopper.py:286", "Write hopper.py:286"}),
        frozenset({"Read hopper.py:286", "Write hopper.py:345"}),
        frozenset({"Write hopper_tiles.py:137", "Read hopper_tiles.py:140"}),
    }
    assert Said(0, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "").pairs() == set()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("RACECHECK SUMMARY: 2", "RACECHECK: 2", "no RACECHECK SUMMARY"),  # ended before its end
        ("SUMMARY: 2", "SUMMARY: 3", "2 reports could be read"),
        ("Race reported", "A race", "half a report"),
        ("COMPUTE-SANITIZER", "17 errors were not printed. Use --print-limit", "not printed"),
    ],
)
def test_what_can_not_be_read_is_a_failure(old: str, new: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        Said(0, RACES.replace(old, new), "").pairs()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hopper.py:345", "hopper.py:346"),
        (" in hopper.py:345", ""),  # no place is no known place
        ("and Write access at product_kernel+0x40", "and Read access at product_kernel+0x40"),
        ("hopper_tiles.py:140", "hopper.py:140"),
    ],
)
def test_another_race_is_not_a_known_one(old: str, new: str) -> None:
    known = Said(0, RACES, "").pairs()
    assert len(Said(0, RACES.replace(old, new), "").pairs() - known) == 1


def test_known_pairs_stand_in_the_source() -> None:
    """Each in one line of today's files; the first access of each kind reads, the other writes."""
    pairs = known_pairs()
    assert len(pairs) == 4
    assert all(sorted(access.split()[0] for access in pair) == ["Read", "Write"] for pair in pairs)


TOOL = """\
#!/bin/sh
# Runs its child, as the tool does, and finds nothing.
while [ "$1" != {python} ]; do shift; done
"$@"; rc=$?
echo "========= ERROR SUMMARY: 0 errors"
exit $rc
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same cases run on the GPU, under the tool")
def test_the_cases_are_right_under_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child, started as for the GPU, by a tool that only runs it."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(TOOL.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = run_cases(["--tool", "memcheck"], "all", "--interpreted", timeout_s=280)
    assert said.rc == 0, said.child
    assert said.count("ERROR SUMMARY") == 0
    assert "15 of 15 cases right, 0 specialised" in said.child, said.child
