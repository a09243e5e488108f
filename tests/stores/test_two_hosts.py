"""Two hosts, a rank on each, started by torchrun: disks that are not shared, a local store over a shared one, and a cable that is pulled."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from two_hosts import PASSWORD, FolderHosts, Hosts, NamespaceHosts, wait_for

from moe_dist.stores.filesystem import FilesystemStore

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("host_rank.py")
DEADLINE_S = 90.0  # the cap of a pass: nobody may wait longer
START_S = 150.0  # four imports of torch, on a machine that is busy


@contextlib.contextmanager
def started(hosts: Hosts, control: Path, cost_us: float) -> Any:
    """torchrun on each host. Whatever is left in the end is killed: an agent whose peer is out of reach waits for it for minutes."""
    control.mkdir()
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": hosts.interface,
    }
    agents = []
    for host in (0, 1):
        address, port = hosts.rendezvous(host)
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(host)]
        launch += ["--master-addr", address, "--master-port", str(port), str(RANK)]
        command = hosts.command(host, [*launch, str(control), hosts.disk(host), hosts.redis(host), str(cost_us)])
        log = (control / f"{host}.log").open("wb")
        agents.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
    try:
        yield
    except BaseException:
        print(*(path.read_text() for path in control.glob("*.log")), sep="\n---\n")
        raise
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(60)
        for folder in Path("/proc").glob("[0-9]*"):  # ranks have sessions of their own
            with contextlib.suppress(OSError):
                if str(control).encode() in (folder / "cmdline").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)


def outcomes(control: Path) -> list[list[dict[str, Any]]]:
    """Of each rank, once both are done."""
    for rank in (0, 1):
        wait_for(control / f"{rank}.done", DEADLINE_S)
    return [[json.loads(line) for line in (control / f"{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]


def kept(store: Path) -> list[str]:
    return FilesystemStore(store).list("entries")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [NamespaceHosts, FolderHosts])
def test_two_hosts(kind: type[Hosts], tmp_path: Path) -> None:
    with kind(tmp_path) as hosts:
        first = tmp_path / "first"
        with started(hosts, first, cost_us=1e6):
            for rank in (0, 1):
                wait_for(first / f"cut-measure-{rank}", START_S)
            cut = time.monotonic()
            hosts.cut()
            ended = outcomes(first)

        for rows in ended:
            done = [(row["step"], row.get("measured"), row.get("hits")) for row in rows[:3]]
            assert done == [("disk", 3, 0), ("layered", 3, 0), ("layered", 0, 1)]
            assert rows[1]["said"] == rows[2]["said"] == []
        for step in (0, 1, 2):
            assert ended[0][step]["digest"] == ended[1][step]["digest"]
        # A disk of each host, under one path or not, is no shared store: the table goes over the group.
        not_shared = [[f"store file://{hosts.disk(0)}/alone is not shared with rank 1: the table is sent over the group"], []]
        assert [ended[rank][0]["said"] for rank in (0, 1)] == not_shared

        # The link is cut: each host sees the other one gone, by its own error, in time.
        lost, unreachable = ended[0][3], ended[1][3]
        assert (lost["step"], lost["error"], lost["ranks"]) == ("cut", "RankLost", [1]), lost
        assert "rank 1 lost in pass 1, step measure-0" in lost["message"]
        assert (unreachable["step"], unreachable["error"]) == ("cut", "RendezvousLost"), unreachable
        assert "the rendezvous store can't be reached" in unreachable["message"]
        assert max(lost["ended"], unreachable["ended"]) - cut < DEADLINE_S
        # And the second host alone still has what both tuned, from its own disk.
        alone = ended[1][4]
        assert (alone["measured"], alone["hits"], alone["digest"]) == (0, 1, ended[1][1]["digest"])
        (warning,) = [line for line in alone["said"] if "Going on in memory" in line]
        assert f"store {hosts.redis(1).replace(f':{PASSWORD}@', '')}/0: " in warning
        assert kept(hosts.disks[0] / "layered") == kept(hosts.disks[1] / "layered") != []
        assert (len(kept(hosts.disks[0] / "alone")), kept(hosts.disks[1] / "alone")) == (1, [])

        for path in (*first.glob("*.jsonl"), *first.glob("*.log")):
            assert PASSWORD not in path.read_text()

        # A restart heals: what was tuned is found wherever one rank has it, and what was cut off is tuned now.
        hosts.mend()
        with started(hosts, tmp_path / "second", cost_us=4000.0):
            for rank in (0, 1):
                wait_for(tmp_path / f"second/{rank}.done", START_S)
            healed = outcomes(tmp_path / "second")
        for rank in (0, 1):
            measured = [(row["step"], row.get("measured"), row.get("hits"), row["said"]) for row in healed[rank][:4]]
            assert measured == [("disk", 0, 1, []), *[("layered", 0, 1, [])] * 2, ("cut", 3, 0, [])]
        assert [row["digest"] for row in healed[0][:4]] == [row["digest"] for row in healed[1][:4]]
        assert healed[0][0]["digest"] == ended[0][0]["digest"]
