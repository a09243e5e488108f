"""SGLang's experts as a peer of the kernel benchmark: its own path with its Triton kernels done in torch, which no CPU runs."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

import moe_dist as md
from moe_dist.bench import kernel_inputs, peers
from moe_dist.operation import MoEOperation, make_random_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SHAPE = kernel_inputs.Shape("small", 8, 2, 128, 128, ("fp16", "fp8"))


class Card:
    """A device that says what a card says."""

    type = "cuda"


def product(
    A: torch.Tensor, B: torch.Tensor, bias: Any, C: torch.Tensor, A_scale: Any, B_scale: torch.Tensor | None, B_zp: Any,
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, *sort: Any, use_fp8_w8a8: bool, block_shape: list[int] | None, **rest: Any,
) -> None:  # fmt: skip
    """`invoke_fused_moe_kernel` in torch. sort: sorted ids, expert ids, their number, whether weights multiply, slots of a row of A."""
    assert use_fp8_w8a8 == (B.dtype == torch.float8_e4m3fn) == (block_shape == [128, 128])
    *_, weighted, slots, _ = sort
    for slot, expert in enumerate(topk_ids.flatten().tolist()):
        weight = B[expert].float()
        if B_scale is not None:
            weight *= B_scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
        row = weight @ A[slot // slots].float()
        C.view(-1, C.shape[-1])[slot] = row * topk_weights.flatten()[slot] if weighted else row


@pytest.mark.parametrize("dtype", SHAPE.dtypes)  # SGLang's kernels take 16-bit rows; fp16, since its torch activation rounds bf16 twice
def test_the_peer_computes_the_layer_in_memory_of_its_own(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

    monkeypatch.setattr(peers, "_require_installed", lambda package: None)
    monkeypatch.setattr(fused_moe, "invoke_fused_moe_kernel", product)
    monkeypatch.setattr(fused_moe, "moe_align_block_size", lambda ids, block, experts: (ids.flatten(), ids.flatten(), ids.new_ones(1)))
    monkeypatch.setattr(
        fused_moe, "outplace_fused_experts",
        lambda *given, no_combine, **more: fused_moe.fused_experts_impl(*given[:7], False, *given[7:], no_combine=no_combine, **more),
    )  # fmt: skip
    monkeypatch.setattr(fused_moe, "moe_sum_reduce_triton", lambda rows, out, scale: out.copy_(rows.sum(1) * scale))
    monkeypatch.setattr(fused_moe_triton_config, "get_device_name", lambda: "no card")
    problem = SHAPE.problem(dtype, max_num_tokens=8)
    operation = MoEOperation(problem, make_random_weights(problem, 0, 0, torch.device("cpu")), torch.device("cpu"))
    acts = kernel_inputs.draw_inputs(problem, 40, "skewed", 0, torch.device("cpu"))
    before = acts.hidden_states.clone()
    with contextlib.ExitStack() as open_until:
        (peer,) = peers._open_sglang(Card(), 40, open_until)  # type: ignore[arg-type]
        assert peer.why_not(problem, 40) is None
        out = peer.bind(operation.layer)(acts)
    assert torch.equal(acts.hidden_states, before)
    assert out.data_ptr() != acts.hidden_states.data_ptr()
    assert kernel_inputs.error_of(out, kernel_inputs.truth_of(operation.layer, acts)) < 0.01


def test_what_the_peer_is_not_called_for() -> None:
    config = SHAPE.config("fp16", max_num_tokens=8)
    tensor = dataclasses.replace(config, quant=md.QuantConfig(weight="fp8", granularity="tensor"))
    assert "fp8 in blocks alone" in str(peers._plain_or_blocks(md.MoEProblem.of(tensor, routed=True), 1))


def test_a_missing_kernel_package_is_named() -> None:
    """These tests' environment has SGLang without it, as no CPU needs it."""
    with peers.open_peers(["sglang"], torch.device("cpu"), 8) as found:
        assert found.peers == ()
        assert found.missing == {"sglang": "ModuleNotFoundError: sgl_kernel is not installed here"}
