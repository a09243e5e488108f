"""The faults of the matrix: what strikes, in which phase, and what all survivors must end with. `faults.py` tries each, `struck.py` is struck."""

from __future__ import annotations

import dataclasses

RANKS = 3
PROGRESS_TIMEOUT_S = 4.0  # a silent rank is lost after this
DEADLINE_S = 30.0  # the cap of a pass: nobody may wait longer
DEPLOYMENT = "faults"

TIMED = "timed"  # a word with times, whatever the strategy calls its step
RUN = "run"  # no step: in the middle of a tactic that is being timed
MEET = "meet"  # the same of a collective one
PUBLISH = "publish"  # no step: the leader's part after the commit
EPOCH = "epoch"  # no step: the leader has published the entries, and is about to publish the epoch

AGREED = "agreed"
UNTUNED = "agreed, untuned"  # no candidate was timed on all ranks, so all run the default
BY_GLOO = "served by gloo"  # no outcome of a fault: nothing that is served talks through shared memory
KEPT = "agreed, not reloaded"  # all keep the epoch that they serve

KILLED = "killed()"  # a culprit that dies without a word
STOPPED = "stopped"  # a culprit that lives, and never goes on


@dataclasses.dataclass(frozen=True)
class Fault:
    """phase: where it strikes. outcome: what all survivors must end with; errors are written `Type(culprit, ...)`.

    culprit: the rank it strikes. at: the step whose word the culprit is about to send when the fault strikes; "": it lies in
    what the culprit was started with. culprit_ends: what the culprit itself ends with; "": what all do. deaths: earlier starts with the
    same fault.
    """

    phase: str
    name: str
    outcome: str
    culprit: int = 1
    at: str = ""
    culprit_ends: str = ""
    deaths: int = 0

    @property
    def gone(self) -> bool:
        """The culprit is no survivor."""
        return bool(self.culprit_ends)

    @property
    def on_server(self) -> bool:
        """The store is a server that is killed."""
        return self.name.startswith("store killed")

    @property
    def on_small_disk(self) -> bool:
        """The culprit's store lies on a disk of its own, which is full when it strikes."""
        return "disk full" in self.name

    @property
    def starts_again(self) -> bool:
        """The culprit is killed, and alone started again; then all ranks meet with new tuners, on the same rendezvous."""
        return self.name.startswith("restarted alone")

    @property
    def from_the_start(self) -> bool:
        """It matters from the first word of the ranks on, in which they adopt the epoch to serve."""
        return self.name == "store not shared"

    @property
    def patience_s(self) -> float:
        """How long ranks wait for one that is silent. Who is started again must be known by its word, before patience could end."""
        return 4 * DEADLINE_S if self.starts_again else PROGRESS_TIMEOUT_S

    @property
    def collective(self) -> str:
        """What a collective call comes to after it: in a dead group it is refused, and nobody waits for who is gone."""
        if self.outcome.startswith(("RankLost", "RankWithdrawn")):
            return "refused"
        return f"RankLost({self.culprit})" if self.gone else "served"


STEPS = {"agree": "agree-2", "measure": TIMED, "commit": "decide", "reload": "reload-accept"}


def _faults() -> tuple[Fault, ...]:
    everywhere = []
    for phase, at in STEPS.items():
        everywhere += [
            Fault(phase, "killed", "RankLost(1)", 1, at, culprit_ends=KILLED),
            Fault(phase, "leader killed", "RankLost(0)", 0, at, culprit_ends=KILLED),
            Fault(phase, "restarted alone", f"RankLost(1), then {AGREED}", 1, at, culprit_ends=KILLED),
            Fault(phase, "restarted alone with another release", "RankLost(1), then SettingsDiffer(1)", 1, at, culprit_ends=KILLED),
            Fault(phase, "stopped", "RankLost(1)", 1, at, culprit_ends=STOPPED),
            Fault(phase, "stopped and continued", AGREED, 1, at),
            Fault(phase, "stopped, lost, then continued", "RankLost(1)", 1, at),
            Fault(phase, "late", AGREED, 1, at),
            Fault(phase, "leaves by an exception", "RankWithdrawn(1)", 1, at, culprit_ends="KeyError()"),
            Fault(phase, "out of memory", "RankWithdrawn(1)", 1, at, culprit_ends="MemoryError()"),
            Fault(phase, "disk full", AGREED, 1, at),
            Fault(phase, "leader's disk full", AGREED, 0, at),
            # In a reload before the leader has read the epoch.
            Fault(phase, "store killed", *((KEPT, 1, "reload-problems") if phase == "reload" else (AGREED, 1, at))),
            Fault(phase, "another job publishes in between", AGREED, 1, at),
            Fault(phase, "two contexts at once", AGREED, 1, at),
            Fault(phase, "two passes at once", AGREED, 1, at),
            Fault(phase, "a pass within a pass", "RankWithdrawn(1)", 1, at, culprit_ends="TunerStateError()"),
            Fault(phase, "late words of an old pass", AGREED, 1, at),
        ]
    return (
        *everywhere,
        Fault("agree", "other software version", "SettingsDiffer(1)"),
        Fault("agree", "other GPU name", "SettingsDiffer(1)"),
        Fault("agree", "other candidates", AGREED),
        Fault("agree", "two tuners on one group", "TunerStateError()"),
        Fault("measure", "out of memory in one tactic", AGREED),
        Fault("measure", "out of memory while a tactic runs", AGREED, 1, RUN),
        Fault("measure", "out of memory for the probe", UNTUNED),
        Fault("measure", "raises in one tactic", AGREED),
        Fault("measure", "raises in all tactics", UNTUNED),
        Fault("measure", "ends the process", "RankLost(1)", 1, RUN, culprit_ends=KILLED),
        Fault("measure", "ended the process twice before", AGREED, 1, RUN, deaths=2),
        Fault("measure", "killed for its memory", "RankLost(1)", 1, RUN, culprit_ends=KILLED),
        Fault("measure", "killed for its memory twice before", AGREED, 1, RUN, deaths=2),
        Fault("measure", "slow but alive", AGREED),
        Fault("measure", "killed in a collective", "RankLost(1)", 1, MEET, culprit_ends=KILLED),
        Fault("measure", "stopped in a collective", "RankLost(1)", 1, MEET, culprit_ends=STOPPED),
        Fault("measure", "late in a collective", AGREED, 1, MEET),
        Fault("measure", "raises in a collective", AGREED, 1, MEET),
        Fault("measure", "out of memory in a collective", AGREED, 1, MEET),
        Fault("commit", "no room for symmetric memory", "PassAborted(0)", 0, "reserve-bytes"),
        Fault("commit", "leader killed after its word", "RankLost(0)", 0, "commit", culprit_ends=KILLED),
        Fault("commit", "leader killed after the commit", AGREED, 0, PUBLISH, culprit_ends=KILLED),
        Fault("commit", "store killed before the epoch", AGREED, 0, EPOCH),
        Fault("reload", "other software version", KEPT),
        Fault("reload", "other GPU name", KEPT),
        Fault("reload", "other candidates", KEPT),
        Fault("reload", "store not shared", AGREED),
    )


FAULTS = _faults()
