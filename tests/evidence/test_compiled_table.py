"""The kept table of what every kernel variant takes of Hopper and Blackwell: whole, and still true where a sample is compiled again.

Made anew, without a card, by `moe-dist bench kernels --compile-only --json docs/evidence/kernels-compiled.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import triton
from moe_dist_kernels import ahead, is_interpreted

from moe_dist.backends.triton import kernel_variants
from moe_dist.bench.kernel_inputs import SHAPES, TOKENS

pytestmark = pytest.mark.skipif(is_interpreted(), reason="interpreted kernels can't be compiled")
TABLE = json.loads((Path(__file__).parents[2] / "docs/evidence/kernels-compiled.json").read_text())
ROWS: list[dict[str, Any]] = TABLE["compiled"]
SHARED_LIMIT = 232448  # bytes that one block may take, on both
TAKEN = ("registers", "local_bytes", "shared_bytes", "matrix_unit")
SHAPE, ARCHS = SHAPES[0], (90, 100)


def label(row: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name not in (*TAKEN, "reason")}, sort_keys=True)


def variants(dtype: str, arch: int) -> dict[str, tuple[ahead.Variant, str]]:
    problem = SHAPE.problem(dtype, max_num_tokens=max(TOKENS))
    rows, work = kernel_variants(problem, problem.ladder.buckets(), arch)
    return {label({"shape": SHAPE.name, "dtype": dtype} | row): made for row, made in zip(rows, work, strict=True)}


@pytest.mark.parametrize("dtype", SHAPE.dtypes)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_is_in_the_table_once_and_fits(dtype: str, arch: int) -> None:
    kept = [row for row in ROWS if (row["dtype"], row["arch"]) == (dtype, arch)]
    assert sorted(map(label, kept)) == sorted(variants(dtype, arch)), "make the table anew: " + TABLE["command"]
    for row in kept:
        assert "reason" not in row, row
        assert row["shared_bytes"] <= SHARED_LIMIT, row
        assert row["registers"] <= 255, row


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_compiled_again_takes_no_more_than_the_table_says(arch: int) -> None:
    """A sample: for each product the variant with most in local memory, which is where spilled registers go, else most registers."""
    assert TABLE["versions"]["triton"] == triton.__version__, "the table is of another compiler: make it anew"
    sample: dict[tuple[str, str], dict[str, Any]] = {}
    for row in ROWS:
        if row["arch"] == arch and row["kernel"] in ("up_kernel", "down_kernel", "decode_down_kernel", "product_kernel"):
            worst = sample.get((row["dtype"], row["kernel"]))
            if worst is None or (row["local_bytes"], row["registers"]) > (worst["local_bytes"], worst["registers"]):
                sample[row["dtype"], row["kernel"]] = row
    assert len(sample) >= 6
    known = {dtype: variants(dtype, arch) for dtype in SHAPE.dtypes}
    chosen = sorted(sample.values(), key=lambda row: -row["local_bytes"])[:3]
    again = ahead.usages([known[row["dtype"]][label(row)] for row in chosen], ahead.target_for(arch), processes=2)
    for row, usage in zip(chosen, again, strict=True):
        assert isinstance(usage, ahead.Usage), usage
        assert usage.local_bytes <= row["local_bytes"], row
        assert usage.registers <= row["registers"], row
        assert usage.shared_bytes <= row["shared_bytes"], row
        assert usage.matrix_unit == row["matrix_unit"], row
