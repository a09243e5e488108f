"""Disks and memory that really run out, for the process that asks for it and for no other. bench and tests import this.

Whatever is done here goes with the process: a mount lies in a namespace of its own, a limit is the process's. Linux alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import NoReturn

from moe_dist.bench.ranks import Rank, run_ranks

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # linux/sched.h
_RECURSIVE_PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE of linux/mount.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE = 4096
ROOM_BYTES = 512 << 20  # of address space that a limited process has left: for threads and buffers, not for a `BEYOND_BYTES`
BEYOND_BYTES = 4 * ROOM_BYTES


def mount_small_disk(folder: Path, nbytes: int) -> None:
    """A file system of `nbytes` over `folder`, with what lies there, seen by this process alone.

    Call it before the process has a second thread: who is not root needs a user namespace, which only a single thread may enter.
    OSError: this machine does not allow it.
    """
    _enter_mount_namespace()
    _call("mount", None, b"/", None, _RECURSIVE_PRIVATE, None)
    with tempfile.TemporaryDirectory() as kept:
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=%d" % nbytes)
        shutil.copytree(kept, folder, dirs_exist_ok=True)


def why_no_small_disk() -> str | None:
    """Why no process of this user may mount one; None: it may."""
    with tempfile.TemporaryDirectory() as folder:
        (tried,) = run_ranks(_mount_in_passing, 1, Path(folder))
    return f"{tried.error}: {tried.message}" if tried.error else None


def _mount_in_passing(rank: Rank) -> None:
    folder = rank.folder / "disk"
    folder.mkdir()
    mount_small_disk(folder, 1 << 16)


def fill_disk(folder: Path) -> int:
    """Write to a file in `folder` until the disk is full; how many bytes it took. AssertionError: it never was."""
    taken, limit = 0, 64 << 20
    with open(folder / "filler", "ab", buffering=0) as file:
        while taken < limit:
            try:
                taken += file.write(bytes(_PAGE))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return taken
    raise AssertionError(f"{folder} took {taken} bytes and is not full: it is no small disk")


def limit_memory(room_bytes: int = ROOM_BYTES) -> None:
    """Allocations of this process fail once it has `room_bytes` of address space more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def exhaust_memory() -> NoReturn:
    """Allocate up to a limit, and beyond: MemoryError, by the allocation that found no room."""
    limit_memory()
    held = []
    while True:
        held.append(bytearray(ROOM_BYTES // 8))


def _enter_mount_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        try:
            _call("unshare", _NEW_MOUNTS)
            return
        except PermissionError:
            pass  # root of a container, without the capability
    _call("unshare", _NEW_MOUNTS | _NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
