"""torchrun on two hosts of two ranks: shared memory inside a host, sockets between hosts, results of one process.

Both hosts are simulated on this machine.  Where permitted, each has Linux namespaces (network, host name, hosts file,
processes, shared memory; without privileges) and a virtual cable connects them, so the ranks cannot detect that they
share a machine.  Elsewhere they are two loopback addresses, and ZCOMM_HOST declares them separate.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zcomm

SCRIPT = Path(__file__).with_name("two_hosts.py")
ISOLATED = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
# The first host; the second is a child in other namespaces, to which the first connects the cable.
HOSTS = r"""
set -e
ip link set lo up; hostname alpha
printf '127.0.0.1 localhost\n10.77.0.1 alpha\n10.77.0.2 beta\n' > "$FOLDER/hosts"
mount --bind "$FOLDER/hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
unshare --net --uts --mount --pid --fork --mount-proc bash -c '
    hostname beta; mount -t tmpfs tmpfs /dev/shm; ip link set lo up
    until ip link show cable1 >/dev/null 2>&1; do sleep 0.05; done
    ip addr add 10.77.0.2/24 dev cable1; ip link set cable1 up
    exec {second}' > "$FOLDER/beta.log" 2>&1 &
unshared=$!
inner=
for attempt in $(seq 200); do
    inner=$(cat /proc/$unshared/task/$unshared/children 2>/dev/null | tr -d ' ')
    [ -n "$inner" ] && [ "$(readlink /proc/$inner/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
    sleep 0.05
done
ip link add cable0 type veth peer name cable1 netns "$inner"
ip addr add 10.77.0.1/24 dev cable0; ip link set cable0 up
status=0
{first} > "$FOLDER/alpha.log" 2>&1 || status=$?
wait $unshared || status=$?
exit $status
"""


def can_isolate() -> bool:
    """True if this machine permits simulated hosts in namespaces."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    tried = [
        *ISOLATED,
        "bash",
        "-c",
        "ip link add cable0 type veth peer name cable1 && hostname x && mount -t tmpfs t /dev/shm",
    ]
    return subprocess.run(tried, capture_output=True, timeout=600).returncode == 0


def torchrun(node: int, address: str, port: int, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}"),
        *(f"--master-addr={address}", f"--master-port={port}", str(SCRIPT), str(folder)),
    ]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("ZCOMM_HOST", "GLOO_SOCKET_IFNAME")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def in_namespaces(folder: Path) -> dict[str, int]:
    """Run on hosts in namespaces; return the exit status."""
    first, second = (shlex.join(torchrun(node, "10.77.0.1", 29400, folder)) for node in (0, 1))
    text = HOSTS.replace("{first}", first).replace("{second}", second)
    command = [*ISOLATED, "--kill-child", "bash", "-c", text]
    return {"all": subprocess.run(command, env=environment(FOLDER=str(folder)), timeout=600).returncode}


def on_loopback(folder: Path) -> dict[str, int]:
    """Run on loopback addresses; return the exit status of each host."""
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    hosts = {}
    for node, name in enumerate(("alpha", "beta")):
        command = [*torchrun(node, "127.0.0.2", port, folder)]
        command.insert(3, f"--local-addr=127.0.0.{2 + node}")
        with open(folder / f"{name}.log", "w") as log:
            told = environment(ZCOMM_HOST=name)
            hosts[name] = subprocess.Popen(command, env=told, stdout=log, stderr=subprocess.STDOUT)
    try:
        return {name: host.wait(timeout=600) for name, host in hosts.items()}
    finally:
        for host in hosts.values():
            host.kill()


def test_two_hosts_of_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    statuses = in_namespaces(tmp_path) if can_isolate() else on_loopback(tmp_path)
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(tmp_path.glob("*.log")))
    assert set(statuses.values()) == {0}, logs
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    for number, rank in enumerate(ranks):
        assert rank["transport"] == "shared memory + gloo", rank["reason"]
        assert rank["sum"] == [6.0] * 5
        assert rank["place"][:3] == [number, number % 2, 2]
    script = runpy.run_path(str(SCRIPT))
    with zcomm.init(environ={}, device="cpu"):
        for run in script["RUNS"]:
            expected = script["trained"](run, tmp_path / "alone")
            assert all(rank[run] == pytest.approx(expected, rel=1e-5) for rank in ranks), run
            found, wanted = (script["weights"](run, folder) for folder in (tmp_path, tmp_path / "alone"))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
