"""Both paths of the experts against fp32 truth, on poisoned outputs and scratch."""

from __future__ import annotations

import gc
from typing import Any

import moe_dist_kernels.launch
import moe_dist_kernels.plan
import pytest
import torch
from moe_dist_kernels import DecodePlan, DecodeTile, Experts, ExpertsShape, Plan, ProductTile, RouterShape, SortedPlan
from moe_dist_kernels.launch import Scratch
from moe_dist_kernels.plan import Layouts
from truth import experts_truth, relative_error

DECODE = DecodePlan(up=DecodeTile(block_n=16, block_k=64, warps=4), down=DecodeTile(block_n=32, block_k=64, warps=4))
PLAIN = SortedPlan(
    block_m=16,
    group_m=2,
    swap_ab=False,
    up=ProductTile(block_n=16, block_k=32, warps=4, stages=2),
    down=ProductTile(block_n=32, block_k=16, warps=4, stages=2),
)
SWAPPED = SortedPlan(
    block_m=16,
    group_m=1,
    swap_ab=True,
    up=ProductTile(block_n=64, block_k=16, warps=4, stages=2),
    down=ProductTile(block_n=64, block_k=32, warps=4, stages=2),
)
COPIED = SortedPlan(  # by the copy engine, and programs that walk several tiles
    block_m=16,
    group_m=2,
    swap_ab=False,
    up=ProductTile(block_n=16, block_k=32, warps=4, stages=2, tma=True, persistent=True),
    down=ProductTile(block_n=32, block_k=16, warps=4, stages=2, tma=True, persistent=True),
)
PLANS = [pytest.param(DECODE, id="decode"), pytest.param(PLAIN, id="plain"), pytest.param(SWAPPED, id="swapped")]
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3}  # rounding of the dtype through two products


@pytest.fixture(autouse=True)
def _poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch starts as 0xFF bytes: NaN in every float, -1 in every integer."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(0xFF) if made.dtype == torch.uint8 else made

    monkeypatch.setattr(moe_dist_kernels.launch.torch, "empty", poisoned)


def one(
    plan: Plan,
    device: torch.device,
    *,
    tokens: int = 3,
    experts: int = 4,
    top_k: int = 2,
    hidden: int = 48,
    inter: int = 40,
    kind: str = "swiglu",
    dtype: torch.dtype = torch.float32,
    ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    bias: torch.dtype | None = None,
    finalize: bool = True,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the kernels give, truth) for random inputs."""
    torch.manual_seed(tokens * 1000 + experts)
    gated = kind in ("swiglu", "geglu")

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size) * scale).to(dtype)

    x = random(tokens, hidden)
    w13, w2 = random(experts, inter * (1 + gated), hidden, scale=0.2), random(experts, hidden, inter, scale=0.2)
    w13_bias, w2_bias = (random(experts, w13.shape[1]).to(bias), random(experts, hidden).to(bias)) if bias else (None, None)
    if ids is None:
        ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    top_k = ids.shape[1]
    weights = torch.rand(tokens, top_k)
    shape = ExpertsShape(
        dtype=dtype,
        hidden=hidden,
        inter=inter,
        slots=top_k,
        num_local=experts,
        map_size=None if expert_map is None else len(expert_map),
        kind=kind,
        up_bias=bias,
        down_bias=bias,
        finalize=finalize,
        **more,
    )
    on = {
        name: None if tensor is None else tensor.to(device)
        for name, tensor in {"w13": w13, "w2": w2, "w13_bias": w13_bias, "w2_bias": w2_bias, "expert_map": expert_map}.items()
    }
    layer = Experts(shape, plan, **on)  # type: ignore[arg-type]
    out = torch.full((tokens, hidden) if finalize else (tokens, top_k, hidden), torch.nan, dtype=dtype, device=device)
    layer(x.to(device), out, ids=ids.to(device), weights=weights.to(device))
    truth = experts_truth(x, w13, w2, ids, weights, kind=kind, w13_bias=w13_bias, w2_bias=w2_bias, expert_map=expert_map, **more)
    return out.cpu(), truth.sum(1) if finalize else truth


@pytest.mark.parametrize("plan", PLANS)
def test_worked_example_of_the_two_products(plan: Plan, device: torch.device) -> None:
    """H = 2, I = 1, silu: x [1, 2] meets [[3, 4]]: silu(11) = 10.9998; w2 [[1], [2]] and weight 0.5 give [5.4999, 10.9998]."""
    shape = ExpertsShape(dtype=torch.float32, hidden=2, inter=1, slots=1, num_local=1, map_size=None, kind="silu")
    w13, w2 = torch.tensor([[[3.0, 4.0]]], device=device), torch.tensor([[[1.0], [2.0]]], device=device)
    out = torch.full((1, 2), torch.nan, device=device)
    ids, weights = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.tensor([[0.5]], device=device)
    Experts(shape, plan, w13=w13, w2=w2)(torch.tensor([[1.0, 2.0]], device=device), out, ids=ids, weights=weights)
    torch.testing.assert_close(out.cpu(), torch.tensor([[5.4999, 10.9998]]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        {"tokens": 1, "hidden": 32, "inter": 32},  # whole blocks
        {"tokens": 2, "hidden": 193, "inter": 33},  # nothing divides
        {"tokens": 5, "experts": 1, "top_k": 1, "kind": "relu2", "bias": torch.float32},  # no gate; one expert takes all
        {"tokens": 2, "experts": 60, "top_k": 8, "kind": "geglu", "finalize": False},
        {"tokens": 40, "experts": 3, "top_k": 1, "inter": 16},  # several row tiles an expert; K = 1 needs no finalize
        {"kind": "swiglu", "limit": 0.5, "alpha": 1.702, "beta": 1.0, "bias": torch.float16},  # gpt-oss's form, clamped hard
        {"kind": "silu", "limit": 0.5},
        {"kind": "gelu"},
        {"tokens": 4, "top_k": 1, "weight_on_input": True, "bias": torch.float32},
    ],
    ids=str,
)
def test_agrees_with_truth(plan: Plan, dtype: torch.dtype, case: dict[str, Any], device: torch.device) -> None:
    got, truth = one(plan, device, dtype=dtype, **case)
    assert relative_error(got, truth) < BOUND[dtype]


@pytest.mark.parametrize(
    "case",
    [
        {"tokens": 5, "hidden": 48, "inter": 40},  # rows of 16-byte multiples, as the copy engine needs; blocks are cut
        {"tokens": 40, "experts": 3, "top_k": 1, "inter": 16},  # a tile past an expert's end reads the next one's rows
        {"tokens": 2, "experts": 60, "top_k": 8, "kind": "relu2", "finalize": False},
    ],
    ids=str,
)
def test_the_copy_engine_brings_the_same(case: dict[str, Any], device: torch.device) -> None:
    got, truth = one(COPIED, device, **case)
    assert relative_error(got, truth) < 1e-5


def test_the_copy_engine_refuses_rows_that_it_can_not_move(device: torch.device) -> None:
    with pytest.raises(ValueError, match="up product: rows of 50 x 4 bytes are no multiple of the 16 bytes"):
        one(COPIED, device, hidden=50)


FP8 = {  # weights in blocks of 128 x 128; up's block_n is the group of columns that act's scales cover
    "decode": DecodePlan(up=DecodeTile(block_n=16, block_k=128, warps=4), down=DecodeTile(block_n=16, block_k=128, warps=4)),
    "plain": SortedPlan(
        block_m=16,
        group_m=2,
        swap_ab=False,
        up=ProductTile(block_n=64, block_k=128, warps=4, stages=2),
        down=ProductTile(block_n=64, block_k=64, warps=4, stages=2),
    ),
    "swapped": SortedPlan(
        block_m=16,
        group_m=1,
        swap_ab=True,
        up=ProductTile(block_n=128, block_k=128, warps=4, stages=2, tma=True),
        down=ProductTile(block_n=128, block_k=128, warps=4, stages=2, tma=True, persistent=True),
    ),
}


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize(
    ("hidden", "inter", "kind"),
    [
        (256, 128, "swiglu"),  # whole scale blocks
        (208, 256, "swiglu"),  # a partial last block of columns in w13 and of rows in w2
        (128, 128, "relu2"),  # no gate
    ],
)
def test_fp8_blocks(name: str, hidden: int, inter: int, kind: str, device: torch.device) -> None:
    """Scales lie between 0.5 and 1.5, each its own: one taken from a neighbouring block is far outside the bound.

    The small path multiplies in fp32. The others quantise rows to fp8, 3 bits of mantissa: 4 to 6% through two products, and
    9% under the interpreter, which rounds towards zero.
    """
    torch.manual_seed(hidden + inter)
    experts, tokens, rows = 3, 4, inter * (2 if kind == "swiglu" else 1)

    def blocks(size: int) -> int:
        return -(-size // 128)

    x = torch.randn(tokens, hidden)
    w13 = (torch.randn(experts, rows, hidden) * 0.2).to(torch.float8_e4m3fn)
    w2 = (torch.randn(experts, hidden, inter) * 0.2).to(torch.float8_e4m3fn)
    s13 = torch.rand(experts, blocks(rows), blocks(hidden)) + 0.5
    s2 = torch.rand(experts, blocks(hidden), blocks(inter)) + 0.5
    ids = torch.tensor([[0, 1], [2, 1], [-1, 2], [1, 1]], dtype=torch.int32)
    weights = torch.rand(tokens, 2)
    shape = ExpertsShape(dtype=torch.float32, hidden=hidden, inter=inter, slots=2, num_local=experts, map_size=None, kind=kind, fp8=True)
    layer = Experts(shape, FP8[name], w13=w13.to(device), w2=w2.to(device), w13_scale=s13.to(device), w2_scale=s2.to(device))
    out = torch.full((tokens, hidden), torch.nan, device=device)
    layer(x.to(device), out, ids=ids.to(device), weights=weights.to(device))

    def plain(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        return w.float() * wide[:, : w.shape[1], : w.shape[2]]

    truth = experts_truth(x, plain(w13, s13), plain(w2, s2), ids, weights, kind=kind).sum(1)
    bound = 1e-5 if name == "decode" else 0.12 if device.type == "cpu" else 0.08
    assert relative_error(out.cpu(), truth) < bound


@pytest.mark.parametrize("name", FP8)
def test_fp8_rows_keep_to_themselves(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of zeros, as a padded graph brings, gives zeros; no row's bits depend on what its neighbours hold, though their last
    block of columns is a partial one."""
    torch.manual_seed(0)
    experts, hidden, inter = 2, 144, 128
    w13 = (torch.randn(experts, 2 * inter, hidden, device=device) * 0.2).to(torch.float8_e4m3fn)
    w2 = (torch.randn(experts, hidden, inter, device=device) * 0.2).to(torch.float8_e4m3fn)
    scales = {"w13_scale": torch.rand(experts, 2, 2, device=device) + 0.5, "w2_scale": torch.rand(experts, 2, 1, device=device) + 0.5}
    shape = ExpertsShape(
        dtype=torch.float32, hidden=hidden, inter=inter, slots=2, num_local=experts, map_size=None, kind="swiglu", fp8=True
    )
    layer = Experts(shape, FP8[name], w13=w13, w2=w2, **scales)
    ids = torch.tensor([[0, 1], [1, -1], [0, 1], [0, 1]], dtype=torch.int32, device=device)
    weights = torch.rand(4, 2, device=device)
    x = torch.randn(4, hidden, device=device)
    x[1] = 0.0
    blocks: list[tuple[Scratch, torch.Tensor]] = []
    pointers = Scratch.pointers

    def kept(self: Scratch, *arguments: Any, **named: Any) -> Any:
        found = pointers(self, *arguments, **named)
        blocks.append((self, found[0]))
        return found

    monkeypatch.setattr(Scratch, "pointers", kept)
    outs = []
    for held in (1e6, torch.nan):
        x[[0, 3]] = held
        out = torch.full((4, hidden), torch.nan, device=device)
        layer(x, out, ids=ids, weights=weights)
        outs.append(out[1:3].cpu())
    if name != "decode":  # a scale of zero would make NaN of zeros, which the interpreter's fp8 doesn't show
        scratch, block = blocks[0]
        assert torch.isclose(scratch.view(block, "act_scale").cpu(), torch.tensor(1e-10 / 448), rtol=1e-3, atol=0.0).any()
    assert not outs[0][0].any()
    assert outs[0][1].isfinite().all()
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("finalize", [True, False])
def test_what_is_no_number_stays_in_its_row(plan: Plan, bad: float, finalize: bool, device: torch.device) -> None:
    """A neighbour's hidden state, beside a row that has a remote slot."""
    torch.manual_seed(0)
    shape = ExpertsShape(
        dtype=torch.float32, hidden=33, inter=40, slots=2, num_local=3, map_size=None, kind="swiglu", up_bias=torch.float32,
        down_bias=torch.float32, finalize=finalize,
    )  # fmt: skip
    w13, w2 = torch.randn(3, 80, 33, device=device), torch.randn(3, 33, 40, device=device)
    w13_bias, w2_bias = torch.randn(3, 80, device=device), torch.randn(3, 33, device=device)
    layer = Experts(shape, plan, w13=w13, w2=w2, w13_bias=w13_bias, w2_bias=w2_bias)
    ids = torch.tensor([[0, 1], [0, -1], [1, 0]], dtype=torch.int32)
    x, weights = torch.randn(3, 33), torch.rand(3, 2)
    truth = experts_truth(x, w13.cpu(), w2.cpu(), ids, weights, kind="swiglu", w13_bias=w13_bias.cpu(), w2_bias=w2_bias.cpu())[1]
    x[[0, 2]] = bad
    out = torch.full((3, 33) if finalize else (3, 2, 33), torch.nan, device=device)
    layer(x.to(device), out, ids=ids.to(device), weights=weights.to(device))
    assert relative_error(out[1].cpu(), truth.sum(0) if finalize else truth) < 1e-5
    assert not out[[0, 2]].isfinite().any(), "and there it shows"


def test_fp8_needs_scale_blocks_that_gate_and_up_share(device: torch.device) -> None:
    shape = ExpertsShape(dtype=torch.float32, hidden=128, inter=64, slots=1, num_local=1, map_size=None, kind="swiglu", fp8=True)
    with pytest.raises(ValueError, match="intermediate size 64 is no multiple of 128"):
        Experts(shape, FP8["decode"], w13=torch.zeros(1, device=device), w2=torch.zeros(1, device=device))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("finalize", [True, False])
def test_remote_and_repeated_ids(plan: Plan, finalize: bool, device: torch.device) -> None:
    """Row [5, 2, 5, 7]: both 5s count. Then -1, an id past the end, and a row without a single local expert."""
    ids = torch.tensor([[5, 2, 5, 7], [-1, 0, 8, 1 << 20], [-1, -1, 9, 10]], dtype=torch.int64)
    got, truth = one(plan, device, experts=8, ids=ids, finalize=finalize)
    assert relative_error(got, truth) < 1e-5
    assert torch.equal(got[2], torch.zeros_like(got[2]))


@pytest.mark.parametrize("plan", PLANS)
def test_a_share_of_the_experts(plan: Plan, device: torch.device) -> None:
    """Rank 1 of 2, 6 experts placed round robin: it holds 1, 3, 5. A global id taken for a row would be wrong here."""
    expert_map = torch.tensor([-1, 0, -1, 1, -1, 2], dtype=torch.int32)
    ids = torch.tensor([[1, 2], [5, 3], [0, 4]], dtype=torch.int32)
    got, truth = one(plan, device, experts=3, expert_map=expert_map, ids=ids)
    assert relative_error(got, truth) < 1e-5
    assert torch.equal(got[2], torch.zeros_like(got[2]))


@pytest.mark.parametrize("plan", PLANS)
def test_no_tokens_then_some(plan: Plan, device: torch.device) -> None:
    shape = ExpertsShape(dtype=torch.float32, hidden=16, inter=16, slots=1, num_local=1, map_size=None, kind="silu")
    w13, w2 = torch.randn(1, 16, 16, device=device), torch.randn(1, 16, 16, device=device)
    layer = Experts(shape, plan, w13=w13, w2=w2)
    for tokens in (0, 2):
        x, out = torch.randn(tokens, 16, device=device), torch.full((tokens, 16), torch.nan, device=device)
        layer(x, out, ids=torch.zeros(tokens, 1, dtype=torch.int32, device=device), weights=torch.ones(tokens, 1, device=device))
        truth = torch.nn.functional.silu(x @ w13[0].T) @ w2[0].T
        torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_kept_of_a_token_count_is_kept_once_for_all_layers(plan: Plan, device: torch.device) -> None:
    """A server meets thousands of token counts in its dozens of equal layers, whose host memory must not grow with both."""
    shape = ExpertsShape(dtype=torch.float32, hidden=16, inter=24, slots=1, num_local=1, map_size=None, kind="silu")
    w13, w2 = torch.randn(1, 24, 16, device=device), torch.randn(1, 16, 24, device=device)
    layers = [Experts(shape, plan, w13=w13, w2=w2) for _ in range(3)]
    before = _alive(Scratch)
    for tokens in range(1, 5):
        x, ids = torch.randn(tokens, 16, device=device), torch.zeros(tokens, 1, dtype=torch.int32, device=device)
        for layer in layers:
            layer(x, torch.empty_like(x), ids=ids, weights=torch.ones(tokens, 1, device=device))
    assert _alive(Scratch) - before == 4


def test_token_counts_of_which_something_is_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_dist_kernels.plan, "MAX_LAYOUTS", 3)
    layouts = Layouts(ExpertsShape(dtype=torch.float32, hidden=16, inter=24, slots=2, num_local=1, map_size=None, kind="silu"), PLAIN)
    before = _alive(Scratch)
    assert [layouts(tokens, routed=True).parts["slots"][0] for tokens in (*range(1, 9), 2)] == [*range(2, 17, 2), 4]
    assert 1 <= _alive(Scratch) - before <= 3


def _alive(kind: type) -> int:
    gc.collect()
    return sum(isinstance(found, kind) for found in gc.get_objects())


@pytest.mark.parametrize("plan", PLANS)
def test_as_many_tokens_with_ids_and_with_logits_need_other_scratch(plan: Plan, device: torch.device) -> None:
    """Two experts, one slot each way: logits that choose expert 1 and ids that name it, with the same weights of one."""
    torch.manual_seed(0)
    shape = ExpertsShape(dtype=torch.float32, hidden=16, inter=16, slots=1, num_local=2, map_size=None, kind="silu")
    router = RouterShape(
        logits_dtype=torch.float32, num_experts=2, top_k=1, n_group=None, topk_group=None, num_shared=0, scoring="softmax", renormalize=True,
        scale=1.0, bias=False,
    )  # fmt: skip
    layer = Experts(shape, plan, w13=torch.randn(2, 16, 16, device=device), w2=torch.randn(2, 16, 16, device=device), router=router)
    x, (first, second) = torch.randn(3, 16, device=device), torch.full((2, 3, 16), torch.nan, device=device)
    layer(x, first, ids=torch.ones(3, 1, dtype=torch.int32, device=device), weights=torch.ones(3, 1, device=device))
    layer(x, second, logits=torch.tensor([[0.0, 9.0]] * 3, device=device))
    assert torch.equal(first, second)


@pytest.mark.parametrize("plan", PLANS)
def test_strided_and_misaligned_tensors_and_output_in_place(plan: Plan, device: torch.device) -> None:
    shape = ExpertsShape(dtype=torch.float32, hidden=16, inter=16, slots=2, num_local=2, map_size=None, kind="silu")
    w13, w2 = torch.randn(2, 16, 16, device=device), torch.randn(2, 16, 16, device=device)
    layer = Experts(shape, plan, w13=w13, w2=w2)
    wide = torch.randn(4, 33, device=device)
    x = wide[:, 1:17]  # rows 33 floats apart, starting 4 bytes in
    ids, weights = torch.tensor([[0, 1, 9, 9]] * 4, device=device)[:, :2], torch.rand(4, 2, device=device)
    truth = experts_truth(x.cpu(), w13.cpu(), w2.cpu(), ids.cpu(), weights.cpu(), kind="silu").sum(1)
    guard = wide.clone()
    layer(x, x, ids=ids, weights=weights)
    assert relative_error(x.cpu(), truth) < 1e-5
    assert torch.equal(wide[:, 17:], guard[:, 17:])
    assert torch.equal(wide[:, 0], guard[:, 0])


def test_refusals_name_value_and_limit(device: torch.device) -> None:
    shape = ExpertsShape(dtype=torch.float32, hidden=16, inter=16, slots=1, num_local=2, map_size=None, kind="swiglu")
    w13, w2 = torch.zeros(2, 32, 16, device=device), torch.zeros(2, 16, 16, device=device)
    with pytest.raises(ValueError, match=r"w13 is \(2, 16, 16\).*must be \(2, 32, 16\)"):
        Experts(shape, PLAIN, w13=w13[:, :16].contiguous(), w2=w2)
    with pytest.raises(ValueError, match=r"w2 is .*strided"):
        Experts(shape, PLAIN, w13=w13, w2=w2.transpose(1, 2))
    with pytest.raises(ValueError, match="expert_map was given; the shape's map_size is None"):
        Experts(shape, PLAIN, w13=w13, w2=w2, expert_map=torch.zeros(0, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="w13_bias is missing"):
        Experts(ExpertsShape(**(vars(shape) | {"up_bias": torch.float32})), PLAIN, w13=w13, w2=w2)
    layer = Experts(shape, PLAIN, w13=w13, w2=w2)
    x = torch.zeros(1, 16, device=device)
    with pytest.raises(ValueError, match="give logits, or both ids and weights"):
        layer(x, torch.empty_like(x), ids=torch.zeros(1, 1, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="bound without a router; give ids and weights"):
        layer(x, torch.empty_like(x), logits=torch.zeros(1, 2, device=device))
