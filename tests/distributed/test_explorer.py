"""The protocol, explored: the code itself, over every order of requests, timeouts, crashes and restarts of few ranks, and random ones of eight.

The invariants: no two survivors serve different tables or conclude differently; nobody waits past its cap; a call that failed
changes nothing, nor publishes anything; a late word changes nothing; nobody serves what it can't run. Each guard that they need is
taken out of the code, and the order of requests that then breaks one is shown.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from distributed.explored_rank import Scenario, Violation, stored
from distributed.explorer import Explorer, replace_in_code

from moe_dist.distributed import converge, plan
from moe_dist.distributed import group as group_module
from moe_dist.distributed.group import RankGroup
from moe_dist.distributed.member import Member
from moe_dist.tuning import rounds, tuner

WARM = stored()
LEAVES = ("RankLost", "RankWithdrawn")
RENEWED = (*LEAVES, "SettingsDiffer")
TALKS = ("plain", "all-quick")  # the second talks to peers
RESTARTED: dict[str, Any] = {"reborn": "alone", "slow": 0, "allowed": RENEWED, "says": "started again"}


# slow: see `Scenario`; 100 is every order, however slow each rank is at each wait.
@pytest.mark.parametrize(
    ("scenario", "states"),
    [
        # Two ranks that hit, any of them slow at any wait, and any may crash at any request: the whole protocol.
        (Scenario(entries=WARM, looks=1), 20_170),
        # A whole pass in each strategy, with its own exchanges; the collective tactic adds the arena, counted runs and the reserve step.
        (Scenario(slow=1), 13_280),
        (Scenario(strategy="shard", slow=0), 220),
        (Scenario(strategy="reload", slow=0), 280),
        (Scenario(strategy="reload", slow=0, shared=True), 200),
        # Each slow at one wait, and over its cap at the next look.
        (Scenario(strategy="shard", slow=1, looks=1), 13_000),
        (Scenario(strategy="reload", slow=1, looks=1), 20_000),
        (Scenario(costs=TALKS, slow=0), 470),
        (Scenario(entries=stored(TALKS), costs=TALKS, slow=0), 200),
        # `Tuner.reload`: from one store, from stores of which the leader's alone has the epoch, and where no store has one.
        (Scenario(calls=("reload",), entries=WARM, shared=True, slow=2), 5_560),
        (Scenario(calls=("reload",), entries=WARM, holders=(0,), slow=1), 9_040),
        (Scenario(3, calls=("reload",), entries=WARM, holders=(0,), slow=0), 1_680),
        (Scenario(calls=("reload",), slow=1), 1_820),
        (Scenario(calls=("reload",), calls_of={1: ("pin", "reload")}, entries=WARM, slow=1), 1_820),
        # Passes and tuners one after the other: late words are those of the pass or the attachment before.
        (Scenario(calls=("pass", "pass"), entries=WARM, slow=1, crashes=0), 4_440),
        (Scenario(calls=("pass", "reopen", "pass"), entries=WARM, slow=0, allowed=LEAVES), 250),
        # Who leaves: by an exception of its own, in order before or after a pass, or by closing.
        (Scenario(calls_of={1: ("raises",)}, slow=1, allowed=LEAVES), 2_330),
        (Scenario(calls_of={0: ("raises",)}, slow=1, allowed=LEAVES), 1_780),
        (Scenario(calls_of={1: ("withdraw",)}, entries=WARM, allowed=LEAVES), 50),
        (Scenario(calls=("pass", "pass"), calls_of={1: ("pass", "withdraw")}, entries=WARM, slow=1, allowed=LEAVES), 4_840),
        (Scenario(calls=("pass", "pass"), calls_of={1: ("pass",)}, entries=WARM, slow=1, allowed=LEAVES), 4_850),
        (Scenario(calls=("pass", "pass"), calls_of={0: ("pass",)}, entries=WARM, slow=1, allowed=LEAVES), 4_650),
        # Who moves and does not arrive; who concludes otherwise; who can't run what others hit; who is in another call.
        (Scenario(calls_of={1: ("crawls",)}, slow=0), 230),
        (Scenario(deviates=1, slow=0, allowed=("RankLost", "PassAborted")), 180),
        (Scenario(entries=WARM, without={1: "quick"}, slow=0), 190),
        (Scenario(calls_of={1: ("reload",)}, entries=WARM, allowed=("RankLost", "CallsDiffer")), 790),
        (Scenario(versions={1: "other"}, entries=WARM, slow=1, allowed=("RankLost", "SettingsDiffer")), 180),
        # Started again: one rank alone takes its place over, at every request; all of them meet, whatever is left there.
        (Scenario(entries=WARM, reborn="alone", slow=1, allowed=LEAVES), 14_050),
        (Scenario(entries=WARM, reborn="alone", renewed="other", slow=1, allowed=RENEWED), 14_600),
        (Scenario(entries=WARM, reborn="all", slow=0, allowed=()), 500),
        # Three ranks. Rank 1 alone has the entry: its bytes are sent to the others.
        (Scenario(3, entries=WARM, slow=0), 1_210),
        (Scenario(3, entries=WARM, slow=0, crashes=2, looks=1), 1_860),
        (Scenario(3, entries=WARM, holders=(1,), slow=0), 1_860),
        (Scenario(3, strategy="reload", slow=0), 2_930),
        (Scenario(3, calls_of={2: ("raises",)}, slow=0, allowed=LEAVES), 890),
        (Scenario(3, deviates=2, slow=0, allowed=("RankLost", "PassAborted")), 1_930),
        # Any of the three slow at one wait; and any of them started again alone, at every request of each strategy.
        (Scenario(3, entries=WARM, slow=1, crashes=0, looks=1), 32_000),
        (Scenario(3, entries=WARM, **RESTARTED), 1_830),
        (Scenario(3, entries=WARM, renewed="other", **RESTARTED), 1_600),
        (Scenario(3, strategy="shard", **RESTARTED), 3_650),
        (Scenario(3, strategy="reload", shared=True, **RESTARTED), 3_880),
        (Scenario(3, costs=TALKS, **RESTARTED), 8_000),
        (Scenario(3, calls=("reload",), entries=WARM, holders=(0,), **RESTARTED), 2_520),
        (Scenario(3, calls=("pass", "pass"), entries=WARM, **RESTARTED), 3_640),
        # One comes after its peers have given it up.
        (Scenario(entries=WARM, late=True, slow=1), 3_000),
    ],
)
def test_every_order_keeps_the_invariants(scenario: Scenario, states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Explorer(scenario, monkeypatch) as explored:
        found = explored.all()
    assert found.states > states, f"the exploration lost orders that it had: {found.states}"
    assert len(found.endings) > 1 or scenario.allowed in ((), ("RankLost", "SettingsDiffer")), "both ways out are among the orders"


@pytest.mark.parametrize(
    ("scenario", "orders"),
    [
        (Scenario(8, entries=WARM, crashes=2), 10),
        (Scenario(8, crashes=3), 10),
        (Scenario(8, strategy="shard", crashes=2), 8),
        (Scenario(8, strategy="reload", shared=True, crashes=2), 8),
        (Scenario(8, costs=TALKS, crashes=2), 5),
        (Scenario(8, calls=("reload",), entries=WARM, holders=(0, 3)), 10),
        (Scenario(8, calls_of={5: ("raises",)}, allowed=LEAVES), 8),
        (Scenario(8, deviates=3, allowed=("RankLost", "PassAborted")), 8),
        (Scenario(3, calls=("pass", "pass"), entries=WARM, reborn="alone", crashes=2, allowed=LEAVES), 40),
        (Scenario(3, calls=("pass", "pass"), entries=WARM, reborn="alone", renewed="other", slow=1, crashes=2, allowed=RENEWED), 40),
        (Scenario(3, strategy="shard", reborn="alone", slow=1, allowed=LEAVES), 30),
        (Scenario(3, strategy="reload", shared=True, reborn="alone", slow=1, allowed=LEAVES), 30),
        (Scenario(3, costs=TALKS, reborn="alone", slow=1, allowed=LEAVES), 30),
    ],
)
def test_random_orders_of_more_ranks_keep_the_invariants(scenario: Scenario, orders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Explorer(scenario, monkeypatch) as explored:
        found = explored.some(orders, seed=7)
    assert sum(found.endings.values()) == orders


# What is taken out of the code: (where, function, text, what stands instead). The scenario keeps all invariants with it.
GUARDS: dict[str, tuple[Scenario, list[tuple[Any, str, str, str]], str]] = {
    "deadline": (
        Scenario(entries=WARM, slow=0),
        [(RankGroup, "_await", "if waited and (stale or over_cap):", "if False:")],
        "a rank waits past its cap",
    ),
    "cap of a whole pass": (
        Scenario(calls_of={1: ("crawls",)}, slow=1),
        [(RankGroup, "_await", "over_cap = now - self._pass_start > self._cap", "over_cap = False")],
        "a rank waits past its cap",
    ),
    "another takes over from a watcher that is silent": (
        Scenario(entries=WARM, slow=1),
        [(RankGroup, "_watches", 'if (not moved or not said.endswith(" over")) if over_cap else quiet:', "if False:")],
        "a rank waits past its cap",
    ),
    "accept step": (
        Scenario(entries=WARM, without={1: "quick"}, slow=0),
        [(plan, "agree_plan", "all(answer.hits[index] is None for _, answer in present)", "any(answer.hits[index] is None for _, answer in present)")],
        "a rank serves what it can't run",
    ),
    "digests compared": (
        Scenario(deviates=1, slow=0, allowed=("RankLost", "PassAborted")),
        [(converge, "require_one_digest", "if len(set(digests)) > 1:", "if False:")],
        "two survivors serve different tables",
    ),
    "own table compared": (
        Scenario(deviates=1, slow=0, allowed=("RankLost", "PassAborted")),
        [
            (converge, "require_one_digest", "if len(set(digests)) > 1:", "if False:"),
            (group_module, "why_not_served", "if verdict.committed != table_digest:", "if False:"),
        ],
        "a table is served that was not committed",
    ),
    "first verdict stands": (
        Scenario(entries=WARM, slow=2),
        [
            (
                RankGroup, "_decide", "self._rendezvous.settle(self._key(VERDICT), wanted.to_text())",
                "(self._rendezvous.set(self._key(VERDICT), wanted.to_text()), wanted.to_text())[1]",
            )
        ],
        "a table is served that was not committed|two survivors serve different tables|survivors end differently",
    ),
    "serve what was committed": (
        Scenario(entries=WARM, slow=1),
        [
            (
                RankGroup, "commit",
                'self._await([self._key(VERDICT)], "commit", "commit", lambda: [0], verdict=True)\n        verdict = self._read_verdict()',
                "verdict = Verdict(committed=table_digest)",
            )
        ],
        "a table is served that was not committed|two survivors serve different tables",
    ),
    "second look": (
        Scenario(entries=WARM, slow=2),
        [(RankGroup, "_await", "if verdict or self._rendezvous.holds(*keys):", "if verdict:")],
        "two survivors serve different tables|a call ended with PassAborted",
    ),
    "words carry their step": (
        Scenario(entries=WARM, slow=0),
        [(RankGroup, "_next_step", 'return f"{self._step:06d}"', 'return "000001"')],
        "a call ended with|is waited for when it is gone|is read when it is",
    ),
    "words carry their pass": (
        Scenario(calls=("pass", "pass"), entries=WARM, slow=0),
        [(RankGroup, "_key", "{self._base}/{self._pass}/{name}", "{self._base}/1/{name}")],
        "a call ended with|is waited for when it is gone|is read when it is",
    ),
    "words carry their attachment": (
        Scenario(calls=("pass", "reopen", "pass"), entries=WARM, slow=0, allowed=LEAVES),
        [(Member, "base", "{self._scope}/{self.attachment}", "{self._scope}/1")],
        "a call ended with|is waited for when it is gone|is read when it is",
    ),
    "a step's words say call and step": (
        Scenario(calls_of={1: ("reload",)}, entries=WARM, slow=0, allowed=("RankLost", "CallsDiffer")),
        [(group_module, "require_one_step", "if odd:", "if False:")],
        "a call ended with",
    ),
    "bytes stay for a step": (
        Scenario(3, entries=WARM, holders=(1,), slow=0),
        [(RankGroup, "exchange", "self._garbage.append(body)", "self._rendezvous.delete(body)")],
        "is waited for when it is gone",
    ),
    "versions are said": (
        Scenario(versions={1: "other"}, entries=WARM, slow=0, crashes=0, allowed=("SettingsDiffer",)),
        [(RankGroup, "_require_one_version", "if self._one_version or not (versions := self._member.versions()):", "if True:")],
        "a call ended with RankLost",
    ),
    "who closes says so": (
        Scenario(calls=("pass", "pass"), calls_of={1: ("pass",)}, entries=WARM, slow=0, crashes=0, allowed=("RankWithdrawn",)),
        [(RankGroup, "close", "self._rendezvous.set(self._progress_of(self.rank), _CLOSED)", "pass")],
        "a call ended with RankLost",
    ),
    "who leaves says so": (
        Scenario(calls_of={1: ("raises",)}, slow=0, crashes=0, allowed=("RankWithdrawn",)),
        [
            (RankGroup, "withdraw", "self._open = True", "return"),
            (RankGroup, "close", "self._rendezvous.set(self._progress_of(self.rank), _CLOSED)", "pass"),
        ],
        "a call ended with RankLost",
    ),
    "pins": (
        Scenario(calls=("reload",), calls_of={1: ("pin", "reload")}, entries=WARM, slow=0),
        [(tuner, "adopt_newest", "pins.why_not_replace() if said and", "None if said and")],
        "an epoch is replaced that is pinned",
    ),
    "one leader chooses the epoch": (
        Scenario(calls=("reload",), entries=WARM, holders=(0,), slow=0),
        [(tuner, "adopt_newest", "if any(lacks for _, _, _, lacks, _ in answers):", "if False:")],
        "two survivors serve different tables|a call ended with",
    ),
    "an arena's name stays until all have mapped it": (
        Scenario(costs=TALKS, slow=0),
        [(rounds, "reserve", 'group.exchange(f"{step}-mapped", (refused if group.is_leader else mapped or "").encode())', '[b""] * group.size')],
        "a call ended with",
    ),
    "a rank that is started again ends what it had begun": (
        Scenario(entries=WARM, reborn="alone", slow=0, allowed=LEAVES, says="started again"),
        [(Member, "take_place", "self._end_for(former)", "pass")],
        "a rank says rank . lost",
    ),
    "a rank that is started again as another version ends it where its peers are": (
        Scenario(entries=WARM, reborn="alone", renewed="other", slow=0, allowed=RENEWED, says="started again"),
        [(Member, "_end_for", 'f"{self._root}/{version}"', "self._scope")],
        "a rank says rank . lost",
    ),
    "a commit stands, whatever version somebody has become": (
        Scenario(entries=WARM, reborn="alone", renewed="other", slow=1, allowed=RENEWED),
        [(RankGroup, "_require_one_version", "if self._decide(Verdict.of(error)).committed:", "if False:")],
        "a call ended with PassAborted",
    ),
    "words carry their restart": (
        Scenario(entries=WARM, reborn="all", slow=0, allowed=()),
        [  # which tell a former run's words from this one's, too
            (Member, "take_place", "self._end_for(former)", "pass"),
            (Member, "base", "{self._scope}/{self.attachment}", "{self._scope}/1"),
        ],
        "a call ended with|is waited for when it is gone|is read when it is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_each_invariant_fails_when_its_guard_is_taken_out(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, cuts, broken = GUARDS[guard]
    with Explorer(scenario, monkeypatch) as whole:
        whole.all()
    for owner, name, text, instead in cuts:
        replace_in_code(monkeypatch, owner, name, text, instead)
    without = dataclasses.replace(scenario, reborn="all, unsaid") if guard == "words carry their restart" else scenario
    with Explorer(without, monkeypatch) as cut, pytest.raises(Violation, match=broken) as shown:
        cut.all()
    assert "says" in str(shown.value), "the shortest order that shows it"
