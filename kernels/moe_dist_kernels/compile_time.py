"""Arithmetic on constants, which kernels do while they are compiled. Knows no kernel; kernels and their launchers import it.

Ours, and not `triton`'s own: another package of the process may replace those. SGLang puts a plain function in the place of
`triton.next_power_of_2`, and no kernel that calls it by that name compiles after that.
"""

# Compiled by Triton: no Python types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton


@triton.constexpr_function
def power_of_2(least: int) -> int:
    """The least power of two that is no less than `least`, which is at least 1."""
    return 1 << (least - 1).bit_length()
