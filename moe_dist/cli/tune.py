"""`moe-dist tune`: tune a model's MoE layer ahead of a deployment, alone or on all ranks of a torchrun.

Owns the arguments, their checks before any rank starts work, the order of passes and how a run ends. How ranks meet lies in `meeting.py`,
what is shown and written in `tune_report.py`. One pass a bucket: an interrupt keeps every bucket that was committed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from moe_dist.backends.base import MoEProblem
from moe_dist.backends.registry import usable_backends
from moe_dist.cli.checks import positive, quiet_stores, require_writable, store_url, why_not_kept
from moe_dist.cli.hosting import Hosted
from moe_dist.cli.meeting import exchange, meet
from moe_dist.cli.output import hurry
from moe_dist.cli.tune_report import Progress, TuneResult, count_diverged, print_summary, print_totals, why_short, write_json
from moe_dist.config import DEFAULT_MAX_NUM_TOKENS, DTYPES
from moe_dist.distributed.epoch import published
from moe_dist.distributed.group import CAP, PROGRESS_TIMEOUT
from moe_dist.distributed.layout import Layout, Place
from moe_dist.distributed.rendezvous import store_of
from moe_dist.errors import ConfigError, GroupError, RendezvousLost, StoreError, first_line
from moe_dist.interop.hf_config import QUANT_NAMES, ModelShape, read_model
from moe_dist.operation import MoEOperation, make_random_weights
from moe_dist.settings import RankSettings, default_store, job_settings, rank_settings
from moe_dist.stores.base import Store
from moe_dist.stores.layered import ReadOnlyStore, shared_layer
from moe_dist.stores.open import open_store
from moe_dist.tuning.pass_terms import ProgressEvent
from moe_dist.tuning.policy import OBJECTIVES, POLICIES, STRATEGIES, MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder, ProbeSpec, digest
from moe_dist.tuning.tuner import Tuner

HELP = "tune a model's MoE layer ahead of a deployment; under torchrun, on all its ranks together"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a known name, a Hugging Face repo id, a config.json or the folder that holds one")
    parser.add_argument("--tp", type=positive, default=1, help="ranks that cut every expert (default 1)")
    parser.add_argument("--ep", type=positive, default=1, help="ranks that share out the experts (default 1)")
    parser.add_argument("--pp", type=positive, default=1, help="pipeline stages, each a group that tunes apart (default 1)")
    parser.add_argument(
        "--dp", type=positive, default=1, help="replicas, each a group that tunes apart (default 1); EP that spans DP is a larger --ep"
    )
    parser.add_argument("--allow-uneven", action="store_true", help="let the first ranks hold one expert more")
    parser.add_argument("--dtype", choices=DTYPES, help="of activations (default: the checkpoint's)")
    parser.add_argument("--quant", choices=tuple(QUANT_NAMES), help="weight format (default: the checkpoint's)")
    parser.add_argument("--routed", action="store_true", help="calls bring topk_ids and topk_weights, as a serving engine's do")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--buckets", type=_buckets, help="where buckets end: '1,2,4', or '1:256' for the powers of two between")
    sizes.add_argument(
        "--max-tokens", type=positive, default=DEFAULT_MAX_NUM_TOKENS, help="powers of two up to this token count (default 8192)"
    )
    parser.add_argument("--policy", choices=POLICIES, default="eager", help="how time is taken (default eager)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="reduce", help="who times what (default reduce)")
    parser.add_argument("--objective", choices=OBJECTIVES, default="max", help="over the ranks (default max: the slowest sets the pace)")
    parser.add_argument("--routing", choices=("uniform", "zipf"), default="uniform", help="how probes spread tokens (default uniform)")
    parser.add_argument("--seed", type=int, default=0, help="of probes and random weights (default 0)")
    parser.add_argument(
        "--budget",
        type=_seconds,
        help="seconds to measure in, shared evenly by the buckets (default: no limit). What it leaves untimed is named, runs its default, "
        "and is no error: the exit code is 0, but 1 where no bucket has a winner",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--store", type=store_url, help="folder or URL of the results (default: $MOE_DIST_STORE, else the user's cache)")
    parser.add_argument("--no-write", action="store_true", help="take winners from the store and publish none")
    parser.add_argument("--deployment", default="default", help="whose epochs these are (default 'default')")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the results here, each key with its winner or why it has none; of several groups, the first one's",
    )
    timeout, cap = (f"(default {limit.total_seconds():g})" for limit in (PROGRESS_TIMEOUT, CAP))
    parser.add_argument(
        "--progress-timeout", type=_seconds, help=f"seconds without progress: a rank is lost {timeout}, or --cap where that is less"
    )
    parser.add_argument(
        "--cap", type=_seconds, default=CAP, help=f"seconds that ranks wait to meet, and that one pass may take in all {cap}"
    )


def _seconds(text: str) -> timedelta:
    with contextlib.suppress(ValueError, OverflowError):
        if (value := timedelta(seconds=float(text))) > timedelta(0):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")


def _buckets(text: str) -> BucketLadder:
    """'1,2,4', '1:256' (1, the powers of two after it, and 256), or both, as in '1:256,1000'."""
    bounds: set[int] = set()
    for part in text.split(","):
        first, colon, last = part.partition(":")
        low, high = positive(first), positive(last if colon else first)
        if low > high:
            raise argparse.ArgumentTypeError(f"{part!r} falls; write the smaller token count first")
        bounds |= {low, high, *(1 << power for power in range(high.bit_length()) if low < 1 << power < high)}
    return BucketLadder(tuple(sorted(bounds)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneJob:
    """Arguments that were checked: nothing about them can fail any more. Equal on all ranks but for `ranks` and `device`."""

    arguments: argparse.Namespace
    ranks: RankSettings
    shape: ModelShape
    problem: MoEProblem
    ladder: BucketLadder
    probe: ProbeSpec
    policy: MeasurementPolicy
    progress_timeout: timedelta
    device: torch.device
    store_url: str = dataclasses.field(repr=False)  # may hold a password; `store.url` doesn't
    store: Store
    layout: Layout

    @property
    def place(self) -> Place:
        return self.layout.place(self.ranks.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the group that tunes with it: of several groups each has such a rank."""
        return self.ranks.rank == self.place.group[0]

    @property
    def group_name(self) -> str:
        """Which of several groups this rank's is, as in "stage 0 of replica 1"; "" where there is one."""
        stage = f"stage {self.place.stage}" if self.layout.pp > 1 else ""
        replica = f"replica {self.place.replica}" if self.layout.dp > 1 else ""
        return " of ".join(filter(None, (stage, replica)))

    def complain(self, what: object) -> None:
        """One line on stderr, for the whole group."""
        print(f"moe-dist: {self.group_name}{self.group_name and ': '}{what}", file=sys.stderr)

    @property
    def deployment(self) -> str:
        """Whose epochs these are: of a pipeline, each stage's apart."""
        named: str = self.arguments.deployment
        return named if self.layout.pp == 1 else f"{named}/stage-{self.place.stage}"


def plan_job(arguments: argparse.Namespace, ranks: RankSettings) -> TuneJob:
    """Check everything before any rank starts work. ConfigError: what is wrong and what to do instead.
    UnsupportedBackend: no backend can run this on the device, each with its reason. StoreError: no such store."""
    ladder = arguments.buckets or BucketLadder.powers_of_two(arguments.max_tokens)
    shape = read_model(arguments.model)
    config = shape.moe_config(
        tp_size=arguments.tp,
        ep_size=arguments.ep,
        uneven=arguments.allow_uneven,
        dtype=arguments.dtype,
        quant=arguments.quant,
        routed=arguments.routed,
        tune_max_num_tokens=ladder.max_num_tokens,
    )
    layout = Layout(tp=arguments.tp, ep=arguments.ep, pp=arguments.pp, dp=arguments.dp)
    if ranks.world_size != layout.world_size:
        raise ConfigError(_why_no_fit(layout, ranks.world_size))
    probe = ProbeSpec(routing=arguments.routing, seed=arguments.seed)
    policy = MeasurementPolicy(arguments.policy)
    policy.modes(arguments.device)
    progress_timeout: timedelta = arguments.progress_timeout or min(PROGRESS_TIMEOUT, arguments.cap)
    if progress_timeout > arguments.cap:
        said = f"--progress-timeout {progress_timeout.total_seconds():g} exceeds --cap {arguments.cap.total_seconds():g}"
        raise ConfigError(f"{said}, which would end every pass first; raise --cap, or lower --progress-timeout")
    if ranks.rank == 0:
        require_writable(arguments.json)
    problem = MoEProblem.of(config, routed=arguments.routed)
    device = _device(arguments.device, ranks)
    next(usable_backends(problem, device, config.options))  # raises where there is none
    store_url = ("read-only:" if arguments.no_write else "") + (arguments.store or default_store())
    return TuneJob(
        arguments=arguments,
        ranks=ranks,
        shape=shape,
        problem=problem,
        ladder=ladder,
        probe=probe,
        policy=policy,
        progress_timeout=progress_timeout,
        device=device,
        store_url=store_url,
        store=open_store(store_url),
        layout=layout,
    )


def _why_no_fit(layout: Layout, started: int) -> str:
    needed, (times, left) = layout.world_size, divmod(started, layout.world_size)
    wider = ""
    if not left:
        wider = f"for all {started} give --ep {layout.ep * times} or --tp {layout.tp * times}, or --dp {layout.dp * times} to tune replicas apart; or "
    return (
        f"{layout} needs {needed} rank{'s' * (needed > 1)}, but {started} {'were' if started > 1 else 'was'} started; "
        f"{wider}use torchrun --nproc-per-node {needed} -m moe_dist.tune"
    )


def _require_one_job(job: TuneJob, group: dist.ProcessGroup | None) -> None:
    """A collective call. ConfigError: the ranks of `group` were asked for different problems. StoreError: none of them can use its store,
    so that nothing would outlive the run; where some can, tuning goes on, and the others warn: a disk of one host may fail."""
    words = {f"--{name}": getattr(job.arguments, name) for name in ("model", "dtype", "quant")} | {"--routed": job.arguments.routed or None}
    asked = " ".join(f"{name} {value}" for name, value in words.items() if value is not None)
    mine = None if job.store.url == "memory:" else why_not_kept(job.store_url)  # memory is asked for
    said = exchange((digest(job.problem.key().packed), asked, mine), group, job.ranks)
    if len({problem for problem, _, _ in said}) > 1:
        each = "; ".join(
            f"rank {rank}: {text} (problem {problem[:8]})" for rank, (problem, text, _) in zip(job.place.group, said, strict=True)
        )
        raise ConfigError(f"the ranks were asked for different problems: {each}; give all of them the same model, in the same form")
    if all(reason is not None for *_, reason in said):
        raise StoreError(
            f"store {job.store.url} can't be used: {mine}; mend it (`moe-dist doctor --store` checks "
            "it), name another with --store, or tune with --store memory:, which keeps nothing"
        )


def _why_not_kept(job: TuneJob, result: TuneResult) -> str | None:
    """Why the winners of `result` won't be found by who opens the store after this run; None: they will, or there are none."""
    if job.store.url == "memory:":
        return "memory: lasts as long as its process"
    if isinstance(job.store, ReadOnlyStore):
        return "--no-write" if job.arguments.no_write else "the store is read-only"
    if not result.has_winners:
        return None
    last, store = result.reports[-1], open_store(job.store_url)  # anew: this process's own sees also what its medium did not take
    try:
        with quiet_stores():
            shared = shared_layer(store)
            if any((name.number, name.table) == (last.epoch, last.digest) for name in published(shared, job.deployment)):
                return None
            return shared.degraded or f"epoch {last.epoch} is not there"
    finally:
        store.close()


def _device(kind: str, ranks: RankSettings) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if ranks.local_rank >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"--device cuda: rank {ranks.rank} needs GPU {ranks.local_rank}, but torch sees {count} on this host; "
            "start fewer ranks a host, or use --device cpu"
        )
    return torch.device("cuda", ranks.local_rank)


def run(arguments: argparse.Namespace) -> int:
    job = plan_job(arguments, rank_settings())
    with _signals() as interrupts:
        result = _tune(job, interrupts)
    result.short = why_short(result, arguments.budget, job.policy)
    if result.short and not result.has_winners:
        result.exit_code = result.exit_code or 1
    if not job.leads:
        return result.exit_code
    result.not_kept = _why_not_kept(job, result)
    if result.error:
        job.complain(result.error)
    if result.short:
        job.complain(result.short)
    if result.not_kept and job.store.url != "memory:" and not isinstance(job.store, ReadOnlyStore):
        job.complain(f"the winners are not kept in {job.store.url}: {result.not_kept}")
        result.exit_code = result.exit_code or 1
    if job.ranks.rank == 0 and arguments.json is not None:  # first: whoever reads the summary may stop before its end
        try:
            write_json(arguments.json, job.shape, job.problem.config, arguments, result)
        except OSError as error:
            print(f"moe-dist: the results can't be written: {error}", file=sys.stderr)
            result.exit_code = result.exit_code or 1
    if result.exit_code > 128:
        hurry()
    try:
        if job.ranks.rank == 0:
            print_summary(job.problem.config, result, sys.stdout)
        else:
            print_totals(result, sys.stdout)
    except OSError as error:
        if not result.exit_code and job.ranks.world_size == 1:
            raise
        if not isinstance(error, BrokenPipeError):  # else nobody is there to be told
            job.complain(f"the summary can't be printed: {error.strerror}")
    return result.exit_code


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived: leave by the same way out as any exception, telling the peers."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class _Interrupts:
    """Raises `Interrupted` at the first signal, but not between a pass's commit and its report: what is committed is reported.

    `held` puts the exception off until `check`; a second signal does not wait. Python drops what is raised inside a finaliser,
    so `check` also raises what was lost there.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.held = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        first, self.number = self.number is None, number
        if self.held != first:  # the first when nothing is held, the second when something is
            self.held = False
            raise Interrupted(number)

    def check(self) -> None:
        self.held = False
        if self.number is not None:
            raise Interrupted(self.number)


@contextlib.contextmanager
def _signals() -> Iterator[_Interrupts]:
    """The two signals that end a run, while the run lasts."""
    interrupts = _Interrupts()
    before = {number: signal.signal(number, interrupts) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _plain_signals() -> Iterator[None]:
    """The system's own end of a process, for a wait that gives Python no turn to run a handler. There is nothing yet to tell peers."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tune(job: TuneJob, interrupts: _Interrupts) -> TuneResult:
    """All passes, in order of token count. What ends them early is in the result; what was committed until then stays."""
    arguments, buckets = job.arguments, job.ladder.buckets()
    result = TuneResult(ranks=len(job.place.group), store=job.store.url, passes=len(buckets), group=job.group_name)
    started = time.monotonic()
    progress = Progress(len(buckets) * len(job.policy.modes(job.device.type)), shown=job.ranks.rank == 0)

    def on_progress(event: ProgressEvent) -> None:
        if event.phase in ("commit", "done"):
            interrupts.held = True
        else:
            interrupts.check()
        progress.update(event)

    hosted: Hosted | None = None
    try:
        with _plain_signals():
            try:
                group = meet(job.ranks, job.place.group, job.device, arguments.cap, job.complain)
                hosted = _hosted(job)
                _require_one_job(job, group)
            except RendezvousLost as error:
                if not job.leads:
                    job.complain(error)  # whoever speaks for its group may be long gone
                raise
            except (ConfigError, StoreError):
                if dist.is_initialized():
                    dist.destroy_process_group()  # all leave by this; a thread of gloo's that outlives Python aborts the process
                raise
        with (
            progress,
            Tuner(
                store=job.store,
                policy=job.policy,
                group=group,
                strategy=arguments.strategy,
                objective=arguments.objective,
                ladder=job.ladder,
                probe=job.probe,
                budget=arguments.budget and arguments.budget / len(buckets),
                deployment=job.deployment,
                device=job.device,
                progress_timeout=job.progress_timeout,
                cap=arguments.cap,
                on_progress=on_progress,
            ) as tuner,
        ):
            weights = make_random_weights(job.problem, job.place.ep_rank, job.place.tp_rank, job.device, arguments.seed)
            tuner.record(MoEOperation(job.problem, weights, job.device, job.problem.config.options))
            tuner.reload()  # what this deployment has tuned before stays in its table
            for at, bucket in enumerate(buckets):
                result.reports.append(tuner.run_pass([bucket], ahead=buckets[at + 1 :]))
                if hosted is not None:
                    hosted.go_on()
                interrupts.check()
                progress.next_pass(result.reports[-1])
            try:
                result.diverged = count_diverged(result.reports, group)
            except RuntimeError as error:  # torch's own, of a peer that is gone: every pass has ended by then
                result.error, result.exit_code = f"the ranks' winners can't be compared: {first_line(error)}", 1
    except Interrupted as interrupted:
        result.error = f"ended by {interrupted}"
        result.exit_code = 128 + interrupted.number
    except GroupError as error:
        number = interrupts.number  # a signal that was put off, while a peer left by its own
        result.error = str(error) if number is None else f"ended by {Interrupted(number)}"
        result.exit_code = 1 if number is None else 128 + number
        if number is None and not job.leads and job.place.group[0] in error.ranks:
            job.complain(error)  # whoever speaks for its group is gone
    except (MemoryError, torch.OutOfMemoryError) as error:
        # This rank's own end, which only it can tell of: peers say that it withdrew.
        print(f"moe-dist: rank {job.ranks.rank} ran out of memory: {first_line(error)}", file=sys.stderr)
        result.error = f"rank {job.ranks.rank} ran out of memory"
        result.exit_code = 1
    finally:
        result.seconds = time.monotonic() - started
        job.store.close()
        if hosted is not None:
            with contextlib.suppress(Interrupted):
                hosted.end(job.complain, wait=interrupts.number is None)  # who interrupts rank 0 wants it to end
    if result.exit_code == 0 and dist.is_initialized():
        dist.destroy_process_group()  # on any other end peers may be gone, and nobody waits for them
    return result


def _hosted(job: TuneJob) -> Hosted | None:
    """None: the launcher serves the rendezvous, or all ranks are of one group, which ends together."""
    size = len(job.place.group)
    ranks = job.ranks.world_size - size
    if not ranks or job_settings().agent:
        return None
    assert dist.group.WORLD is not None
    return Hosted(
        store_of(dist.group.WORLD), job.ranks.rank, job.ranks.rank // size, groups=ranks // size, ranks=ranks,
        patience=job.arguments.cap, to_end=job.progress_timeout,
    )  # fmt: skip
