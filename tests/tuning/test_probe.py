"""Draws and guarded outputs: what probes of every operation stand on."""

from __future__ import annotations

import math

import pytest
import torch

import moe_dist as md
from moe_dist.tuning.probe import GUARD_BYTES, GuardedOutputs, draw_choices, seeded

CPU = torch.device("cpu")


def draw(spec: md.ProbeSpec, rows: int = 4000, choices: int = 16, count: int = 2, groups: tuple[int, int] | None = None) -> torch.Tensor:
    return draw_choices(spec, seeded(spec, rows, 0), rows, choices, count, groups)


def histogram(ids: torch.Tensor, choices: int = 16) -> list[int]:
    return torch.bincount(ids.flatten(), minlength=choices).tolist()


@pytest.mark.parametrize(
    "spec",
    [md.ProbeSpec(), md.ProbeSpec(routing="zipf", skew=2.0), md.ProbeSpec(routing="counts", counts=(1000, *[1] * 15))],
    ids=lambda spec: spec.routing,
)
@pytest.mark.parametrize("count", [1, 2, 16])  # one; some; all, however rare
def test_choices_differ_in_a_row_and_repeat_by_seed(count: int, spec: md.ProbeSpec) -> None:
    ids = draw(spec, rows=50, count=count)
    assert ids.shape == (50, count)
    assert all(len(set(row)) == count for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < 16
    assert torch.equal(ids, draw(spec, rows=50, count=count))


def test_other_seeds_copies_and_sizes_draw_otherwise() -> None:
    spec = md.ProbeSpec()
    drawn = [draw_choices(s, seeded(s, tokens, copy), 64, 16, 2) for s, tokens, copy in
             [(spec, 64, 0), (spec, 64, 1), (spec, 65, 0), (md.ProbeSpec(seed=1), 64, 0)]]  # fmt: skip
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_uniform_is_even() -> None:
    expected = 4000 * 2 / 16
    assert all(abs(count - expected) < 6 * math.sqrt(expected) for count in histogram(draw(md.ProbeSpec())))


def test_zipf_falls_off_as_its_exponent_says() -> None:
    counts = sorted(histogram(draw(md.ProbeSpec(routing="zipf", skew=1.0), rows=20_000, count=1)), reverse=True)
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.1)
    # The popular ones are not the first ids, which one rank would hold.
    assert histogram(draw(md.ProbeSpec(routing="zipf"))) != sorted(histogram(draw(md.ProbeSpec(routing="zipf"))), reverse=True)


def test_recorded_counts_come_back() -> None:
    counts = (700, 200, 100, *[0] * 13)
    found = histogram(draw(md.ProbeSpec(routing="counts", counts=counts), rows=20_000, count=1))
    assert [round(number / 20_000, 1) for number in found] == [0.7, 0.2, 0.1, *[0.0] * 13]
    assert sum(found[3:]) == 0  # never seen, and not needed
    assert histogram(draw(md.ProbeSpec(routing="counts", counts=counts), rows=10, count=4))[:3] == [
        10,
        10,
        10,
    ]  # needed: the seen ones first


def test_counts_of_another_model() -> None:
    with pytest.raises(md.ConfigError, match=r"ProbeSpec.counts has 3 entries for 16 experts; give one count each"):
        draw(md.ProbeSpec(routing="counts", counts=(1, 2, 3)))


def test_groups_are_respected() -> None:
    ids = draw(md.ProbeSpec(), count=4, groups=(8, 2))
    assert all(len({expert // 2 for expert in row}) == 2 for row in ids.tolist())
    assert len(set(histogram(ids))) > 1
    assert min(histogram(ids)) > 0


def outputs() -> GuardedOutputs:
    made = GuardedOutputs((3, 5), torch.bfloat16, 2, CPU)
    for tensor in made.tensors:
        tensor.fill_(1)
    return made


def test_whole_outputs_have_no_fault() -> None:
    assert outputs().fault() is None


def test_fresh_and_poisoned_outputs_are_unwritten() -> None:
    assert GuardedOutputs((3, 5), torch.bfloat16, 1, CPU).fault() == "3 of 3 rows of input set 0 were not written or are NaN, row 0 first"
    made = outputs()
    made.poison()
    assert made.fault() == "3 of 3 rows of input set 0 were not written or are NaN, row 0 first"


def test_one_unwritten_element_is_found() -> None:
    made = outputs()
    made.tensors[1][2, 4] = torch.nan
    assert made.fault() == "1 of 3 rows of input set 1 were not written or are NaN, row 2 first"


@pytest.mark.parametrize(
    ("offset", "where"),
    [(-1, "before"), (-GUARD_BYTES, "before"), (30, "behind"), (30 + GUARD_BYTES - 1, "behind")],  # nearest and farthest byte
)
def test_one_byte_outside_is_found_and_forgotten(offset: int, where: str) -> None:
    made = outputs()
    tensor = made.tensors[1]
    outside = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), GUARD_BYTES + offset, (1,))
    outside.zero_()
    assert made.fault() == f"it wrote {where} the output of input set 1"
    made.poison()  # the next candidate is not blamed
    for tensor in made.tensors:
        tensor.fill_(1)
    assert made.fault() is None


def test_no_rows() -> None:
    assert GuardedOutputs((0, 5), torch.bfloat16, 2, CPU).fault() is None
