"""What compute-sanitizer says, read strictly: what can't be read is a failure, never silence. Knows no test and needs no GPU."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
KERNELS = ROOT / "kernels/moe_dist_kernels"
CASES = FOLDER / "sanitizer_cases.py"
Pair = frozenset[str]  # of accesses, each "Read" or "Write", its file's name and line: "Read hopper.py:286"


@dataclasses.dataclass(frozen=True)
class Said:
    """One run. tool: the tool's lines; child: the child's; rc: the child's exit status, or the tool's own if that was 0."""

    rc: int
    tool: str
    child: str

    def count(self, summary: str) -> int:
        """The number in the last line: of "ERROR SUMMARY" (memcheck) or "RACECHECK SUMMARY". AssertionError: there is none, or some went unprinted."""
        found = re.findall(rf"^{summary}: (\d+) (?:error|hazard)", self.tool, re.MULTILINE)
        assert len(found) == 1, f"no {summary}: the tool did not watch to the end\n{self.tool[-3000:]}\n{self.child[-3000:]}"
        assert "not printed" not in self.tool, self.tool[-3000:]
        return int(found[0])

    def pairs(self) -> set[Pair]:
        """The accesses that race by racecheck's analysis, two by two. AssertionError: one without file and line, or fewer than were counted."""
        found, reports, first = set(), 0, None
        for line in self.tool.splitlines():
            first = first if line.startswith("and ") else None  # what else may stand between ends a report
            for kind, place in re.findall(r"\b(\w+) access at (.*?)(?= and \w+ access at |$)", line):
                at = re.search(r"([^\s/:]+\.\w+):(\d+)(?=[\s:]|$)", place)
                access = f"{kind} {at[1]}:{at[2]}" if at else f"{kind} somewhere in {place}"
                if "Race reported between" in line and first is None:
                    first, reports = access, reports + 1
                else:
                    assert first is not None, f"half a report: {line}"
                    found.add(frozenset({first, access}))
        assert reports == self.count("RACECHECK SUMMARY"), f"{reports} reports could be read\n{self.tool[-3000:]}"
        return found


def run(tool: list[str], child: list[str], *, timeout_s: float) -> Said:
    """`child` under compute-sanitizer with the options `tool`. Each tensor is an allocation of its own, whose end the tool knows."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        # Compilers, which the child starts, need no watching.
        ["compute-sanitizer", "--target-processes", "application-only", *tool, *child],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = (done.stdout + "\n" + done.stderr).splitlines()
    marked = [re.sub(r"^=+ *", "", line) for line in lines if line.startswith("=====")]
    return Said(done.returncode, "\n".join(marked), "\n".join(line for line in lines if not line.startswith("=====")))


def run_cases(tool: list[str], which: str, *options: str, timeout_s: float = 150.0) -> Said:
    """The cases of sanitizer_cases.py."""
    return run(tool, [sys.executable, str(CASES), which, *options], timeout_s=timeout_s)


def known_pairs() -> set[Pair]:
    """What racecheck reports of the warp-specialised products, wrongly (docs/kernels.md says why), by the lines where that stands today."""

    def line(file: str, text: str) -> str:
        found = [number for number, line in enumerate((KERNELS / file).read_text().splitlines(), 1) if text in line]
        assert len(found) == 1, f"{text!r} stands in lines {found} of {file}"
        return f"{file}:{found[0]}"

    start, specialise = line("hopper.py", "def product_kernel("), line("hopper.py", "gl.warp_specialize(")
    return {
        # Which function a warp runs: the compiler's bytes.
        frozenset({f"Read {start}", f"Write {start}"}),
        frozenset({f"Read {start}", f"Write {specialise}"}),
        # The maxima of a tile of few rows.
        frozenset({"Read " + line("hopper_tiles.py", "1 - half).load("), "Write " + line("hopper_tiles.py", ".store(most)")}),
        # A tile's number.
        frozenset({"Read " + line("hopper.py", "(turn % RING).load("), "Write " + line("hopper.py", "(turn % RING).store(")}),
    }
