"""What one rank does on its host, started by torchrun: tunes over two kinds of stores, then is in the middle of a pass when the link is cut.

host_rank.py CONTROL DISK REDIS COST_US: the folder of marks and outcomes, this host's disk, the shared server, and what a call of the last
pass costs. Each outcome is a line of CONTROL/RANK.jsonl.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from moe_dist.bench.simulated import SimulatedOperation
from moe_dist.errors import MoEDistError
from moe_dist.tuning.policy import MeasurementPolicy
from moe_dist.tuning.problem import BucketLadder
from moe_dist.tuning.tuner import Tuner

POLICY = MeasurementPolicy(rounds=2, sweeps=1, window=timedelta(milliseconds=1))


def main(control: Path, disk: str, redis: str, cost_us: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_dist").addHandler(handler)

    def tune(step: str, store: str, strategy: str, cost: float, *, alone: bool = False) -> None:
        said.clear()
        outcome: dict[str, object] = {"step": step}
        try:
            with Tuner(
                store=store, group=None if alone else dist.group.WORLD, strategy=strategy, policy=POLICY, ladder=BucketLadder((1,)),
                deployment=step, device="cpu", progress_timeout=timedelta(seconds=8), cap=timedelta(seconds=90),
                on_progress=lambda event: (control / f"{step}-{event.phase}-{rank}").touch(),
            ) as tuner:  # fmt: skip
                tuner.record(SimulatedOperation(step, {"plain": cost, "quick": cost / 4, "slow": 2 * cost}))
                report = tuner.run_pass()
            outcome |= {"digest": report.digest, "measured": report.measured, "hits": report.hits}
        except MoEDistError as error:
            outcome |= {"error": type(error).__name__, "message": str(error), "ranks": list(getattr(error, "ranks", ()))}
        with (control / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps({**outcome, "ended": time.monotonic(), "said": said}) + "\n")

    shared = f"layered:{disk}/layered,{redis}?timeout=1"
    tune("disk", f"{disk}/alone", "reload", 4000.0)
    tune("layered", shared, "reload", 4000.0)
    dist.barrier()  # the first rank publishes after the commit, and the second one is to read that
    tune("layered", shared, "reload", 4000.0)
    tune("cut", shared, "reduce", cost_us)
    tune("layered", shared, "reload", 4000.0, alone=True)
    (control / f"{rank}.done").touch()
    os._exit(0)  # the launcher's threads may wait for a peer that is out of reach


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
