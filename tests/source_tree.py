"""Source files that have just the names that a plugin needs, for tests of what it says when one is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_dist.interop.source import Need


def tree(root: Path, needs: Sequence[Need]) -> Path:
    """`root`, filled with them."""
    modules: dict[str, dict[str, list[str]]] = {}
    for need in needs:
        owner, _, member = need.symbol.rpartition(".")
        line = f"def {member}({', '.join(need.parameters)}): ..." if need.parameters else f"{member} = None"
        modules.setdefault(need.module, {}).setdefault(owner, []).append(line)
    for module, owners in modules.items():
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for owner, members in owners.items():
            lines += [f"class {owner}:", *(f"    {line}" for line in members)] if owner else members
        path.write_text("\n".join(lines))
    return root
