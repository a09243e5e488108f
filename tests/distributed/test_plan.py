"""Agreement as pure functions: whoever holds the same words makes the same plan, and what can't be agreed on has a name."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from moe_dist.distributed.plan import (
    Answer,
    CellAnswer,
    CellOffer,
    Offer,
    Plan,
    Proposal,
    agree_offers,
    agree_plan,
    hit_digest,
    lacked_hits,
)
from moe_dist.errors import NothingRunnable, SettingsDiffer
from moe_dist.tuning.problem import Bucket, Cell, Problem, Tactic

PLAIN, FAST, ODD = (Tactic.of("fake", name=name) for name in ("plain", "fast", "odd"))
SETTINGS = {"strategy": "reduce", "ladder": (1, 4)}
ENVIRONMENT = {"torch": "2.13", "device_name": "H200"}


def cell(name: str, high: int = 1) -> Cell:
    return Cell(Problem.of("fake", name=name), "eager", Bucket(1, high))


def offer(cells: dict[Cell, CellOffer] | None = None, **changed: Any) -> Offer:
    return dataclasses.replace(Offer(SETTINGS, ENVIRONMENT, cells or {}), **changed)


def offered(*candidates: Tactic, default: Tactic = PLAIN, hit: bytes | None = None, hit_epoch: int = 0) -> CellOffer:
    return CellOffer(default, candidates or (PLAIN, FAST), hit, hit_epoch)


def propose(*offers: Offer) -> Proposal:
    return agree_offers(offers, range(len(offers)))


def planned(proposal: Proposal, *answers: Answer) -> Plan:
    return agree_plan(proposal, answers, range(len(answers)))


def yes(proposal: Proposal) -> Answer:
    return Answer(tuple(CellAnswer((None,) * len(c.hits), (None,) * len(c.candidates)) for c in proposal.cells))


# -- agree 1 -----------------------------------------------------------------------------------------------------------


def test_problems_and_candidates_are_the_union_of_all_ranks() -> None:
    proposal = propose(offer({cell("a"): offered(PLAIN, FAST)}), offer({cell("a"): offered(ODD), cell("b"): offered()}), offer())
    assert {c.cell for c in proposal.cells} == {cell("a"), cell("b")}
    candidates = {c.cell: c.candidates for c in proposal.cells}
    assert candidates[cell("a")] == (PLAIN, FAST, ODD), "the default first, then by name"


def test_the_order_of_ranks_and_of_their_cells_changes_nothing() -> None:
    cells = {cell(name, high): offered(FAST, ODD) for name in "ab" for high in (1, 4)}
    offers = [offer(cells), offer(dict(reversed(cells.items()))), offer({cell("c"): offered()})]
    assert len({tuple(propose(*order).cells) for order in itertools.permutations(offers)}) == 1


def test_hits_are_preferred_by_newest_epoch_then_by_digest_and_named_once() -> None:
    old, new, other = b"old", b"new", b"other"
    proposal = propose(
        offer({cell("a"): offered(hit=old, hit_epoch=3)}),
        offer({cell("a"): offered(hit=new, hit_epoch=7)}),
        offer({cell("a"): offered(hit=other, hit_epoch=7)}),
        offer({cell("a"): offered(hit=new, hit_epoch=2)}),
        offer({cell("a"): offered()}),
    )
    assert proposal.cells[0].hits == (new, other, old)


def test_of_many_hits_the_preferred_few_are_proposed() -> None:
    """Where each of 100 ranks holds an entry of its own, nobody is asked about a hundred."""
    offers = [offer({cell("a"): offered(hit=b"%03d" % rank, hit_epoch=rank // 98)}) for rank in range(100)]
    assert propose(*offers).cells[0].hits == (b"098", b"099", b"000", b"001")


def test_hits_that_a_rank_lacks_are_sent_by_the_first_that_holds_them() -> None:
    both, first, second = ({cell("a"): offered(hit=b"a"), cell("b"): offered(hit=hit)} for hit in (None, b"x", b"y"))
    offers = [offer(both), offer(first), offer(second), offer(first)]
    assert lacked_hits(propose(*offers), offers) == {b"x": 1, b"y": 2}, "all hold the hit of a"
    # Who has no such problem serves the same table, and so needs the entry too.
    absent = [offer(), offer(first)]
    assert lacked_hits(propose(*absent), absent) == {b"a": 1, b"x": 1}
    assert lacked_hits(propose(*offers[1::2]), offers[1::2]) == {}
    assert list(lacked_hits(propose(*offers), offers)) == list(lacked_hits(propose(*offers[::-1]), offers[::-1])), "one order on all ranks"


def test_the_least_workspace_limit_holds_for_all() -> None:
    assert propose(offer(workspace_limit=300), offer(), offer(workspace_limit=200)).workspace_limit == 200
    assert propose(offer(), offer()).workspace_limit is None


def test_the_newest_epoch_that_is_served_and_whether_all_serve_one_are_agreed() -> None:
    proposal = propose(offer(epoch=4, epoch_digest="x"), offer(epoch=5, epoch_digest="x"))
    assert (proposal.served, proposal.base) == (5, "x")
    assert propose(offer(epoch_digest="x"), offer(epoch_digest="z")).base is None, "ranks that serve different tables share no base"


def test_settings_that_differ_name_ranks_fields_and_values() -> None:
    other = offer(settings={**SETTINGS, "strategy": "shard"})
    with pytest.raises(
        SettingsDiffer, match="settings differ between ranks: strategy is 'reduce' on rank 4, 6 and 'shard' on rank 5"
    ) as told:
        agree_offers([offer(), other, offer()], [4, 5, 6])
    assert (told.value.ranks, told.value.fields) == ((5,), ("strategy",))


def test_a_setting_that_one_rank_lacks_differs() -> None:
    with pytest.raises(SettingsDiffer, match=r"ladder is \(1, 4\) on rank 0 and None on rank 1"):
        propose(offer(), offer(settings={"strategy": "reduce"}))


def test_environments_may_differ_only_where_that_is_allowed() -> None:
    offers = [offer(), offer(environment={**ENVIRONMENT, "device_name": "H100"})]
    with pytest.raises(SettingsDiffer, match="environments differ between ranks: device_name is 'H200' on rank 0 and 'H100' on rank 1"):
        agree_offers(offers, [0, 1])
    assert agree_offers(offers, [0, 1], mixed_environments=True).cells == ()


def test_defaults_that_differ_are_an_error_that_names_both() -> None:
    with pytest.raises(SettingsDiffer, match=r"the default is fake\(name=plain\) on rank 0 and fake\(name=fast\) on rank 1") as told:
        propose(offer({cell("a"): offered()}), offer({cell("a"): offered(default=FAST)}))
    assert (told.value.ranks, told.value.fields) == ((0, 1), ("default",))


# -- agree 2 -----------------------------------------------------------------------------------------------------------


def test_a_hit_is_served_only_if_all_that_have_the_problem_accept_it() -> None:
    proposal = propose(offer({cell("a"): offered(hit=b"first", hit_epoch=2)}), offer({cell("a"): offered(hit=b"second", hit_epoch=1)}))
    refuses_first = Answer((CellAnswer(("gone", None), (None, None)),))
    refuses_both = Answer((CellAnswer(("gone", "gone"), (None, None)),))
    abstains = Answer((None,))
    assert planned(proposal, yes(proposal), yes(proposal)).cells[0].serve == b"first"
    assert planned(proposal, yes(proposal), refuses_first).cells[0].serve == b"second"
    assert planned(proposal, yes(proposal), refuses_both).cells[0].serve is None
    assert planned(proposal, yes(proposal), abstains).cells[0].serve == b"first", "an abstention is no objection"


def test_a_candidate_that_one_rank_objects_to_is_out_with_rank_and_reason() -> None:
    proposal = propose(offer({cell("a"): offered()}), offer({cell("a"): offered()}), offer())
    objects = Answer((CellAnswer((), (None, "needs 99 bytes of workspace; the limit is 10")),))
    got = agree_plan(proposal, [yes(proposal), objects, Answer((None,))], [8, 9, 10]).cells[0]
    assert got.tactics == (PLAIN,)
    assert got.rejected == ((FAST, "rank 9: needs 99 bytes of workspace; the limit is 10"),)
    assert got.ranks == (0, 1), "the rank without the problem does not measure it"


def test_a_default_that_fails_somewhere_leaves_the_others_to_time() -> None:
    proposal = propose(offer({cell("a"): offered()}))
    assert planned(proposal, Answer((CellAnswer((), ("no", None)),))).cells[0].tactics == (FAST,)


def test_a_collective_default_that_a_rank_has_no_use_for_stays_untuned() -> None:
    gloo, shot = Tactic.of("gloo", collective=True), Tactic.of("shot", collective=True)
    proposal = propose(offer({cell("a"): offered(gloo, shot, default=gloo)}), offer())
    (got,) = planned(proposal, yes(proposal), Answer((None,))).cells
    assert (got.default, got.serve, got.tactics) == (gloo, None, ())
    assert got.rejected[0] == (gloo, "rank 1: it has no such problem, and this tactic needs every rank")
    with pytest.raises(NothingRunnable, match="gloo: rank 0: no network"):
        planned(proposal, Answer((CellAnswer((), ("no network", None)),)), Answer((None,)))


def test_nothing_runnable_names_the_cell_and_every_reason() -> None:
    proposal = propose(offer({cell("a"): offered()}), offer({cell("a"): offered()}))
    answers = Answer((CellAnswer((), (None, "no shared memory")),)), Answer((CellAnswer((), ("too old a driver", None)),))
    with pytest.raises(NothingRunnable, match="eager tokens 1: no candidate can run on all ranks") as told:
        planned(proposal, *answers)
    assert "fake(name=plain): rank 1: too old a driver; fake(name=fast): rank 0: no shared memory" in str(told.value)


def test_an_accepted_hit_needs_no_candidate() -> None:
    proposal = propose(offer({cell("a"): offered(hit=b"kept")}))
    assert planned(proposal, Answer((CellAnswer((None,), ("no", "no")),))).cells[0].serve == b"kept"


def test_ranks_that_say_the_same_are_asked_once_and_nothing_else_changes() -> None:
    """Decoding gives equal words as one object: the proposal and the plan are those of words that are only equal."""
    cells = {cell("a"): offered(hit=b"x"), cell("b"): offered()}
    same, other = offer(cells), offer({cell("a"): offered(ODD)}, workspace_limit=7)
    shared = propose(same, other, same, same)
    assert shared == propose(offer(dict(cells)), other, offer(dict(cells)), offer(dict(cells)))
    fine, against, absent = yes(shared), Answer((CellAnswer(("no",), (None, None, "no")), None)), Answer((None, None))
    plan = planned(shared, absent, fine, against, fine)
    assert plan == planned(shared, absent, yes(shared), against, yes(shared))
    assert [(got.serve, got.ranks) for got in plan.cells] == [(None, (1, 2, 3)), (None, (1, 3))]
    assert plan.cells[0].rejected == ((ODD, "rank 2: no"),)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_an_offer_survives_its_bytes() -> None:
    whole = Offer(
        settings={"ladder": (1, 4), "budget_s": None, "probe": ("ProbeSpec", (("copies", 4), ("counts", ())))},
        environment={"backends": (("flashinfer", "0.7"),), "sm_count": 132},
        cells={
            cell("a"): offered(PLAIN, FAST, hit=b"\x00\xff", hit_epoch=9),
            cell("b", 4): CellOffer(Tactic.of("x", collective=True, tile=64, fast=True, ratio=0.5, kind=None), ()),
        },
        workspace_limit=1 << 40, epoch=3, epoch_digest="d",
    )  # fmt: skip
    assert Offer.from_bytes(whole.to_bytes()) == whole
    assert Offer.from_bytes(offer().to_bytes()) == offer()


def test_an_answer_survives_its_bytes() -> None:
    whole = Answer((None, CellAnswer((None, "no"), ("why", None, None)), CellAnswer((), ())))
    assert Answer.from_bytes(whole.to_bytes()) == whole


def test_an_entry_is_offered_by_its_digest() -> None:
    assert len(hit_digest(b"entry" * 200)) == 16
    assert hit_digest(b"entry") != hit_digest(b"entrz")


def test_an_answer_without_reasons_is_a_few_bytes_a_cell() -> None:
    answer = Answer((CellAnswer((None,), (None,) * 40),) * 1000)
    assert len(answer.to_bytes()) < 4 * 1000
    assert Answer.from_bytes(answer.to_bytes()) == answer


def test_an_offer_of_many_cells_names_each_problem_and_tactic_once() -> None:
    """10 problems of 14 buckets with 5 candidates: what a rank sends stays small, since it goes through one store."""
    tactics = tuple(Tactic.of("backend_with_a_long_name", block_m=64, block_n=128, index=index) for index in range(5))
    long = {f"field_{index}": "x" * 50 for index in range(10)}
    cells = {
        Cell(Problem.of("moe", layer=layer, **long), "eager", Bucket(1, 1 << power)): CellOffer(tactics[0], tactics)
        for layer in range(10)
        for power in range(14)
    }
    assert len(offer(cells).to_bytes()) < 10 * 800 + 5 * 100 + len(cells) * 12
