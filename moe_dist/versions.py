"""What code runs in this process: releases of installed packages, and digests of sources.

Owns how both are read. What follows from them is said elsewhere: a result's environment in `tuning/identity.py`, what a group's
ranks must have alike in `distributed/group.py`. Imports nothing of ours.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path


@functools.cache
def release_of(distribution: str) -> str:
    """The installed release of `distribution`, "absent" where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def digest_of_sources(roots: Iterable[Path]) -> str:
    """32 hexadecimal digits over the names and bytes of all Python files below `roots`."""
    total = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:32]


@functools.cache
def code_version() -> str:
    """Our release, and a digest of the rooms whose words ranks exchange and conclude from: what a group's ranks must have alike."""
    here = Path(__file__).parent
    return f"{release_of('moe-dist')}+{digest_of_sources([here / 'distributed', here / 'tuning', here / 'stores'])[:8]}"
