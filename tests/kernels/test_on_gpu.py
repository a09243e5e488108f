"""What only a card can show of the kernels: widths past 31 bits and 16-bit tile counts, and rows that do not depend on their batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import moe_dist as md
from moe_dist.backends.base import MoEProblem
from moe_dist.backends.reference import compute
from moe_dist.backends.triton_tactics import decode_tiles, sorted_tiles, specialised
from moe_dist.tuning.probe import GuardedOutputs
from moe_dist.tuning.problem import Tactic

pytestmark = pytest.mark.gpu
FP8 = md.QuantConfig(weight="fp8", granularity="block", block_shape=(128, 128))
QUANTS = {"bf16": md.QuantConfig(), "fp8": FP8}
BOUND = {"bf16": 0.01, "fp8": 0.06}  # errors of the row norm that rounding explains, several times over


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def draw(experts: int, slots: int, tokens: int, hidden: int, device: torch.device) -> md.MoEActivationPack:
    generator = torch.Generator(device).manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator, device=device).topk(slots, dim=1).indices if experts > slots else None
    if ids is None:
        ids = torch.arange(slots, device=device).expand(tokens, -1)
    return md.MoEActivationPack(
        hidden_states=torch.randn(tokens, hidden, generator=generator, device=device, dtype=torch.bfloat16),
        topk_ids=ids.int().contiguous(),
        topk_weights=torch.rand(tokens, slots, generator=generator, device=device) + 0.1,
    )


def error_at(operation: md.MoEOperation, acts: md.MoEActivationPack, out: torch.Tensor, rows: list[int]) -> float:
    at = torch.tensor(rows, device=out.device)
    assert acts.topk_ids is not None
    assert acts.topk_weights is not None
    truth = compute(
        operation.layer,
        md.MoEActivationPack(hidden_states=acts.hidden_states[at], topk_ids=acts.topk_ids[at], topk_weights=acts.topk_weights[at]),
    )
    return float(((out[at].float() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).max())


WIDE = {
    "bf16": [
        sorted_tiles(16, (64, 128, 4, 3, ""), (128, 64, 4, 4, ""), swap_ab=True),  # pointers; 70,000 row tiles of 16 rows
        sorted_tiles(128, (128, 64, 8, 4, "t"), (256, 64, 8, 4, "tp"), group_m=8),  # the copy engine; persistent
        specialised(gather=True),
    ],
    "fp8": [
        sorted_tiles(16, (64, 128, 4, 4, ""), (128, 64, 4, 4, ""), swap_ab=True),
        sorted_tiles(64, (64, 128, 4, 4, "t"), (128, 64, 4, 5, "t"), group_m=8),
        specialised(gather=False),
        specialised(gather=True),
    ],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("quant", QUANTS)
def test_right_beyond_31_bits_and_65535_tiles(quant: str, device: torch.device) -> None:
    """w13 has 2.3e9 elements, rows of y 4.9e9, 70,000 row tiles of 16 rows; rows beside each edge, and the last, against truth."""
    experts, slots, hidden, inter, tokens = 512, 8, 4352, 512, 140_000
    assert experts * 2 * inter * hidden > 2**31
    assert tokens * slots * hidden > 2**32
    assert tokens * slots // 16 > 65_535
    config = md.MoEConfig(
        routing=md.RoutingConfig(experts, slots), experts=md.ExpertConfig(hidden_size=hidden, intermediate_size=inter), quant=QUANTS[quant]
    )
    problem = MoEProblem.of(config, routed=True)
    operation = md.MoEOperation(problem, md.make_random_weights(problem, 0, 0, device), device, md.BackendOptions((md.TritonConfig(),)))
    acts = draw(experts, slots, tokens, hidden, device)
    edges = [2**31 // (slots * hidden), 2**32 // (slots * hidden)]
    rows = [0, *(edge + near for edge in edges for near in (-1, 0, 1)), tokens - 1]
    for tactic in WIDE[quant]:
        outputs = GuardedOutputs((tokens, hidden), torch.bfloat16, 1, device)
        operation.bind(tactic)(acts, outputs.tensors[0])
        assert outputs.fault() is None, (tactic, outputs.fault())
        assert error_at(operation, acts, outputs.tensors[0], rows) < BOUND[quant], tactic
        del outputs
        torch.cuda.empty_cache()
    # The small path's weights lie past 31 bits too.
    few = draw(experts, slots, 4, hidden, device)
    assert few.topk_ids is not None
    few.topk_ids[0] = torch.arange(experts - slots, experts)
    decode = decode_tiles((1, 1024, 1) if quant == "bf16" else (1, 512, 1), (4, 256, 1))
    outputs = GuardedOutputs((4, hidden), torch.bfloat16, 1, device)
    operation.bind(decode)(few, outputs.tensors[0])
    assert outputs.fault() is None
    assert error_at(operation, few, outputs.tensors[0], [0, 1, 2, 3]) < BOUND[quant]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("finalize", [True, False], ids=["finalized", "unfinalized"])
def test_right_where_hidden_states_pass_31_bits(finalize: bool, device: torch.device) -> None:
    """x and the output have 2.2e9 elements."""
    experts, slots, hidden, inter, tokens = 8, 1, 4096, 128, 530_000
    assert tokens * hidden > 2**31
    config = md.MoEConfig(
        routing=md.RoutingConfig(experts, slots),
        experts=md.ExpertConfig(hidden_size=hidden, intermediate_size=inter),
        execution=md.ExecutionConfig(do_finalize=finalize),
    )
    problem = MoEProblem.of(config, routed=True)
    operation = md.MoEOperation(problem, md.make_random_weights(problem, 0, 0, device), device, md.BackendOptions((md.TritonConfig(),)))
    acts = draw(experts, slots, tokens, hidden, device)
    edge = 2**31 // hidden
    for tactic in WIDE["bf16"]:
        outputs = GuardedOutputs((tokens, hidden) if finalize else (tokens, slots, hidden), torch.bfloat16, 1, device)
        operation.bind(tactic)(acts, outputs.tensors[0])
        assert outputs.fault() is None, (tactic, outputs.fault())
        assert error_at(operation, acts, outputs.tensors[0], [0, edge - 1, edge, edge + 1, tokens - 1]) < BOUND["bf16"], tactic


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(("early", "down"), [(2, (2, 512, 2)), (4, (4, 256, 1)), (8, (2, 256, 1))])
def test_weights_asked_for_early_are_those_of_this_call(quant: str, early: int, down: tuple[int, int, int], device: torch.device) -> None:
    """Each call's experts are chosen on the card, by the kernel right before: the second product's early reads must see those, not a call's
    before. 300 calls in one stream, without a wait between them, against the same tactic that reads nothing early: equal bits."""
    config = md.MoEConfig(
        routing=md.RoutingConfig(32, 4), experts=md.ExpertConfig(hidden_size=1024, intermediate_size=768), quant=QUANTS[quant]
    )
    problem = MoEProblem.of(config, routed=False)
    operation = md.MoEOperation(problem, md.make_random_weights(problem, 0, 0, device), device, md.BackendOptions((md.TritonConfig(),)))
    x = torch.randn(2, 1024, device=device, dtype=torch.bfloat16)
    acts = [md.MoEActivationPack(hidden_states=x, router_logits=torch.randn(2, 32, device=device)) for _ in range(300)]
    outs = torch.full((2, 300, 2, 1024), torch.nan, device=device, dtype=torch.bfloat16)
    up = (1, 1024, 1) if quant == "bf16" else (1, 512, 1)
    for at, tactic in enumerate((decode_tiles(up, down), decode_tiles(up, down, early=early))):
        run = operation.bind(tactic)
        for call, pack in enumerate(acts):
            run(pack, outs[at, call])
    assert not outs.isnan().any()
    assert torch.equal(outs[0], outs[1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("quant", QUANTS)
def test_a_row_has_the_same_bits_in_every_batch_of_every_bucket(quant: str, device: torch.device) -> None:
    """One row alone, and first, in the middle or last in batches of each bucket's ends, beside tokens that crowd its experts or others."""
    experts, slots, hidden, inter = 64, 6, 2048, 768
    config = md.MoEConfig(
        routing=md.RoutingConfig(experts, slots),
        experts=md.ExpertConfig(hidden_size=hidden, intermediate_size=inter),
        quant=QUANTS[quant],
        backends=md.TritonConfig(),
        execution=md.ExecutionConfig(batch_invariant=True, tune_max_num_tokens=16384),
    )
    problem = MoEProblem.of(config, routed=True)
    weights = md.make_random_weights(problem, 0, 0, device)
    layer = md.MoELayer(**config)
    row = draw(experts, slots, 1, hidden, device)
    alone = layer((row, weights))
    assert torch.isfinite(alone).all()
    tactics: set[Tactic] = set()
    counts = sorted({end for bucket in problem.ladder.buckets() for end in (bucket.low, bucket.high)} | {7, 513})
    for count in counts:
        for crowded in (False, True):
            acts = draw(experts, slots, count, hidden, device)
            assert acts.topk_ids is not None
            assert acts.topk_weights is not None
            assert row.topk_ids is not None
            assert row.topk_weights is not None
            if crowded:
                acts.topk_ids[:] = row.topk_ids
            for at in sorted({0, count // 2, count - 1}):
                acts.hidden_states[at], acts.topk_ids[at], acts.topk_weights[at] = (
                    row.hidden_states[0],
                    row.topk_ids[0],
                    row.topk_weights[0],
                )
            out = layer((acts, weights))
            for at in sorted({0, count // 2, count - 1}):
                assert torch.equal(out[at], alone[0]), (count, at, crowded)
        tactics.add(layer.lookup(count))
    assert len(tactics) == 1, "one family serves every batch"
