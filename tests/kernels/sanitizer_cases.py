"""Each path of the experts once, on small shapes, for compute-sanitizer to watch: test_sanitizer_gpu.py runs this in a process of its own.

    python sanitizer_cases.py all                 every case, against fp32 truth on poisoned outputs
    python sanitizer_cases.py specialised         the warp-specialised products alone
    python sanitizer_cases.py planted             one store past the end of a tensor, which the tool must find
    python sanitizer_cases.py all --interpreted   on the CPU, under Triton's interpreter: what that runs, fp32 in bf16's place

Prints a line for each case and "N cases right"; exit status 1 if one is not.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator

if "--interpreted" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
import triton
import triton.language as tl
from moe_dist_kernels import Experts, ExpertsShape, SpecialisedPlan, ahead, is_interpreted
from truth import experts_truth, relative_error

from moe_dist.backends.triton_tactics import decode_tiles, plan_of, sorted_tiles, specialised
from moe_dist.tuning.probe import GuardedOutputs
from moe_dist.tuning.problem import Tactic

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
HIDDEN = 208  # whole blocks of no tile, nor of scales
# Errors of the row norm that rounding explains, several times over; the interpreter rounds fp8 towards zero.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.004, torch.float8_e4m3fn: 0.12 if is_interpreted() else 0.08}


@dataclasses.dataclass(frozen=True)
class Case:
    """held: of weights. mapped: a rank that holds every second expert."""

    tactic: Tactic
    dtype: torch.dtype
    held: torch.dtype
    mapped: bool
    tokens: int = 5
    experts: int = 4
    top_k: int = 2
    hidden: int = HIDDEN
    inter: int = 128 if is_interpreted() else 256

    @property
    def shape(self) -> ExpertsShape:
        return ExpertsShape(
            dtype=self.dtype,
            hidden=self.hidden,
            inter=self.inter,
            slots=self.top_k,
            num_local=self.experts,
            map_size=2 * self.experts if self.mapped else None,
            kind="swiglu",
            limit=6.0,
            fp8=self.held is torch.float8_e4m3fn,
        )


def cases(which: str) -> Iterator[Case]:
    bf16, fp16, fp8 = torch.float32 if is_interpreted() else torch.bfloat16, torch.float16, torch.float8_e4m3fn
    if which == "all":
        plain = [
            decode_tiles((16, 128, 4), (16, 64, 4)),
            decode_tiles((16, 128, 4), (16, 64, 4), early=2),  # weights asked for before the first product is done
            sorted_tiles(16, (64, 64, 4, 3, ""), (64, 64, 4, 3, "")),
            sorted_tiles(16, (64, 64, 4, 3, ""), (128, 64, 4, 3, "t"), swap_ab=True),
            sorted_tiles(64, (64, 64, 4, 3, "tp"), (128, 64, 4, 3, "tp"), group_m=8),
        ]
        scaled = [
            decode_tiles((16, 128, 4), (16, 128, 4)),
            decode_tiles((16, 128, 4), (16, 128, 4), early=2),
            sorted_tiles(16, (64, 128, 4, 3, ""), (64, 64, 4, 3, "")),
            sorted_tiles(16, (64, 128, 4, 3, ""), (128, 64, 4, 3, "t"), swap_ab=True),
            sorted_tiles(64, (64, 128, 4, 3, "t"), (128, 64, 4, 3, "tp"), group_m=8),
        ]
        for dtype, held, tactics in ((bf16, bf16, plain), (fp16, fp16, plain), (bf16, fp8, scaled)):
            sizes = {} if held is fp8 else {"inter": 72}
            for at, tactic in enumerate(tactics):
                if tactic is tactics[-1] and not is_interpreted():  # more tiles than programs, so that persistent ones walk
                    sizes |= {"tokens": 40, "experts": 200, "top_k": 8}
                yield Case(tactic, dtype, held, mapped=bool(at % 2), **sizes)
    if is_interpreted():
        return
    for dtype, held, gather in ((bf16, fp8, False), (bf16, fp8, True), (bf16, bf16, True), (fp16, fp16, True)):
        tactic = specialised(gather=gather)
        # Tiles in fixed steps, full ones and such of a few rows, with columns of a last one past the end.
        sizes = {"hidden": 384, "inter": 256} if held is fp8 else {"hidden": 256, "inter": 200}
        yield Case(tactic, dtype, held, mapped=True, tokens=300, experts=2, top_k=2, **sizes)
        # Tiles from a counter: 288 of a few rows, so that programs take two or three each and their warps meet over maxima again.
        yield Case(tactic, dtype, held, mapped=False, tokens=40, experts=48, top_k=8, hidden=768, inter=768)


def error(case: Case) -> float:
    """Of one run, as `relative_error`. AssertionError: an element not written, a byte written outside, a token without experts not zero."""
    torch.manual_seed(0)
    x = torch.randn(case.tokens, case.hidden).to(case.dtype)
    w13 = (torch.randn(case.experts, 2 * case.inter, case.hidden) * 0.2).to(case.held)
    w2 = (torch.randn(case.experts, case.hidden, case.inter) * 0.2).to(case.held)
    scales = [torch.rand(w.shape[0], *(-(-size // 128) for size in w.shape[1:])) + 0.5 if case.shape.fp8 else None for w in (w13, w2)]
    slots = torch.arange(2 * case.experts, dtype=torch.int32)
    expert_map = torch.where(slots % 2 == 1, slots // 2, -1).int() if case.mapped else None
    ids = torch.stack([torch.randperm(len(slots) if case.mapped else case.experts)[: case.top_k] for _ in range(case.tokens)]).int()
    ids[-1] = -1  # a token hit by no expert
    weights = torch.rand(case.tokens, case.top_k)
    on = {"w13": w13, "w2": w2, "w13_scale": scales[0], "w2_scale": scales[1], "expert_map": expert_map}
    placed = {name: None if tensor is None else tensor.to(DEVICE) for name, tensor in on.items()}
    layer = Experts(case.shape, plan_of(case.tactic), **placed, pdl=not is_interpreted())  # type: ignore[arg-type]
    outputs = GuardedOutputs((case.tokens, case.hidden), case.dtype, 1, DEVICE)
    layer(x.to(DEVICE), outputs.tensors[0], ids=ids.to(DEVICE), weights=weights.to(DEVICE))
    assert outputs.fault() is None, outputs.fault()
    assert not outputs.tensors[0][-1].any(), "the token hit by no expert"
    full = [
        w.float() if s is None else w.float() * s.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : w.shape[1], : w.shape[2]]
        for w, s in zip((w13, w2), scales, strict=True)
    ]
    truth = experts_truth(x, *full, ids, weights, kind="swiglu", limit=6.0, expert_map=expert_map).sum(1)
    return relative_error(outputs.tensors[0].cpu(), truth)


@triton.jit
def planted_kernel(out_ptr, SIZE: tl.constexpr):
    tl.store(out_ptr + SIZE, 1.0)


def main(which: str) -> int:
    if which == "planted":
        planted_kernel[(1,)](torch.empty(1024, device=DEVICE), SIZE=1024)
        torch.cuda.synchronize()  # raises, unless nobody looks
        return 0
    chosen = list(cases(which))
    if not is_interpreted():
        # In parallel, and both runs of the test find them: one by one they would take a minute or two.
        work = [ahead.Variant(shape=case.shape, plan=plan_of(case.tactic), pdl=True) for case in chosen]
        ahead.compile_ahead(work, ahead.target_of(DEVICE), processes=min(16, len(os.sched_getaffinity(0))))
    right = 0
    for case in chosen:
        bound = BOUND[case.dtype if case.held is torch.float8_e4m3fn and case.tactic["path"] == "decode" else case.held]
        found = error(case)
        right += found < bound
        print(
            f"{'right' if found < bound else 'WRONG'} {found:.5f} of {bound}: {case.dtype} {case.held} {dict(case.tactic.params)}",
            flush=True,
        )
    print(f"{right} of {len(chosen)} cases right, {sum(isinstance(plan_of(case.tactic), SpecialisedPlan) for case in chosen)} specialised")
    return int(right < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
