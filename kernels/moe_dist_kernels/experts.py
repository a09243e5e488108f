"""The launcher of a whole MoE layer: routing if asked for, then the small path or the sorted one, into the caller's output.

Owns what is launched, in which order, over which scratch memory. Knows nothing of tuning: the caller brings a plan.
Legend: T tokens, K slots of a token, E local experts, N routed experts, H hidden, I local intermediate.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from moe_dist_kernels.align import CHUNK, Align, Ids, chunks, max_tiles
from moe_dist_kernels.decode import DecodeTile, decode_launches
from moe_dist_kernels.finalize import finalize_blocks, finalize_kernel, finalize_launches
from moe_dist_kernels.grouped import SCALE_BLOCK, ProductTile, product_launches
from moe_dist_kernels.launch import Launch, Scratch, interpreted
from moe_dist_kernels.quantise import quantise_blocks, quantise_launch
from moe_dist_kernels.routing import route_launch

MAX_SLOTS = 2**31 - CHUNK  # slots are counted in 32 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """What the kernels are compiled for, all but the token count.

    dtype: of hidden states, output and, unless fp8, weights. fp8: weights are float8_e4m3fn with 128 x 128 block scales.
    slots: K, fused shared experts included. map_size: length of the map from global ids to weight rows; None: ids are rows.
    kind, limit, alpha, beta: see `activation.activate`. up_bias, down_bias: a bias's dtype; None: there is none. finalize: [T, H] or, without, [T, K, H].
    """

    dtype: torch.dtype
    hidden: int
    inter: int
    slots: int
    num_local: int
    map_size: int | None
    kind: str
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    up_bias: torch.dtype | None = None
    down_bias: torch.dtype | None = None
    weight_on_input: bool = False
    finalize: bool = True
    fp8: bool = False

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def planes(self) -> int:
        """Rows of w13 that make one column of the activation."""
        return 2 if self.gated else 1

    def why_not(self) -> str | None:
        """The reason that no plan can run this shape, or None."""
        if self.planes * self.inter * self.hidden >= 2**31:
            return f"an expert's first product has {self.planes * self.inter} x {self.hidden} weights; offsets inside an expert are 32 bits wide"
        if self.fp8 and self.inter % SCALE_BLOCK:
            return (
                f"the local intermediate size {self.inter} is no multiple of {SCALE_BLOCK}, so that gate and up rows share fp8 scale blocks"
            )
        return None

    @property
    def gated(self) -> bool:
        return self.kind in ("swiglu", "geglu")

    @property
    def activation(self) -> dict[str, Any]:
        return {"KIND": self.kind, "LIMIT": self.limit, "ALPHA": self.alpha, "BETA": self.beta, "GATED": self.gated}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterShape:
    """How logits choose experts; the fields of `routing.route_launch`."""

    logits_dtype: torch.dtype
    num_experts: int
    top_k: int
    n_group: int | None
    topk_group: int | None
    num_shared: int
    scoring: str
    renormalize: bool
    scale: float
    bias: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a card allows: shared memory of one block, in bytes; whether it has the copy engine and Hopper's matrix
    instructions; its multiprocessors."""

    shared_bytes: int = 232448
    has_tma: bool = True
    has_wgmma: bool = True
    processors: int = 132

    @classmethod
    def of(cls, device: torch.device) -> Limits:
        """Those of `device`; an H200's where there is no GPU."""
        if device.type != "cuda":
            return cls()
        found: Any = torch.cuda.get_device_properties(device)
        return cls(
            shared_bytes=found.shared_memory_per_block_optin,
            has_tma=found.major >= 9,
            has_wgmma=found.major == 9,
            processors=found.multi_processor_count,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """The small path: see decode.py."""

    up: DecodeTile
    down: DecodeTile

    def why_not(self, shape: ExpertsShape, limits: Limits) -> str | None:
        del shape, limits  # any shape runs, on any card: nothing is staged in shared memory
        return self.up.why_not() or self.down.why_not()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortedPlan:
    """The sorted path: row tiles of block_m, group_m of them sharing weights in L2; swap_ab: weights are the wide operand."""

    block_m: int
    group_m: int
    swap_ab: bool
    up: ProductTile
    down: ProductTile

    def why_not(self, shape: ExpertsShape, limits: Limits) -> str | None:
        if self.group_m < 1:
            return f"group_m {self.group_m} must be at least 1"
        for name, tile, planes, depth in (("up", self.up, shape.planes, shape.hidden), ("down", self.down, 1, shape.inter)):
            reason = tile.why_not(
                block_m=self.block_m,
                planes=planes,
                itemsize=shape.weight_dtype.itemsize,
                depth=depth,
                fp8=shape.fp8,
                shared_limit=limits.shared_bytes,
                has_tma=limits.has_tma,
            )
            if reason is not None:
                return f"{name} product: {reason}"
        if shape.fp8 and self.down.block_k > self.up.block_n:
            return f"down product: block_k {self.down.block_k} spans several of the fp8 scales that the up product makes, one for {self.up.block_n} columns"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialisedPlan:
    """The sorted path with hopper.py's products: fp8, tiles of 128 rows, group_m of them sharing weights in L2. gather: the first product
    fetches rows by token; else they are copied into sorted order before."""

    group_m: int
    gather: bool
    block_m: ClassVar[int] = 128
    act_group: ClassVar[int] = 128  # columns of the activation that share a scale

    def why_not(self, shape: ExpertsShape, limits: Limits) -> str | None:
        if not shape.fp8 or shape.kind != "swiglu" or shape.up_bias or shape.down_bias or shape.weight_on_input:
            return "the warp-specialised products know fp8 weights, SwiGLU and the weight on the output, and no bias"
        if shape.hidden % SCALE_BLOCK:
            return f"the warp-specialised products need a hidden size that is a multiple of {SCALE_BLOCK}, not {shape.hidden}"
        if not limits.has_wgmma:
            return "the warp-specialised products are written in Hopper's instructions, for compute capability 9.0"
        if self.group_m < 1:
            return f"group_m {self.group_m} must be at least 1"
        need = 4 * 49152 + 18432  # four stages of 48 KB, the results' way out, barriers
        if need > limits.shared_bytes:
            return f"the warp-specialised products need {need} bytes of shared memory, a block has {limits.shared_bytes}"
        return None


Plan = DecodePlan | SortedPlan | SpecialisedPlan


def scratch(shape: ExpertsShape, plan: Plan, num_tokens: int, *, routed: bool) -> Scratch:
    """The scratch memory of one call: a pure function of shape, plan and token count. routed: the caller brings ids."""
    count = num_tokens * shape.slots
    parts: dict[str, tuple[int, torch.dtype]] = {}
    if not routed:
        parts |= {"ids": (count, torch.int32), "weights": (count, torch.float32)}
    if isinstance(plan, DecodePlan):
        parts["act"] = (count * shape.inter, shape.dtype)
        return Scratch(**parts)
    parts["act"] = (count * shape.inter, shape.weight_dtype)
    if shape.fp8:
        copied = isinstance(plan, SpecialisedPlan) and not plan.gather
        group = plan.act_group if isinstance(plan, SpecialisedPlan) else plan.up.block_n
        rows = count if copied else num_tokens
        parts |= {
            "act_scale": (count * -(-shape.inter // group), torch.float32),
            "x": (rows * shape.hidden, torch.float8_e4m3fn),
            "x_scale": (rows * -(-shape.hidden // SCALE_BLOCK), torch.float32),
        }
        if copied:
            parts |= {"places": (count, torch.int32), "row_weights": (count, torch.float32)}
    cursors = chunks(count) * shape.num_local
    tiles = max(1, max_tiles(count, shape.num_local, plan.block_m))
    parts |= {"cursor": (cursors, torch.int32), "slots": (count, torch.int32), "num_tiles": (3, torch.int32)}
    if chunks(count) > 1:
        parts["counts"] = (cursors, torch.int32)
    parts |= dict.fromkeys(("tile_expert", "tile_row", "tile_rows"), (tiles, torch.int32))
    if shape.finalize and shape.slots > 1:
        parts["y"] = (count * shape.hidden, shape.dtype)
    return Scratch(**parts)


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
        self._scratches: dict[tuple[int, bool], Scratch] = {}
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
        weights: [T, K] fp32. Or logits [T, N] in the router's dtype. Copies what is not contiguous or not aligned.
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
        layout = self._scratches.get((tokens, routed))
        if layout is None:
            if len(self._scratches) > 4096:  # token counts seen; the layouts are cheap to make again
                self._scratches.clear()
            layout = self._scratches[(tokens, routed)] = scratch(shape, plan, tokens, routed=routed)
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
        up_weights = weights_ptr if shape.weight_on_input else None
        down_weights = None if shape.weight_on_input else weights_ptr
        if isinstance(plan, DecodePlan):
            up, down = launchers["up"], launchers["down"]
            grid = count * -(-shape.inter // plan.up.block_n)
            weights13, weights2 = (self._w13, self._w13_scale, self._w13_bias), (self._w2, self._w2_scale, self._w2_bias)
            up(grid, device, stream, x_ptr, *weights13, up_weights, ids_ptr, self._map, at["act"], count)
            outputs = tokens if shape.finalize else count
            grid = outputs * -(-shape.hidden // plan.down.block_n)
            down(grid, device, stream, at["act"], *weights2, down_weights, ids_ptr, self._map, out_ptr, outputs)
        elif isinstance(plan, SpecialisedPlan):
            launchers["align"](device, stream, count, ids_ptr, self._map, at)
            found = (at["tile_expert"], at["tile_row"], at["tile_rows"], at["num_tiles"])
            up, down = launchers["up"], launchers["down"]
            if plan.gather:
                rows, row_weights = at["x"], weights_ptr
                self._quantise(tokens * quantise_blocks(shape.hidden), device, stream, x_ptr, rows, at["x_scale"], tokens)
            else:
                rows, row_weights = up.params[0].of(layout.view(block, "x").view(count, shape.hidden)), at["row_weights"]
                grid = tokens * launchers["scatter_blocks"]
                scattered = (at["x"], at["x_scale"], row_weights)
                launchers["scatter"](grid, device, stream, x_ptr, weights_ptr, at["places"], *scattered, tokens)
            boxes = (rows, self._up_weights[0], at["x_scale"], self._up_weights[1])
            up(self._processors, device, stream, *boxes, at["slots"], None, *found, at["act"], at["act_scale"])
            y = at.get("y", out_ptr)
            act = layout.view(block, "act").view(count, shape.inter)
            boxes = (down.params[0].of(act), self._down_weights[0], at["act_scale"], self._down_weights[1])
            down(self._processors, device, stream, *boxes, at["slots"], row_weights, *found, y, None)
            self._finish(launchers, tokens, count, stream, "y" in at, y, ids_ptr, out_ptr)
        else:
            act_scale = x_scale = None
            if shape.fp8:
                x_scale, act_scale = at["x_scale"], at["act_scale"]
                self._quantise(tokens * quantise_blocks(shape.hidden), device, stream, x_ptr, at["x"], x_scale, tokens)
                x_ptr = at["x"]
            launchers["align"](device, stream, count, ids_ptr, self._map, at)
            tiles = (at["slots"], at["tile_expert"], at["tile_row"], at["tile_rows"], at["num_tiles"])
            most = max_tiles(count, shape.num_local, plan.block_m)
            grid = min(most * -(-shape.inter // plan.up.block_n), self._persistent["up"])
            launchers["up"](
                grid, device, stream, x_ptr, x_scale, *self._up_weights, self._w13_bias, up_weights, *tiles, at["act"], act_scale
            )
            grid = min(most * -(-shape.hidden // plan.down.block_n), self._persistent["down"])
            in_place = "y" not in at
            y = out_ptr if in_place else at["y"]
            operand: tuple[Any, ...] = (at["act"], None, act_scale)
            if plan.down.tma:
                view = layout.view(block, "act").view(count, shape.inter)
                operand = (None, launchers["down"].params[1].of(view), act_scale)
            launchers["down"](grid, device, stream, *operand, *self._down_weights, self._w2_bias, down_weights, *tiles, y)
            self._finish(launchers, tokens, count, stream, not in_place, y, ids_ptr, out_ptr)
        del block  # alive until everything that uses it is in the stream

    def _finish(
        self, launchers: dict[str, Any], tokens: int, count: int, stream: int, summed: bool, y: Any, ids_ptr: Any, out_ptr: Any
    ) -> None:
        """The rows of `y` into `out`, or zeros into the remote rows of what is `out` already."""
        blocks = finalize_blocks(self.shape.hidden)
        if summed:
            launchers["finalize"](tokens * blocks, self._index, stream, y, ids_ptr, self._map, out_ptr, tokens)
        else:
            launchers["zero_remote"](count * blocks, self._index, stream, ids_ptr, self._map, out_ptr, count)

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


def make_launchers(shape: ExpertsShape, plan: Plan, ids_dtype: torch.dtype, *, pdl: bool) -> dict[str, Any]:
    """Everything that `plan` launches, by name. Compiles nothing."""
    ids = Ids(dtype=ids_dtype, num_local=shape.num_local, map_size=shape.map_size)
    last = finalize_launches(dtype=shape.dtype, ids=ids, hidden=shape.hidden, top_k=shape.slots, pdl=pdl)
    if isinstance(plan, SpecialisedPlan):
        from moe_dist_kernels import hopper  # Gluon, which no other plan needs

        scatter = {
            "scatter": hopper.scatter_launch(dtype=shape.dtype, hidden=shape.hidden, top_k=shape.slots, pdl=pdl),
            "scatter_blocks": hopper.scatter_blocks(shape.hidden),
        }
        return {
            "align": Align(block_m=plan.block_m, places=not plan.gather, ids=ids, pdl=pdl),
            **({} if plan.gather else scatter),
            **hopper.product_launches(
                dtype=shape.dtype,
                hidden=shape.hidden,
                inter=shape.inter,
                top_k=shape.slots,
                limit=shape.limit,
                alpha=shape.alpha,
                beta=shape.beta,
                group_m=plan.group_m,
                gather=plan.gather,
                pdl=pdl,
            ),
            **last,
        }
    products: dict[str, Any] = {
        "dtype": shape.dtype,
        "fp8": shape.fp8,
        "hidden": shape.hidden,
        "inter": shape.inter,
        "top_k": shape.slots,
        "activation": shape.activation,
        "up_bias": shape.up_bias,
        "down_bias": shape.down_bias,
        "weight_on_input": shape.weight_on_input,
        "up": plan.up,
        "down": plan.down,
        "pdl": pdl,
    }
    if isinstance(plan, DecodePlan):
        return decode_launches(**products, ids=ids, slots=shape.slots if shape.finalize else 1)
    cut: dict[str, Any] = {"block_m": plan.block_m, "group_m": plan.group_m, "swap_ab": plan.swap_ab}
    return {"align": Align(block_m=plan.block_m, ids=ids, pdl=pdl), **product_launches(**products, **cut), **last}


def all_launches(shape: ExpertsShape, plan: Plan, *, ids_dtype: torch.dtype = torch.int32, pdl: bool = False) -> dict[str, Launch]:
    """Every kernel variant that a plan can launch, by name: for compiling them all ahead of time."""
    found: dict[str, Launch] = {}
    for name, launch in make_launchers(shape, plan, ids_dtype, pdl=pdl).items():
        if isinstance(launch, Align):
            found |= {f"align_one_{chunk}": one for chunk, one in launch.one.items()}
            found |= {"align_count": launch.count, "align_place": launch.place}
        elif isinstance(launch, Launch):
            found[name] = launch
    if shape.fp8 and (plan.gather if isinstance(plan, SpecialisedPlan) else isinstance(plan, SortedPlan)):
        found["quantise"] = quantise_launch(dtype=shape.dtype, hidden=shape.hidden, pdl=pdl)
    return found


def is_interpreted() -> bool:
    """Whether the kernels run under Triton's interpreter in this process."""
    return interpreted(finalize_kernel)


__all__ = [
    "DecodePlan",
    "Experts",
    "ExpertsShape",
    "Limits",
    "Plan",
    "RouterShape",
    "SortedPlan",
    "SpecialisedPlan",
    "all_launches",
    "is_interpreted",
    "scratch",
]
