"""A model of a pass, small enough to follow every order of requests, crashes, timeouts and restarts.

What ranks say and conclude is computed by the functions that serve: `agree_offers`, `lacked_hits`, `agree_plan`, `combine_rounds`,
`Race`, `require_one_digest`, `head_of`, `senders_of`, `waited_for`, `why_not_served`. What the model adds is the order of a rank's
requests to the rendezvous (`RankGroup.exchange`, `reduce`, `_await` and `commit`, request for request), a rendezvous, and a scheduler that may do anything: let any
rank make its next request, let any waiting rank lose patience at any look, crash any rank, or start all ranks again while
stragglers of the former run still go on. `without` takes guards out, to show that they are needed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from moe_dist.distributed.converge import RoundWord, combine_rounds, require_one_digest
from moe_dist.distributed.plan import (
    Answer,
    CellAnswer,
    CellOffer,
    Offer,
    Proposal,
    agree_offers,
    agree_plan,
    hit_digest,
    lacked_hits,
)
from moe_dist.distributed.words import Verdict, head_of, senders_of, waited_for, why_not_served
from moe_dist.errors import GroupError
from moe_dist.tuning.problem import Bucket, Cell, Epoch, Problem, Tactic, Timed, Winner, digest
from moe_dist.tuning.search import Race

GUARDS = (
    "first verdict stands", "deadline", "serve what was committed", "words carry their run", "second look", "digests compared",
    "bytes stay for a step", "watch passes on",
)  # fmt: skip
CELL = Cell(Problem.of("modelled"), "eager", Bucket(1, 1))
PLAIN, QUICK = Tactic.of("plain"), Tactic.of("quick")
HIT = b"the entry that rank 0 alone holds" * 10  # long enough to be said by its digest
HIT_STEPS = ("agree-1", "hits", "agree-2", "decide")
GONE = b"gone"


@dataclasses.dataclass(frozen=True)
class Model:
    """looks: after so many looks around in a pass a rank has reached its cap. crashes, restarts: at most so many.
    stragglers: a restart may come while ranks of the former run still go on; else only when all have ended.
    watch: of the ranks in one wait the one that watches may lose patience, and another once that one is thought gone; else any.
    raises: the rank that leaves by an exception instead of saying its times. deviates: the rank that picks another winner.
    With HIT_STEPS rank 0 alone holds an entry, so that words differ and are long: their bytes follow their digests."""

    size: int = 2
    steps: tuple[str, ...] = ("agree-1", "agree-2", "measure", "decide")
    looks: int = 2
    crashes: int = 1
    restarts: int = 0
    stragglers: bool = True
    watch: bool = False
    raises: int | None = None
    deviates: int | None = None
    without: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank of one run. phase: its next request. heard: the words of the steps that it has ended. end: how its pass ended."""

    run: int
    index: int
    phase: str = "say"
    looks: int = 0
    heard: tuple[tuple[bytes, ...], ...] = ()
    heads: tuple[bytes, ...] = ()  # what was said in a step whose bytes are still to come
    end: str = ""
    table: str = ""  # what it serves; "": what was served before


@dataclasses.dataclass(frozen=True)
class Board:
    """What the rendezvous holds of one run's pass. words[step][rank], published[step]: None where there is nothing (any more).
    sent[step][rank]: the bytes of long words; GONE after they were there."""

    words: tuple[tuple[bytes | None, ...], ...]
    published: tuple[tuple[bytes, ...] | None, ...]
    sent: tuple[tuple[bytes | None, ...], ...]
    verdict: Verdict | None = None
    watch: tuple[tuple[tuple[int, str], int], ...] = ()  # (step, what is waited for): who watches


State = tuple[tuple[Rank, ...], tuple[Board, ...], int]  # ranks, a board for each run, crashes


class Violation(AssertionError):
    """An invariant does not hold; the message ends with the shortest order of requests that shows it."""


# -- what is said: the functions that serve -----------------------------------------------------------------------------------


@functools.cache
def say(model: Model, run: int, index: int, heard: tuple[tuple[bytes, ...], ...]) -> bytes:
    """The word of a rank at the step after those that it has heard."""
    step = model.steps[len(heard)]
    known = dict(zip(model.steps, heard, strict=False))
    if step == "agree-1":
        hit = hit_digest(HIT) if "hits" in model.steps and index == 0 else None
        settings = {"strategy": "reduce", "long": "x" * 300 * ("hits" in model.steps)}
        return Offer(settings, {}, {CELL: CellOffer(PLAIN, (PLAIN, QUICK), hit)}).to_bytes()
    if step == "hits":
        offers = [Offer.from_bytes(word) for word in known["agree-1"]]
        assert lacked_hits(_proposal(known["agree-1"]), offers) == {hit_digest(HIT): 0}
        return HIT if index == 0 else b""
    if step == "agree-2":
        proposal = _proposal(known["agree-1"])
        if "hits" in model.steps and known["hits"][0] != HIT:
            raise Violation(f"rank {index} of run {run} is asked about an entry that it does not have")
        return Answer(tuple(CellAnswer((None,) * len(cell.hits), (None,) * len(cell.candidates)) for cell in proposal.cells)).to_bytes()
    if step == "measure":  # another run has other times, and so another winner: who mixes them up is found out
        times = {PLAIN: 10.0, QUICK: 5.0 + index} if run == 0 else {PLAIN: 5.0 + index, QUICK: 10.0}
        return RoundWord({tactic: Timed(time, 0.0, 1) for tactic, time in times.items()}).to_bytes((PLAIN, QUICK))
    return table(model, run, index, heard).encode()


def _proposal(words: tuple[bytes, ...]) -> Proposal:
    return agree_offers([Offer.from_bytes(word) for word in words], range(len(words)))


@functools.cache
def table(model: Model, run: int, index: int, heard: tuple[tuple[bytes, ...], ...]) -> str:
    """The digest of the table that a rank concludes from the words before `decide`."""
    names = range(model.size)
    known = dict(zip(model.steps, heard, strict=False))
    if "hits" in model.steps:
        (planned,) = agree_plan(_proposal(known["agree-1"]), [Answer.from_bytes(word) for word in known["agree-2"]], names).cells
        assert planned.serve == hit_digest(known["hits"][0])
        return Epoch(1, f"model {run}", {CELL: Winner(PLAIN if model.deviates == index else QUICK, 1.0, PLAIN, 1.0, "hit")}).digest
    if "measure" not in model.steps:
        return f"table of run {run}, {digest([word.hex() for words in heard for word in words])}"
    tactics: tuple[Tactic, ...] = (PLAIN, QUICK)
    if "agree-2" in model.steps:
        tactics = agree_plan(_proposal(known["agree-1"]), [Answer.from_bytes(word) for word in known["agree-2"]], names).cells[0].tactics
    race = Race(tactics, PLAIN)
    race.feed(RoundWord.from_bytes(known["measure"][0], tactics).measured)
    standing = race.winner()
    assert standing is not None
    won = PLAIN if model.deviates == index else standing.tactic
    return Epoch(1, "model", {CELL: Winner(won, 1.0, PLAIN, 1.0, "tuned")}).digest


# -- what a rank does: one request -----------------------------------------------------------------------------------------------


def begin(model: Model) -> State:
    return (tuple(Rank(0, index) for index in range(model.size)), (_empty(model),), 0)


def _empty(model: Model) -> Board:
    nothing = (None,) * model.size
    return Board((nothing,) * len(model.steps), (None,) * len(model.steps), (nothing,) * len(model.steps))


def follow(model: Model, state: State) -> Iterator[tuple[str, State]]:
    """(what happens, the state after it), for all that may happen next."""
    ranks, boards, crashes = state
    for at, rank in enumerate(ranks):
        if rank.end:
            continue
        name = f"{'' if rank.run == 0 else 'new '}{rank.index}"
        home = 0 if "words carry their run" in model.without else rank.run
        for did, moved, board in _request(model, rank, boards[home]):
            yield f"{name} {did}", (_put(ranks, at, moved), _put(boards, home, board), crashes)
        if crashes < model.crashes:
            yield f"{name} crashes", (_put(ranks, at, dataclasses.replace(rank, end="crashed")), boards, crashes + 1)
    last = max(rank.run for rank in ranks)
    if last < model.restarts and crashes and (model.stragglers or all(rank.end for rank in ranks)):
        fresh = tuple(Rank(last + 1, index) for index in range(model.size))
        yield "restart", (ranks + fresh, (*boards, _empty(model)), crashes)


def _put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return items if items[at] is item else (*items[:at], item, *items[at + 1 :])


def _request(model: Model, rank: Rank, board: Board) -> Iterator[tuple[str, Rank, Board]]:
    step = len(rank.heard)
    change = functools.partial(dataclasses.replace, rank)
    match rank.phase:
        case "say" if model.raises == rank.index and rank.run == 0 and model.steps[step] == "measure":
            message = f"rank {rank.index} left the pass: KeyError"
            board = _settle(model, board, Verdict(error="RankWithdrawn", message=message, ranks=(rank.index,)))
            yield "leaves", change(end="left"), board
        case "say":
            word = head_of(say(model, rank.run, rank.index, rank.heard))
            spoken = _put(board.words[step], rank.index, word)
            yield f"says {model.steps[step]}", change(phase="check"), dataclasses.replace(board, words=_put(board.words, step, spoken))
        case "check" | "check again":
            words = board.words[step] if rank.index == 0 else board.published[step]
            if words is not None and None not in words:
                if rank.index == 0:
                    yield "sees all words", change(phase="publish"), board
                else:
                    yield "reads", *_read(model, rank, board, words)  # type: ignore[misc]
            elif rank.phase == "check":
                yield "sees words missing", change(phase="look"), board
            else:
                assert board.verdict is not None
                yield "ends", _ended(rank, _error_of(board.verdict)), board
        case "publish":
            said = board.words[step]
            if None in said:
                raise Violation(f"rank 0 of run {rank.run} publishes a word of {model.steps[step]} that is not there any more")
            if model.steps[step] == "measure":  # the leader alone reads them all
                said = (head_of(combine_rounds([head[1:] for head in said], (PLAIN, QUICK), "max", range(model.size))),) * model.size  # type: ignore[index]
            published = dataclasses.replace(board, published=_put(board.published, step, said))
            yield "publishes", *_read(model, rank, published, said)  # type: ignore[misc]
        case "send":
            word = say(model, rank.run, rank.index, rank.heard)
            sent = _put(board.sent, step, _put(board.sent[step], rank.index, word))
            yield "sends", *_wanted(model, rank, dataclasses.replace(board, sent=sent))
        case "check bytes" | "check bytes again":
            here = {other: board.sent[step][other] for other in _senders(rank)}
            if GONE in here.values():
                raise Violation(f"the bytes of {model.steps[step]} are gone before rank {rank.index} of run {rank.run} has read them")
            if None not in here.values():
                yield "reads the bytes", *_hear(model, rank, board)
            elif rank.phase == "check bytes":
                yield "sees bytes missing", change(phase="look for bytes"), board
            else:
                assert board.verdict is not None
                yield "ends", _ended(rank, _error_of(board.verdict)), board
        case "look for bytes":
            if board.verdict is None:
                yield "sees no verdict", change(phase="blame a sender"), board
            else:
                yield "sees a verdict", change(phase="check bytes again"), board
        case "blame a sender":
            unsent = [other for other in _senders(rank) if board.sent[step][other] is None]
            yield from _patience(model, rank, board, unsent, "check bytes")
        case "look":
            if board.verdict is None:
                yield "sees no verdict", change(phase="blame"), board
            elif "second look" in model.without:
                yield "sees a verdict", _ended(rank, _error_of(board.verdict)), board
            else:
                yield "sees a verdict", change(phase="check again"), board
        case "blame":
            spoken = {other for other in range(model.size) if board.words[step][other] is not None}
            yield from _patience(model, rank, board, waited_for(spoken, rank.index, model.size), "check")
        case "commit":
            board = _settle(model, board, Verdict(committed=table(model, rank.run, rank.index, rank.heard[:-1])))
            yield "commits", _adopt(model, rank, board), board
        case "await":
            if board.verdict is not None:
                yield "reads the verdict", _adopt(model, rank, board), board
            else:
                yield "sees no verdict", change(phase="blame the leader"), board
        case "blame the leader":
            yield from _patience(model, rank, board, [0], "await")
        case _:
            raise AssertionError(rank.phase)


def _patience(model: Model, rank: Rank, board: Board, missing: list[int], back: str) -> Iterator[tuple[str, Rank, Board]]:
    """After a look: wait on, or lose patience with `missing`. At the cap there is no waiting on."""
    wait, capped = (len(rank.heard), back), rank.looks >= model.looks
    watcher = dict(board.watch).get(wait, rank.index)
    if model.watch:
        if watcher != rank.index and (not capped or "watch passes on" in model.without):
            yield "sees another watch", dataclasses.replace(rank, phase=back, looks=rank.looks + 1), board
        if watcher != rank.index and "watch passes on" in model.without:
            return
        board = dataclasses.replace(board, watch=tuple(sorted((dict(board.watch) | {wait: rank.index}).items())))
    if not missing:
        yield "waits for nobody", dataclasses.replace(rank, phase=back), board
        return
    if not capped or "deadline" in model.without:
        yield "waits", dataclasses.replace(rank, phase=back, looks=rank.looks + 1), board
    if "deadline" not in model.without:
        message = f"rank {missing} lost at {len(rank.heard)}"
        settled = _settle(model, board, Verdict(error="RankLost", message=message, ranks=tuple(missing)))
        assert settled.verdict is not None
        if settled.verdict.committed:
            yield "loses patience after the commit", dataclasses.replace(rank, phase=back), settled
        else:
            yield f"loses patience with {missing}", _ended(rank, _error_of(settled.verdict)), settled


def _settle(model: Model, board: Board, wanted: Verdict) -> Board:
    """Compare-and-set of the pass's one key."""
    if board.verdict is not None and "first verdict stands" not in model.without:
        return board
    return dataclasses.replace(board, verdict=wanted)


def _error_of(verdict: Verdict) -> GroupError:
    error = why_not_served(verdict, "", 1, 0)
    assert isinstance(error, GroupError)
    return error


def _ended(rank: Rank, error: GroupError) -> Rank:
    return dataclasses.replace(rank, end=f"{type(error).__name__}{error.ranks}", heard=(), heads=())


def _adopt(model: Model, rank: Rank, board: Board) -> Rank:
    held = table(model, rank.run, rank.index, rank.heard[:-1])
    assert board.verdict is not None
    error = why_not_served(board.verdict, held, 1, rank.index)
    return _ended(rank, error) if isinstance(error, GroupError) else dataclasses.replace(rank, end="serves", table=held, heard=())


def _senders(rank: Rank) -> list[int]:
    """Whose bytes a rank waits for: those of words that it did not say itself. In `hits` all but rank 0 need rank 0's."""
    return [sender for head, sender in senders_of(rank.heads).items() if head != rank.heads[rank.index]]


def _read(model: Model, rank: Rank, board: Board, heads: tuple[bytes, ...]) -> tuple[Rank, Board]:
    """What was said in a step is there: forget one's own of the step before; then send and read bytes, or go on."""
    step = len(rank.heard)
    if step:
        own = _put(board.words[step - 1], rank.index, None)
        board = dataclasses.replace(board, words=_put(board.words, step - 1, own))
        if rank.index == 0:
            board = dataclasses.replace(board, published=_put(board.published, step - 1, None))
        board = _forget_bytes(rank, board, step - 1)
    rank = dataclasses.replace(rank, heads=heads)
    if senders_of(heads).get(heads[rank.index]) == rank.index:
        return dataclasses.replace(rank, phase="send"), board
    return _wanted(model, rank, board)


def _forget_bytes(rank: Rank, board: Board, step: int) -> Board:
    if board.sent[step][rank.index] is None:
        return board
    return dataclasses.replace(board, sent=_put(board.sent, step, _put(board.sent[step], rank.index, GONE)))


def _wanted(model: Model, rank: Rank, board: Board) -> tuple[Rank, Board]:
    if _senders(rank):
        return dataclasses.replace(rank, phase="check bytes"), board
    return _hear(model, rank, board)


def _hear(model: Model, rank: Rank, board: Board) -> tuple[Rank, Board]:
    """All words of a step are here, whole."""
    step = len(rank.heard)
    own = {rank.heads[rank.index]: say(model, rank.run, rank.index, rank.heard)} if rank.heads[rank.index].startswith(b"#") else {}
    whole = own | {rank.heads[other]: board.sent[step][other] for other in _senders(rank)}
    words = tuple(head[1:] if head.startswith(b"=") else whole[head] for head in rank.heads)
    heard, rank = (*rank.heard, words), dataclasses.replace(rank, heads=())
    if "bytes stay for a step" in model.without:
        board = _forget_bytes(rank, board, step)
    moved = dataclasses.replace(rank, heard=heard, phase="say")
    if len(heard) < len(model.steps):
        return moved, board
    if "digests compared" not in model.without:
        try:
            require_one_digest([word.decode() for word in words], range(model.size), "winner tables")
        except GroupError as error:
            board = _settle(model, board, Verdict(error=type(error).__name__, message=str(error), ranks=error.ranks))
            assert board.verdict is not None
            return _ended(moved, _error_of(board.verdict)), board
    if "serve what was committed" in model.without and rank.index:
        return dataclasses.replace(moved, end="serves", table=table(model, rank.run, rank.index, heard[:-1]), heard=()), board
    return dataclasses.replace(moved, phase="commit" if rank.index == 0 else "await"), board


# -- the explorer ----------------------------------------------------------------------------------------------------------------


def judge(model: Model, state: State) -> str | None:
    """The invariant that `state` breaks; None: all hold."""
    ranks, boards, _ = state
    for run in range(len(boards)):
        home = boards[0 if "words carry their run" in model.without else run]
        ended = [rank for rank in ranks if rank.run == run and rank.end not in ("", "crashed", "left")]
        if len({rank.table for rank in ended}) > 1:
            return "two survivors serve different tables"
        if len({rank.end for rank in ended}) > 1:
            return "survivors end differently: " + ", ".join(rank.end for rank in ended)
        for rank in ended:
            if rank.end != "serves" and rank.table:
                return "an aborted pass changed what is served"
            committed = home.verdict.committed if home.verdict else ""
            if rank.end == "serves" and committed != rank.table and not any(other.end == "" and other.index == 0 for other in ranks):
                return "a table is served that was not committed"
        allowed = (
            "serves",
            "RankLost",
            "RankWithdrawn" if model.raises is not None else "-",
            "PassAborted" if model.deviates is not None else "-",
        )
        for rank in ended:
            if not rank.end.startswith(allowed):
                return f"a late word or verdict ended a pass with {rank.end}"
    for rank in ranks:
        if rank.looks > model.looks:
            return "a rank waits past its cap"
    return None


@dataclasses.dataclass
class Explored:
    states: int = 0
    endings: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)


def explore(model: Model) -> Explored:
    """Follow everything that may happen, breadth first. Violation: an invariant broke, or a rank can do nothing more."""
    start = begin(model)
    came: dict[State, tuple[State, str] | None] = {start: None}
    queue, found = deque([start]), Explored()
    while queue:
        state = queue.popleft()
        if (why := judge(model, state)) is not None:
            raise Violation(f"{why}: {'; '.join(_path(came, state))}")
        moved = False
        for did, after in _following(model, state, lambda state=state: _path(came, state)):
            moved = moved or not did.endswith(("crashes", "restart"))
            if after not in came:
                came[after] = (state, did)
                queue.append(after)
        if not moved:
            ends = tuple(sorted(rank.end for rank in state[0]))
            if "" in ends:
                raise Violation(f"a rank can do nothing more: {'; '.join(_path(came, state))}")
            found.endings[ends] = found.endings.get(ends, 0) + 1
    found.states = len(came)
    return found


def wander(model: Model, choose: Any, walks: int) -> Explored:
    """`walks` random orders, each to its end."""
    found = Explored()
    for _ in range(walks):
        state, path = begin(model), list[str]()
        while True:
            steps = _following(model, state, lambda path=path: path)
            rare = [step for step in steps if step[0].endswith("crashes") or "patience" in step[0]]
            usual = [step for step in steps if step not in rare]
            if not steps:
                break
            did, state = choose.choice(rare if rare and (not usual or choose.random() < 0.01) else usual)
            path.append(did)
            found.states += 1
            if (why := judge(model, state)) is not None:
                raise Violation(f"{why}: {'; '.join(path)}")
        ends = tuple(sorted({rank.end for rank in state[0]}))
        if "" in ends:
            raise Violation(f"a rank can do nothing more: {'; '.join(path)}")
        found.endings[ends] = found.endings.get(ends, 0) + 1
    return found


def _following(model: Model, state: State, path: Callable[[], list[str]]) -> list[tuple[str, State]]:
    """What `follow` gives; what it finds wrong is told with the requests that led there."""
    try:
        return list(follow(model, state))
    except Violation as why:
        raise Violation(f"{why}: {'; '.join(path())}") from None


def _path(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    path: list[str] = []
    while (before := came[state]) is not None:
        state, did = before
        path.append(did)
    return path[::-1]
