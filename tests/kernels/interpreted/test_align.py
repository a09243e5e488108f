"""The counting sort: the docstring's example, then shapes around its seams."""

from __future__ import annotations

import pytest
import torch
from moe_dist_kernels.align import CHUNK, ONE_PROGRAM_SLOTS, Align, Ids, chunks, max_tiles


def sort(
    ids: torch.Tensor, num_local: int, block_m: int, stream: int, expert_map: torch.Tensor | None = None
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """(slots in sorted order, tiles as (expert, first row, rows)) over poisoned scratch."""
    kind = Ids(dtype=ids.dtype, num_local=num_local, map_size=None if expert_map is None else len(expert_map))
    align = Align(ids=kind, block_m=block_m, pdl=False, places=True)
    count, device = ids.numel(), ids.device
    tiles = max(1, max_tiles(count, num_local, block_m))

    def part(size: int) -> torch.Tensor:
        return torch.full((size,), -7, dtype=torch.int32, device=device)

    cursors = chunks(count) * num_local
    at = {"cursor": part(cursors), "counts": part(cursors), "places": part(count), "slots": part(count), "num_tiles": part(1)}
    at |= {name: part(tiles) for name in ("tile_expert", "tile_row", "tile_rows")}
    if device.type == "cpu":
        align(0, stream, count, ids, expert_map, at)
    else:
        align(
            0,
            stream,
            count,
            ids.data_ptr(),
            None if expert_map is None else expert_map.data_ptr(),
            {k: v.data_ptr() for k, v in at.items()},
        )
        torch.cuda.synchronize()
    used = int(at["num_tiles"])
    assert used <= max_tiles(count, num_local, block_m)
    columns = [at[name][:used].tolist() for name in ("tile_expert", "tile_row", "tile_rows")]
    slots, tiles_found = at["slots"].tolist(), list(zip(*columns, strict=True))
    rows = sum(row_count for _, _, row_count in tiles_found)
    places = [-1] * count
    for row, slot in enumerate(slots[:rows]):
        places[slot] = row
    assert at["places"].tolist() == places, "the inverse of slots"
    return slots, tiles_found


def check(ids: torch.Tensor, num_local: int, block_m: int, stream: int, expert_map: torch.Tensor | None = None) -> None:
    slots, tiles = sort(ids, num_local, block_m, stream, expert_map)
    wanted: dict[int, set[int]] = {}
    for slot, expert in enumerate(ids.flatten().tolist()):
        if expert_map is not None:
            expert = int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1
        if 0 <= expert < num_local:
            wanted.setdefault(expert, set()).add(slot)
    found: dict[int, list[int]] = {}
    next_row = 0
    for expert, row, rows in tiles:
        assert 1 <= rows <= block_m
        assert row == next_row, "tiles cover the rows one after the other"
        next_row += rows
        found.setdefault(expert, []).extend(slots[row : row + rows])
    assert {expert: set(members) for expert, members in found.items()} == wanted
    assert all(len(members) == len(set(members)) for members in found.values())
    assert len(tiles) == sum(-(-len(members) // block_m) for members in wanted.values()), "no tile without rows"


def test_worked_example(device: torch.device, stream: int) -> None:
    slots, tiles = sort(torch.tensor([2, 0, 2, -1, 2, 7], dtype=torch.int32, device=device), 3, 2, stream)
    assert tiles == [(0, 0, 1), (2, 1, 2), (2, 3, 1)]
    assert slots[0] == 1
    assert set(slots[1:4]) == {0, 2, 4}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("count", "num_local"),
    [
        (1, 1),  # the least
        (129, 60),  # one past the smallest one-program kernel; experts no power of two
        (600, 257),  # the middle one; 257 pads to 512
        (ONE_PROGRAM_SLOTS, 1025),  # the most that one program takes; many experts empty
        (CHUNK * 3 + 3, 8),  # two launches, a last chunk of 3 slots
        (ONE_PROGRAM_SLOTS + 1, 1025),  # counts of two chunks over more experts than a step of the sum takes rows of
    ],
)
def test_every_slot_lands_once(count: int, num_local: int, dtype: torch.dtype, device: torch.device, stream: int) -> None:
    torch.manual_seed(count)
    ids = torch.randint(-1, num_local + 2, (count,), device=device).to(dtype)  # a few remote on either side
    check(ids, num_local, 16, stream)


def test_ids_past_32_bits_are_remote(device: torch.device, stream: int) -> None:
    check(torch.tensor([1, 2**32, 2**32 + 1, -(2**40), 0], device=device), 2, 16, stream)


def test_a_map_sends_other_ranks_experts_away(device: torch.device, stream: int) -> None:
    """Global ids 0..7, this rank holds 5, 1, 6 in that order."""
    expert_map = torch.tensor([-1, 1, -1, -1, -1, 0, 2, -1], dtype=torch.int32, device=device)
    torch.manual_seed(0)
    check(torch.randint(-1, 10, (400,), device=device), 3, 16, stream, expert_map)


@pytest.mark.parametrize("expert", [0, 7, -1])  # the first, the last, and nothing local at all
def test_one_expert_takes_all(expert: int, device: torch.device, stream: int) -> None:
    check(torch.full((300,), expert, dtype=torch.int32, device=device), 8, 64, stream)


def test_one_expert_takes_all_of_a_large_sort(device: torch.device, stream: int) -> None:
    check(torch.full((ONE_PROGRAM_SLOTS * 2,), 3, dtype=torch.int32, device=device), 5, 128, stream)


@pytest.mark.parametrize(("slots", "experts", "block", "most"), [(6, 3, 2, 4), (1, 257, 16, 1), (512, 128, 16, 152), (0, 8, 16, 0)])
def test_max_tiles_is_reached_and_not_passed(slots: int, experts: int, block: int, most: int) -> None:
    """6 slots over 3 experts in tiles of 2: 1, 1 and 4 rows make 4 tiles, and no split makes 5."""
    assert max_tiles(slots, experts, block) == most
