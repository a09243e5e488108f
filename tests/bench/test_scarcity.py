"""What runs out for one process really does, and for nobody else."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Rank, run_ranks

from moe_dist.bench import scarcity

KIB = 1 << 10


def fills_its_disk(rank: Rank, folder: Path, user: int) -> Any:
    """Rank 0 alone has a small one: (bytes it took, bytes a second time, what lies there, whose it is)."""
    if user != os.getuid():
        os.setuid(user)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as a process that was started by this user
    if rank.index == 0:
        scarcity.mount_small_disk(folder, 64 * KIB)
        taken, again = scarcity.fill_disk(folder), scarcity.fill_disk(folder)
        with pytest.raises(OSError, match="No space left on device"):
            (folder / "more").write_bytes(b"1")
        rank.mark("full")
        return taken, again, (folder / "kept/value").read_text(), os.getuid()
    rank.wait("full")
    (folder / "more").write_bytes(b"1")
    return (folder / "filler").exists()


# Whoever is not root has the mount in a user namespace.
@pytest.mark.parametrize("nobody", [False, True])
def test_a_small_disk_is_full_for_the_process_that_mounted_it_alone(nobody: bool, small_disks: None) -> None:
    if nobody and os.getuid():
        pytest.skip("only root can become somebody else; the other case ran in a user namespace")
    user = 65534 if nobody else os.getuid()
    with tempfile.TemporaryDirectory() as name:  # which others may enter, unlike pytest's
        folder = Path(name, "disk")
        (folder / "kept").mkdir(parents=True)
        (folder / "kept/value").write_text("as before")
        for path in (Path(name), folder, folder / "kept"):
            path.chmod(0o777)
        first, second = run_ranks(fills_its_disk, 2, Path(name), folder, user)
        if nobody and first.error == "PermissionError":
            pytest.skip(f"no user namespaces here: {first.message}")
        assert (first.error, second.error) == ("", ""), (first, second)
        taken, again, kept, ran_as = first.value
        assert 32 * KIB < taken < 64 * KIB
        assert (again, kept, ran_as) == (0, "as before", user)
        assert second.value is False, "the other rank saw the first one's disk"
        assert (folder / "more").read_bytes() == b"1"


def test_a_disk_that_does_not_fill_is_no_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarcity, "_PAGE", 32 << 20)
    with pytest.raises(AssertionError, match="took 67108864 bytes and is not full"):
        scarcity.fill_disk(tmp_path)


def runs_out(rank: Rank, how: str) -> None:
    if how == "torch":
        scarcity.limit_memory()
        torch.empty(scarcity.ROOM_BYTES // 4, dtype=torch.uint8)  # what a rank needs to go on is there
        torch.empty(scarcity.BEYOND_BYTES, dtype=torch.uint8)
    else:
        scarcity.exhaust_memory()


@pytest.mark.parametrize(("how", "error", "message"), [("torch", "RuntimeError", "can't allocate memory"), ("python", "MemoryError", "")])
def test_memory_runs_out_by_the_allocation_that_finds_no_room(how: str, error: str, message: str, tmp_path: Path) -> None:
    (outcome,) = run_ranks(runs_out, 1, tmp_path, how)
    assert outcome.error == error
    assert message in outcome.message
