"""What is launched for a MoE layer: its shape, the plans that can run it, their scratch memory and their kernels.

Pure: holds no tensor and launches nothing. `experts.py` runs a plan; `ahead.py` and tests compile what it would launch.
Legend: T tokens, K slots of a token, E local experts, N routed experts, H hidden, I local intermediate.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch

from moe_dist_kernels.align import Align, Ids, chunks, max_tiles
from moe_dist_kernels.decode import DecodeTile, decode_launches
from moe_dist_kernels.finalize import finalize_launches
from moe_dist_kernels.grouped import SCALE_BLOCK, ProductTile, product_launches
from moe_dist_kernels.launch import Launch, Scratch
from moe_dist_kernels.quantise import quantise_launch

MAX_LAYOUTS = 4096  # token counts of which a scratch layout is kept, 2 KB each


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
        if self.up.early:
            return f"early {self.up.early} of the first product must be 0: before it nothing is known of the experts hit"
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
    """The sorted path with hopper.py's products: tiles of 128 rows, group_m of them sharing weights in L2. gather: the first product
    fetches rows by token; else they are copied into sorted order before."""

    group_m: int
    gather: bool
    block_m: ClassVar[int] = 128
    act_group: ClassVar[int] = 128  # columns of the activation that share a scale

    def why_not(self, shape: ExpertsShape, limits: Limits) -> str | None:
        if shape.dtype.itemsize != 2 or shape.kind != "swiglu" or shape.up_bias or shape.down_bias or shape.weight_on_input:
            return "the warp-specialised products know fp8 and 16-bit weights, SwiGLU and the weight on the output, and no bias"
        if not shape.fp8 and not self.gather:
            return "the warp-specialised products copy fp8 rows alone into sorted order; 16-bit ones are fetched by token (gather)"
        if shape.inter % 8:
            return (
                f"the warp-specialised products need rows of whole 16 bytes, a multiple of 8, not {shape.inter}, local intermediate columns"
            )
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


class Layouts:
    """`scratch` of the token counts of calls, made once for each."""

    def __init__(self, shape: ExpertsShape, plan: Plan) -> None:
        self._shape, self._plan = shape, plan
        self._seen: dict[tuple[int, bool], Scratch] = {}

    def __call__(self, num_tokens: int, routed: bool) -> Scratch:
        layout = self._seen.get((num_tokens, routed))
        if layout is None:
            if len(self._seen) >= MAX_LAYOUTS:  # cheap to make again
                self._seen.clear()
            layout = self._seen[num_tokens, routed] = scratch(self._shape, self._plan, num_tokens, routed=routed)
        return layout


# Shared, since a model's layers are equal: 48 layers with 4,096 layouts each would hold 300 MB.
layouts_of = functools.lru_cache(maxsize=256)(Layouts)


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
                fp8=shape.fp8,
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
