"""Counting sort of slots by expert, on the device, and the list of row tiles that the grouped products walk.

Legend: T tokens, K slots of a token, S = T * K, E local experts. A slot is `token * K + k`. A slot is *remote*, and
takes part in nothing, when its id is negative, past the map's or the weights' end, or mapped to -1.
Rows of one expert are contiguous in `slots`; their order inside an expert is not fixed (a row's result does not depend
on it). A tile is up to BLOCK_M rows of one expert: there are none for an expert without rows.
"""

# Kernels are Triton's language, not Python's: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from moe_dist_kernels.compile_time import power_of_2
from moe_dist_kernels.launch import INT, Launch

CHUNK = 2048  # slots of one program of the large sort
ONE_PROGRAM_SLOTS = 2048  # up to here one program sorts everything in one launch


@triton.jit
def local_expert(ids_ptr, map_ptr, slot, mask, NUM_LOCAL: tl.constexpr, MAP_SIZE: tl.constexpr, CACHE: tl.constexpr):
    """The local expert of each slot, or -1: masked, out of range, or another rank's. CACHE: tl.load's cache_modifier of both loads."""
    wide = tl.load(ids_ptr + slot, mask=mask, other=-1, cache_modifier=CACHE)
    known = (wide >= 0) & (wide < MAP_SIZE)
    expert = tl.where(known, wide, -1).to(tl.int32)
    if map_ptr is not None:
        expert = tl.load(map_ptr + expert, mask=expert >= 0, other=-1, cache_modifier=CACHE)
    return tl.where((expert >= 0) & (expert < NUM_LOCAL), expert, -1)


@triton.jit
def _write_tiles(
    counts, starts, expert, tile_expert_ptr, tile_row_ptr, tile_rows_ptr, num_tiles_ptr, NUM_LOCAL: tl.constexpr, BLOCK_M: tl.constexpr
):
    tiles = tl.cdiv(counts, BLOCK_M)
    first = tl.cumsum(tiles, axis=0) - tiles
    tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))
    tl.store(num_tiles_ptr + 1, 0)  # how many tiles the programs of either product have taken (hopper.py)
    tl.store(num_tiles_ptr + 2, 0)
    most = tl.max(tiles, axis=0)
    for i in range(most):
        live = (i < tiles) & (expert < NUM_LOCAL)
        tl.store(tile_expert_ptr + first + i, expert, mask=live)
        tl.store(tile_row_ptr + first + i, starts + i * BLOCK_M, mask=live)
        tl.store(tile_rows_ptr + first + i, tl.minimum(counts - i * BLOCK_M, BLOCK_M), mask=live)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["ids_ptr", "map_ptr"])
def align_one_kernel(
    ids_ptr,
    map_ptr,
    cursor_ptr,
    slots_ptr,
    places_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    num_slots,
    NUM_LOCAL: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The whole sort in one program. Example, E = 3, BLOCK_M = 2, ids [2, 0, 2, -1, 2, 7]: slots [1 | 0, 2, 4] (expert 0
    has slot 1; expert 2 has 0, 2 and 4, in some order); three tiles: expert 0 from row 0 with 1 row, expert 2 from row 1
    with 2, expert 2 from row 3 with 1."""
    PADDED: tl.constexpr = power_of_2(NUM_LOCAL)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lane = tl.arange(0, CHUNK)
    expert = tl.arange(0, PADDED)
    counts = tl.zeros([PADDED], dtype=tl.int32)
    for at in range(0, num_slots, CHUNK):
        local = local_expert(ids_ptr, map_ptr, at + lane, at + lane < num_slots, NUM_LOCAL, MAP_SIZE, "")
        counts += tl.histogram(local, PADDED, mask=local >= 0)
    starts = tl.cumsum(counts, axis=0) - counts
    tl.store(cursor_ptr + expert, starts, mask=expert < NUM_LOCAL)
    tl.debug_barrier()  # the cursors are read back by other threads of this program
    for at in range(0, num_slots, CHUNK):
        local = local_expert(ids_ptr, map_ptr, at + lane, at + lane < num_slots, NUM_LOCAL, MAP_SIZE, "")
        row = tl.atomic_add(cursor_ptr + local, 1, mask=local >= 0, sem="relaxed", scope="cta")
        tl.store(slots_ptr + row, at + lane, mask=local >= 0)
        if places_ptr is not None:
            tl.store(places_ptr + at + lane, tl.where(local >= 0, row, -1), mask=at + lane < num_slots)
    _write_tiles(counts, starts, expert, tile_expert_ptr, tile_row_ptr, tile_rows_ptr, num_tiles_ptr, NUM_LOCAL, BLOCK_M)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["ids_ptr", "map_ptr"])
def align_count_kernel(
    ids_ptr,
    map_ptr,
    counts_ptr,
    num_slots,
    NUM_LOCAL: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """First of two: counts[chunk, e] = slots of expert e in this program's chunk."""
    PADDED: tl.constexpr = power_of_2(NUM_LOCAL)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, PADDED)
    local = local_expert(ids_ptr, map_ptr, slot, slot < num_slots, NUM_LOCAL, MAP_SIZE, "")
    counts = tl.histogram(local, PADDED, mask=local >= 0)
    tl.store(counts_ptr + chunk.to(tl.int64) * NUM_LOCAL + expert, counts, mask=expert < NUM_LOCAL)


@triton.jit(do_not_specialize=["num_slots", "num_chunks"], do_not_specialize_on_alignment=["ids_ptr", "map_ptr"])
def align_place_kernel(
    ids_ptr,
    map_ptr,
    counts_ptr,
    cursor_ptr,
    slots_ptr,
    places_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    num_slots,
    num_chunks,
    NUM_LOCAL: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Second of two: every chunk sums all counts for its own first rows, then puts its slots there; the first writes the tiles."""
    PADDED: tl.constexpr = power_of_2(NUM_LOCAL)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    row = tl.arange(0, ROWS)
    counts = tl.zeros([PADDED], dtype=tl.int32)
    before = tl.zeros([PADDED], dtype=tl.int32)
    for at in range(0, num_chunks, ROWS):
        mask = (at + row < num_chunks)[:, None] & (expert < NUM_LOCAL)[None, :]
        here = tl.load(counts_ptr + (at + row).to(tl.int64)[:, None] * NUM_LOCAL + expert[None, :], mask=mask, other=0)
        counts += tl.sum(here, axis=0)
        before += tl.sum(tl.where((at + row < chunk)[:, None], here, 0), axis=0)
    starts = tl.cumsum(counts, axis=0) - counts
    cursor_ptr += chunk.to(tl.int64) * NUM_LOCAL
    tl.store(cursor_ptr + expert, starts + before, mask=expert < NUM_LOCAL)
    tl.debug_barrier()  # the cursors are read back by other threads of this program
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    local = local_expert(ids_ptr, map_ptr, slot, slot < num_slots, NUM_LOCAL, MAP_SIZE, "")
    place = tl.atomic_add(cursor_ptr + local, 1, mask=local >= 0, sem="relaxed", scope="cta")
    tl.store(slots_ptr + place, slot, mask=local >= 0)
    if places_ptr is not None:
        tl.store(places_ptr + slot, tl.where(local >= 0, place, -1), mask=slot < num_slots)
    if chunk == 0:
        _write_tiles(counts, starts, expert, tile_expert_ptr, tile_row_ptr, tile_rows_ptr, num_tiles_ptr, NUM_LOCAL, BLOCK_M)


def chunks(num_slots: int) -> int:
    """Programs of the sort."""
    return 1 if num_slots <= ONE_PROGRAM_SLOTS else -(-num_slots // CHUNK)


def max_tiles(num_slots: int, num_local: int, block_m: int) -> int:
    """The most row tiles that any routing of `num_slots` slots over `num_local` experts gives: one partial tile an
    expert that has rows, full ones for the rest."""
    partial = min(num_slots, num_local)
    return partial + (num_slots - partial) // block_m


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids:
    """How ids name experts, for every kernel that reads them. map_size: length of the map to weight rows; None: ids are rows."""

    dtype: torch.dtype
    num_local: int
    map_size: int | None

    @property
    def params(self) -> tuple[torch.dtype, torch.dtype | None]:
        """Of ids and of the map."""
        return self.dtype, None if self.map_size is None else torch.int32

    @property
    def constants(self) -> dict[str, Any]:
        return {"NUM_LOCAL": self.num_local, "MAP_SIZE": self.num_local if self.map_size is None else self.map_size}


class Align:
    """The launches of the sort for one kind of ids and BLOCK_M.

    Call it with integer pointers (tensors if interpreted): ids [S] int32 or int64; map int32 or None; and of scratch, int32:
    counts and cursor [chunks * E] (see `chunks`), slots [S], tile_expert, tile_row, tile_rows [max_tiles], num_tiles [3] (the number, then
    two zeros), and, with `places`, places [S]: the row of each slot, -1 for remote ones.
    """

    def __init__(self, *, ids: Ids, block_m: int, pdl: bool, places: bool = False) -> None:
        ints = torch.int32
        common = ids.constants | {"PDL": pdl}
        cut = common | {"BLOCK_M": block_m}
        tiles = (ints if places else None, ints, ints, ints, ints)
        padded = power_of_2(ids.num_local)
        self.one = {
            chunk: Launch(
                align_one_kernel,
                (*ids.params, ints, ints, *tiles, INT),
                cut | {"CHUNK": chunk},
                num_warps=4 if chunk <= 512 else 16,
                pdl=pdl,
            )
            for chunk in (128, 512, ONE_PROGRAM_SLOTS)
        }
        self.count = Launch(align_count_kernel, (*ids.params, ints, INT), common | {"CHUNK": CHUNK}, num_warps=8, pdl=pdl)
        self.place = Launch(
            align_place_kernel,
            (*ids.params, ints, ints, ints, *tiles, INT, INT),
            cut | {"CHUNK": CHUNK, "ROWS": max(1, min(64, 8192 // padded))},
            num_warps=8,
            pdl=pdl,
        )

    def launches(self, num_slots: int) -> list[Launch]:
        """What a call with `num_slots` slots launches."""
        if num_slots > ONE_PROGRAM_SLOTS:
            return [self.count, self.place]
        return [self.one[128 if num_slots <= 128 else 512 if num_slots <= 512 else ONE_PROGRAM_SLOTS]]

    def __call__(self, device: int, stream: int, num_slots: int, ids: Any, expert_map: Any, at: dict[str, Any]) -> None:
        tiles = (at.get("places"), at["tile_expert"], at["tile_row"], at["tile_rows"], at["num_tiles"])
        if num_slots <= ONE_PROGRAM_SLOTS:
            (one,) = self.launches(num_slots)
            one(1, device, stream, ids, expert_map, at["cursor"], at["slots"], *tiles, num_slots)
            return
        count = chunks(num_slots)
        self.count(count, device, stream, ids, expert_map, at["counts"], num_slots)
        self.place(count, device, stream, ids, expert_map, at["counts"], at["cursor"], at["slots"], *tiles, num_slots, count)
