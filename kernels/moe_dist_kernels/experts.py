"""A MoE layer's experts, bound to weights and a plan: checks what is bound, and launches a call's kernels in order.

Owns which pointers a launch gets, over which scratch memory. What there is to launch is `plan.py`'s; tuning is nobody's here.
Legend: T tokens, K slots of a token, E local experts, N routed experts, H hidden, I local intermediate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_dist_kernels.align import CHUNK, max_tiles
from moe_dist_kernels.finalize import finalize_blocks, finalize_kernel
from moe_dist_kernels.grouped import SCALE_BLOCK, ProductTile
from moe_dist_kernels.launch import Scratch, interpreted
from moe_dist_kernels.plan import (
    DecodePlan,
    ExpertsShape,
    Limits,
    Plan,
    RouterShape,
    SortedPlan,
    SpecialisedPlan,
    layouts_of,
    make_launchers,
)
from moe_dist_kernels.quantise import quantise_blocks, quantise_launch
from moe_dist_kernels.routing import route_launch

MAX_SLOTS = 2**31 - CHUNK  # slots are counted in 32 bits


@dataclasses.dataclass(slots=True)
class _Call:
    """One call on its way: what is launched, and the pointers (tensors if interpreted) of what it reads and writes.

    block: the scratch memory, alive until everything that uses it is in the stream; at: its parts. up_weights, down_weights: the router's
    weights, for the product that applies them. y: the second product's rows.
    """

    launchers: dict[str, Any]
    tokens: int
    count: int
    stream: int
    layout: Scratch
    block: torch.Tensor
    at: dict[str, Any]
    x: Any
    ids: Any
    weights: Any
    up_weights: Any
    down_weights: Any
    y: Any

    def view(self, part: str, columns: int) -> torch.Tensor:
        """A part of the scratch memory with a row for each slot."""
        return self.layout.view(self.block, part).view(self.count, columns)

    def tiles(self) -> tuple[Any, ...]:
        """What the sort left: slots in order, and each tile's expert, first row and number of rows."""
        at = self.at
        return at["slots"], at["tile_expert"], at["tile_row"], at["tile_rows"], at["num_tiles"]


class Experts:
    """One layer's experts, bound to weights and a plan. Call it as often as you like, also under CUDA graph capture.

    w13 [E, 2I or I, H], w2 [E, H, I] in the shape's weight dtype; w13_scale, w2_scale fp32 [E, ceil(rows / 128), ceil(columns / 128)]
    for fp8; biases [E, 2I or I], [E, H] in the dtypes that the shape names; expert_map int32
    [map_size]; correction_bias fp32 [N]. All contiguous on one device. ValueError: they are not, or the plan can't run.
    Nothing is written but `out`. Every call allocates one block of scratch from torch's caching allocator, so calls on
    several streams, and captured graphs, never share one.
    """

    def __init__(
        self,
        shape: ExpertsShape,
        plan: Plan,
        *,
        w13: torch.Tensor,
        w2: torch.Tensor,
        w13_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
        router: RouterShape | None = None,
        correction_bias: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        reason = shape.why_not() or plan.why_not(shape, Limits.of(w13.device))
        if reason is not None:
            raise ValueError(reason)
        rows = shape.inter * shape.planes
        blocks = [-(-size // SCALE_BLOCK) for size in (rows, shape.hidden, shape.inter)]
        scale = torch.float32 if shape.fp8 else None
        expected: list[tuple[str, torch.Tensor | None, tuple[int, ...], torch.dtype | None]] = [
            ("w13", w13, (shape.num_local, rows, shape.hidden), shape.weight_dtype),
            ("w2", w2, (shape.num_local, shape.hidden, shape.inter), shape.weight_dtype),
            ("w13_scale", w13_scale, (shape.num_local, blocks[0], blocks[1]), scale),
            ("w2_scale", w2_scale, (shape.num_local, blocks[1], blocks[2]), scale),
            ("w13_bias", w13_bias, (shape.num_local, rows), shape.up_bias),
            ("w2_bias", w2_bias, (shape.num_local, shape.hidden), shape.down_bias),
            ("expert_map", expert_map, (shape.map_size or 0,), torch.int32),
            ("correction_bias", correction_bias, (router.num_experts if router else 0,), torch.float32),
        ]
        for name, tensor, size, dtype in expected:
            if tensor is None:
                continue
            if tuple(tensor.shape) != size or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != w13.device:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
                    f"{'contiguous' if tensor.is_contiguous() else 'strided'}; it must be {size} {dtype} on {w13.device}, contiguous"
                )
        for name, tensor, _, wanted in expected[2:6]:
            if tensor is None and wanted is not None:
                raise ValueError(f"{name} is missing; the shape says it is {wanted}")
        if (expert_map is None) != (shape.map_size is None):
            raise ValueError(f"expert_map {'is missing' if expert_map is None else 'was given'}; the shape's map_size is {shape.map_size}")
        if w13.data_ptr() % 16 or w2.data_ptr() % 16:
            raise ValueError("w13 and w2 must start at a multiple of 16 bytes for vector loads; copy them once")
        self.shape, self.plan, self.router = shape, plan, router
        self.device = w13.device
        self._index = w13.device.index or 0
        self._interpreted = interpreted(finalize_kernel)
        self._pdl = pdl and not self._interpreted
        self._by_ids: dict[torch.dtype, dict[str, Any]] = {}
        self._weights = (
            w13,
            w2,
            w13_scale,
            w2_scale,
            w13_bias,
            w2_bias,
            expert_map,
            correction_bias,
        )  # kept alive: their addresses are baked in
        pointers: list[Any] = [_pointer(tensor, self._interpreted) for tensor in self._weights]
        self._w13, self._w2, self._w13_scale, self._w2_scale, self._w13_bias, self._w2_bias, self._map, self._correction = pointers
        self._up_weights: tuple[Any, ...] = (self._w13, None, self._w13_scale)
        self._down_weights: tuple[Any, ...] = (self._w2, None, self._w2_scale)
        if isinstance(plan, SortedPlan):
            self._persistent = {side: _programs(getattr(plan, side), plan.block_m, shape, self.device) for side in ("up", "down")}
            launches = self.launchers(torch.int32)
            if plan.up.tma:
                descriptor = launches["up"].params[3]
                self._up_weights = (None, descriptor.of(w13.view(-1, shape.inter, shape.hidden)), self._w13_scale)
            if plan.down.tma:
                self._down_weights = (None, launches["down"].params[4].of(w2), self._w2_scale)
        elif isinstance(plan, SpecialisedPlan):
            if self._interpreted:
                raise ValueError("warp-specialised kernels can't be interpreted; choose another plan")
            launches = self.launchers(torch.int32)
            self._processors = Limits.of(self.device).processors
            self._up_weights = (launches["up"].params[1].of(w13.view(-1, shape.hidden)), self._w13_scale)
            self._down_weights = (launches["down"].params[1].of(w2.view(-1, shape.inter)), self._w2_scale)
        if shape.fp8:
            self._quantise = quantise_launch(dtype=shape.dtype, hidden=shape.hidden, pdl=self._pdl)
        self._layouts = layouts_of(shape, plan)
        self._route = route_launch(**dataclasses.asdict(router), pdl=self._pdl) if router is not None else None

    def launchers(self, ids_dtype: torch.dtype) -> dict[str, Any]:
        """The launches for ids of this dtype, made once: `Launch`es and, for the sorted path, an `Align`."""
        found = self._by_ids.get(ids_dtype)
        if found is None:
            found = self._by_ids[ids_dtype] = make_launchers(self.shape, self.plan, ids_dtype, pdl=self._pdl)
        return found

    def __call__(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> None:
        """Fill `out` ([T, H], or [T, K, H] without finalize), which may be `x` itself.

        x: [T, H] in the shape's dtype. ids: [T, K] int32 or int64 global ids, -1 or any id that is not here counts as remote;
        weights: [T, K] fp32, finite also where an id is remote: the small path multiplies by them. Or logits [T, N] in the
        router's dtype. Copies what is not contiguous or not aligned.
        """
        tokens = x.shape[0]
        count = tokens * self.shape.slots
        if tokens == 0:
            return
        if count > MAX_SLOTS:
            raise ValueError(f"{tokens} tokens of {self.shape.slots} slots exceed {MAX_SLOTS} slots; split the batch")
        if not x.is_contiguous() or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        if not out.is_contiguous() or out.data_ptr() % 16:
            fresh = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self(x, fresh, ids=ids, weights=weights, logits=logits)
            out.copy_(fresh)
            return
        if self._interpreted:
            self._run(tokens, count, 0, x, out, ids, weights, logits)
        elif torch.cuda.current_device() == self._index:
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            self._run(tokens, count, stream, x, out, ids, weights, logits)
        else:
            with torch.cuda.device(self._index):
                stream = torch._C._cuda_getCurrentRawStream(self._index)
                self._run(tokens, count, stream, x, out, ids, weights, logits)

    def _run(
        self,
        tokens: int,
        count: int,
        stream: int,
        x: torch.Tensor,
        out: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        logits: torch.Tensor | None,
    ) -> None:
        shape, plan, device = self.shape, self.plan, self._index
        routed = logits is None
        layout = self._layouts(tokens, routed)
        block, at = layout.pointers(self.device, as_tensors=self._interpreted)
        as_pointer = self._tensor if self._interpreted else torch.Tensor.data_ptr
        x_ptr, out_ptr = as_pointer(x), as_pointer(out)
        if routed:
            if ids is None or weights is None:
                raise ValueError("give logits, or both ids and weights")
            ids, weights = ids.contiguous(), weights.contiguous()
            ids_ptr, weights_ptr = as_pointer(ids), as_pointer(weights)
            launchers = self.launchers(ids.dtype)
        else:
            if self._route is None or logits is None:
                raise ValueError("logits were given to experts that were bound without a router; give ids and weights")
            logits = logits.contiguous()
            ids_ptr, weights_ptr = at["ids"], at["weights"]
            self._route(tokens, device, stream, as_pointer(logits), self._correction, ids_ptr, weights_ptr, tokens)
            launchers = self.launchers(torch.int32)
        on_input = shape.weight_on_input
        call = _Call(
            launchers, tokens, count, stream, layout, block, at, x_ptr, ids_ptr, weights_ptr,
            weights_ptr if on_input else None, None if on_input else weights_ptr, at.get("y", out_ptr),
        )  # fmt: skip
        if isinstance(plan, DecodePlan):
            self._decode(plan, call)
            return
        if isinstance(plan, SpecialisedPlan):
            self._specialised(plan, call)
        else:
            self._sorted(plan, call)
        blocks = finalize_blocks(shape.hidden)
        if "y" in at:
            launchers["finalize"](tokens * blocks, device, stream, call.y, ids_ptr, self._map, out_ptr, tokens)
        else:  # rows lie in `out` already, all but the remote ones
            launchers["zero_remote"](count * blocks, device, stream, ids_ptr, self._map, out_ptr, count)

    def _decode(self, plan: DecodePlan, call: _Call) -> None:
        """Two launches, all slots of a token summed in the second."""
        shape, launchers, device, stream = self.shape, call.launchers, self._index, call.stream
        grid = call.count * -(-shape.inter // plan.up.block_n)
        weights = (self._w13, self._w13_scale, self._w13_bias, call.up_weights)
        launchers["up"](grid, device, stream, call.x, *weights, call.ids, self._map, call.at["act"], call.count)
        outputs = call.tokens if shape.finalize else call.count
        grid = outputs * -(-shape.hidden // plan.down.block_n)
        weights = (self._w2, self._w2_scale, self._w2_bias, call.down_weights)
        launchers["down"](grid, device, stream, call.at["act"], *weights, call.ids, self._map, call.y, outputs)

    def _specialised(self, plan: SpecialisedPlan, call: _Call) -> None:
        """Sort; quantise fp8 rows, by token or into sorted order; both products."""
        shape, launchers, device, stream, at = self.shape, call.launchers, self._index, call.stream, call.at
        launchers["align"](device, stream, call.count, call.ids, self._map, at)
        up, down = launchers["up"], launchers["down"]
        if not shape.fp8:
            rows, row_weights = call.x, call.weights
        elif plan.gather:
            rows, row_weights = at["x"], call.weights
            self._quantise(call.tokens * quantise_blocks(shape.hidden), device, stream, call.x, rows, at["x_scale"], call.tokens)
        else:
            rows, row_weights = up.params[0].of(call.view("x", shape.hidden)), at["row_weights"]
            grid = call.tokens * launchers["scatter_blocks"]
            scattered = (at["x"], at["x_scale"], row_weights)
            launchers["scatter"](grid, device, stream, call.x, call.weights, at["places"], *scattered, call.tokens)
        slots, *tiles = call.tiles()
        boxes = (rows, self._up_weights[0], at.get("x_scale"), self._up_weights[1])
        up(self._processors, device, stream, *boxes, slots, None, *tiles, at["act"], at.get("act_scale"))
        boxes = (down.params[0].of(call.view("act", shape.inter)), self._down_weights[0], at.get("act_scale"), self._down_weights[1])
        down(self._processors, device, stream, *boxes, slots, row_weights, *tiles, call.y, None)

    def _sorted(self, plan: SortedPlan, call: _Call) -> None:
        """Quantise where weights are fp8; sort; both products."""
        shape, launchers, device, stream, at = self.shape, call.launchers, self._index, call.stream, call.at
        x, x_scale, act_scale = call.x, None, None
        if shape.fp8:
            x, x_scale, act_scale = at["x"], at["x_scale"], at["act_scale"]
            self._quantise(call.tokens * quantise_blocks(shape.hidden), device, stream, call.x, x, x_scale, call.tokens)
        launchers["align"](device, stream, call.count, call.ids, self._map, at)
        most = max_tiles(call.count, shape.num_local, plan.block_m)
        grid = min(most * -(-shape.inter // plan.up.block_n), self._persistent["up"])
        weights = (*self._up_weights, self._w13_bias, call.up_weights)
        launchers["up"](grid, device, stream, x, x_scale, *weights, *call.tiles(), at["act"], act_scale)
        grid = min(most * -(-shape.hidden // plan.down.block_n), self._persistent["down"])
        rows: tuple[Any, ...] = (at["act"], None, act_scale)
        if plan.down.tma:
            rows = (None, launchers["down"].params[1].of(call.view("act", shape.inter)), act_scale)
        weights = (*self._down_weights, self._w2_bias, call.down_weights)
        launchers["down"](grid, device, stream, *rows, *weights, *call.tiles(), call.y)

    @staticmethod
    def _tensor(tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _pointer(tensor: torch.Tensor | None, as_tensor: bool) -> Any:
    return tensor if as_tensor or tensor is None else tensor.data_ptr()


def _programs(tile: ProductTile, block_m: int, shape: ExpertsShape, device: torch.device) -> int:
    """Programs that walk all tiles of a persistent product: as many as are resident at once; no bound for one a tile."""
    if not tile.persistent:
        return 2**31 - 1
    limits = Limits.of(device)
    need = tile.shared_bytes(block_m=block_m, planes=shape.planes, itemsize=shape.weight_dtype.itemsize)
    return limits.processors * (2 if tile.warps == 4 and 2 * need <= limits.shared_bytes else 1)


def is_interpreted() -> bool:
    """Whether the kernels run under Triton's interpreter in this process."""
    return interpreted(finalize_kernel)
