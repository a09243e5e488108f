"""What a call puts on the stream: the kernels of its path and nothing else, since each is a node that every replay of a captured graph pays for.

Nothing runs: launches are written down where a GPU would get them, and torch's own operators where they are dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from moe_dist_kernels import DecodePlan, Experts, ExpertsShape, Plan, SortedPlan, SpecialisedPlan, is_interpreted
from moe_dist_kernels.align import ONE_PROGRAM_SLOTS
from moe_dist_kernels.decode import DecodeTile
from moe_dist_kernels.grouped import ProductTile
from moe_dist_kernels.launch import Launch
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.skipif(is_interpreted(), reason="interpreted launches take tensors, and take another way")

SMALL = DecodeTile(block_n=2, block_k=256, warps=1)
TILE = ProductTile(block_n=128, block_k=128, warps=4, stages=3, tma=False, persistent=False)
PLANS: dict[str, Plan] = {
    "decode": DecodePlan(up=SMALL, down=SMALL),
    "sorted": SortedPlan(block_m=16, group_m=1, swap_ab=True, up=TILE, down=TILE),
    "gathered": SpecialisedPlan(group_m=8, gather=True),
    "copied": SpecialisedPlan(group_m=8, gather=False),
}
HIDDEN, INTER, EXPERTS = 256, 256, 8


class Operators(TorchDispatchMode):
    """Names of the torch operators that run while it lasts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def on_the_stream(
    name: str, tokens: int, slots: int, fp8: bool, monkeypatch: pytest.MonkeyPatch, ids_dtype: torch.dtype = torch.int32
) -> tuple[list[str], set[str]]:
    """(kernels in their order, torch operators) of a call with ids and fp32 weights, as engines bring them."""
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    shape = ExpertsShape(
        dtype=torch.bfloat16, hidden=HIDDEN, inter=INTER, slots=slots, num_local=EXPERTS, map_size=None, kind="swiglu", fp8=fp8
    )
    experts = Experts(
        shape, PLANS[name],
        w13=torch.zeros(EXPERTS, 2 * INTER, HIDDEN, dtype=dtype), w2=torch.zeros(EXPERTS, HIDDEN, INTER, dtype=dtype),
        w13_scale=torch.zeros(EXPERTS, 4, 2) if fp8 else None, w2_scale=torch.zeros(EXPERTS, 2, 2) if fp8 else None,
    )  # fmt: skip
    launched: list[str] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, grid, device, stream, *arguments: launched.append(self.kernel.__name__))
    x, out = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16), torch.empty(tokens, HIDDEN, dtype=torch.bfloat16)
    ids, weights = torch.zeros(tokens, slots, dtype=ids_dtype), torch.zeros(tokens, slots)
    with Operators() as operators:
        experts._run(tokens, tokens * slots, 0, x, out, ids, weights, None)
    return launched, set(operators.names)


FEW = ["align_one_kernel"]
MANY = ["align_count_kernel", "align_place_kernel"]


@pytest.mark.parametrize(
    ("name", "tokens", "slots", "fp8", "kernels"),
    [
        ("decode", 1, 8, False, ["decode_up_kernel", "decode_down_kernel"]),
        ("decode", 2, 8, True, ["decode_up_kernel", "decode_down_kernel"]),  # it scales activations in registers
        ("sorted", 32, 8, False, [*FEW, "up_kernel", "down_kernel", "finalize_kernel"]),
        ("sorted", 32, 8, True, ["quantise_kernel", *FEW, "up_kernel", "down_kernel", "finalize_kernel"]),
        ("sorted", ONE_PROGRAM_SLOTS // 8 + 1, 8, False, [*MANY, "up_kernel", "down_kernel", "finalize_kernel"]),
        ("sorted", 32, 1, False, [*FEW, "up_kernel", "down_kernel", "zero_remote_kernel"]),  # one slot: its rows are the output
        ("gathered", 32, 8, True, [*FEW, "quantise_kernel", "product_kernel", "product_kernel", "finalize_kernel"]),
        ("copied", 32, 8, True, [*FEW, "scatter_kernel", "product_kernel", "product_kernel", "finalize_kernel"]),
    ],
)
def test_a_call_launches_its_kernels_and_allocates_once(
    name: str, tokens: int, slots: int, fp8: bool, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, operators = on_the_stream(name, tokens, slots, fp8, monkeypatch)
    assert launched == kernels
    # One block of scratch, and views of it: no zeros to fill, no ids to cast, no copy.
    assert operators <= {"aten::empty", "aten::slice", "aten::view", "aten::detach", "aten::alias"}


def test_ids_of_int64_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    _, operators = on_the_stream("decode", 3, 2, False, monkeypatch, ids_dtype=torch.int64)
    assert operators == {"aten::empty"}
