"""The error tree. Every error names the offending value, the limit it broke and the way out.

MoEDistError
├── ConfigError            a config, setting or command-line value is wrong (also a ValueError)
├── InputError             tensors don't fit the config: shape, dtype, device, ids (also a ValueError)
├── UnsupportedBackend     a backend can't run this problem; carries `backend` and `reason`
├── StoreError             a store can't be opened or was addressed wrongly
└── TuningError
    ├── NothingRunnable    no candidate can run and the default fails too
    ├── DeviceLost         a candidate broke the device's context; the process must be restarted
    ├── TunerStateError    nested contexts, two on one group, a pass under capture
    └── GroupError         what one rank concludes about its group; carries `ranks`
        ├── SettingsDiffer     settings or environments differ between ranks
        ├── RankLost           ranks made no progress for the deadline, or a rank was started again alone
        ├── RankWithdrawn      a rank left its pass by an exception, or closed its tuner before it
        ├── CallsDiffer        ranks are in different calls at once: of a collective tactic, or of the tuner
        ├── PassAborted        the pass ended without a winner table (digests differ, a peer aborted)
        └── RendezvousLost     the rendezvous store can't be reached; the group is dead

Anyone may import this module; it imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def first_line(error: BaseException, limit: int = 200) -> str:
    """What a log line or another rank's error quotes of `error`: its first line, else its type."""
    return str(error).partition("\n")[0][:limit] or type(error).__name__


class MoEDistError(Exception):
    """Base of every error that moe_dist raises on purpose."""


class ConfigError(MoEDistError, ValueError):
    """A config, setting or command-line value is wrong."""


class InputError(MoEDistError, ValueError):
    """The tensors of a call don't fit its config."""


class UnsupportedBackend(MoEDistError):
    """A backend can't run this problem.

    `backend` is the name asked for, "": no particular one; `reason` why it can't; `reasons` maps every backend that was considered to its
    reason when none can run.
    """

    def __init__(self, backend: str, reason: str, reasons: Mapping[str, str | None] | None = None) -> None:
        self.backend = backend
        self.reason = reason
        self.reasons = dict(reasons or {})
        listing = "".join(f"\n  {name}: {why or 'can run it'}" for name, why in self.reasons.items())
        who = f"backend {backend!r} can't" if backend else "no backend can"
        super().__init__(f"{who} run this: {reason}{listing}")


class StoreError(MoEDistError):
    """A store can't be opened or was addressed wrongly. Degradation while running is a warning, not this."""


class TuningError(MoEDistError):
    """Base of what ends a tuning pass."""


class NothingRunnable(TuningError):
    """No candidate can run a problem and its default fails too."""


class DeviceLost(TuningError):
    """A candidate broke the device's context: nothing runs in this process any more. Counts as a death of the process."""


class TunerStateError(TuningError):
    """The tuner was used where it can't be: nested contexts, two on one group, a pass under graph capture."""


class GroupError(TuningError):
    """What the survivors of a group conclude together. `ranks` are the culprits, in order."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class SettingsDiffer(GroupError):
    """Ranks of one group were started with different settings or environments. `fields` are the names that differ."""

    def __init__(self, message: str, ranks: Iterable[int] = (), fields: Iterable[str] = ()) -> None:
        self.fields = tuple(fields)
        super().__init__(message, ranks)


class RankLost(GroupError):
    """Ranks made no progress for the deadline, the pass outlasted its cap, or a rank was started again alone. The group is dead."""


class RankWithdrawn(GroupError):
    """A rank left the pass by an exception of its own, which propagates on that rank; or it closed its tuner, and came no more."""


class CallsDiffer(GroupError):
    """Ranks met in different calls: another tactic or token count of a collective call, or a reload and a pass. Nothing was changed."""


class PassAborted(GroupError):
    """The pass ended without a winner table; the previous epoch stays in force."""


class RendezvousLost(GroupError):
    """The rendezvous store can't be reached within the deadline; treated as aborted, and the group is dead."""
