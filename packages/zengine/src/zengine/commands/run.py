"""`zengine run train.py --config c.json`: start one process per device with torchrun, on one or several hosts.

torchrun starts, restarts and reaps the processes; this command finds the numbers and execs torchrun, so signals and
the exit status are torchrun's.  It adds:

- `--nproc`: defaults to the visible GPUs, else 1; OMP_NUM_THREADS splits the cores.
- `--bind-cores`: binds each process to its own cores (commands/bound.py).
- `--keep-memory`: on CPUs, memory freed by a step is kept for the next one, as on a GPU.  glibc returns large blocks
  to the system and gets them back page by page, zeroed: a fifth of a step with gradients of many experts.
- `--hostfile`: lines "name slots=8" as in DeepSpeed and MPI, with "#" comments.  `--include` and `--exclude` filter
  it by hosts joined with "@", each with device numbers or without: "worker-1@worker-2:0,2".  Prints the command of
  each host and, without `--dry-run`, starts that of this host.  It never logs in to a host: use your scheduler or a
  loop over ssh.
- `--elastic MIN:MAX`: a job of that many hosts, which come and go.  Each host runs this command with the same
  `--master-addr`, the host that keeps the list of hosts.  When one joins or is gone, torchrun ends the ranks and
  starts them at the new world size; the script resumes from its newest checkpoint, which loads at any world size, and
  the config's section `elasticity` keeps the batch size.
- inside a SLURM allocation of several nodes, outside a task: becomes an `srun` line with a torchrun on each node;
  with `--elastic` too, which outlives a node only if the job was submitted with `--no-kill`.

Rejected for elastic jobs: an agent of our own.  torchrun's watches members by heartbeats, does not count restarts for
a changed membership as failures, and is what schedulers know.

Rejected: pdsh, MPI and ssh back-ends, which fail differently on every cluster.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

from zengine.commands import CommandError

__all__ = [
    "Elastic",
    "Host",
    "Launch",
    "commands",
    "default_nproc",
    "elastic_of",
    "parse_hosts",
    "run",
    "select_hosts",
    "slurm_line",
    "torchrun_line",
    "variables",
]

BOUND = "zengine.commands.bound"  # the module that binds a process to its cores and then runs the script
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # read by glibc, ignored by others
# With torchrun's shared store a host that joins later waits for an address that rank 0 published in an earlier round.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# A host that sends no heartbeat for 10 s is gone; others are awaited for 5 s once there are enough.
MEMBERSHIP = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"
_HOST_LINE = re.compile(r"(?P<name>[^\s#]+)\s+slots=(?P<slots>[1-9]\d*)$")


@attrs.frozen
class Host:
    """Machine of a hostfile and its selected devices."""

    name: str
    devices: tuple[int, ...]
    slots: int  # devices of the host

    @property
    def uses_all(self) -> bool:
        """True if every device of the host is selected."""
        return len(self.devices) == self.slots


@attrs.frozen
class Elastic:
    """Number of hosts of an elastic job."""

    least: int
    most: int
    endpoint: str  # host:port that keeps the list of hosts
    job: str  # name of the job there
    address: str = ""  # this host's, if its name does not resolve to it


@attrs.frozen(kw_only=True)
class Launch:
    """Launch options shared by all hosts."""

    nproc: int  # processes on a host
    port: int  # of the rendezvous
    max_restarts: int
    binds_cores: bool
    script: tuple[str, ...]  # and its arguments; begins with "-m" for a module


def run(arguments: argparse.Namespace) -> int:
    """Exec torchrun.  Raises CommandError for invalid hosts or options."""
    lines = commands(arguments, os.environ, socket.gethostname())
    own = next((line for host, line in lines if _is_here(host)), None)
    if arguments.dry_run or own is None or len(lines) > 1:
        for host, line in lines:
            print(f"{host}: {shlex.join(line)}" if host else shlex.join(line))
    if arguments.dry_run:
        return 0
    if own is None:
        hosts = ", ".join(host for host, _ in lines)
        raise CommandError(
            f"this host ({socket.gethostname()}) is not in the hostfile ({hosts}): run the line above on each of "
            "those hosts, or start on one of them"
        )
    sys.stdout.flush()
    environment = {**os.environ, **variables(arguments, os.environ)}
    return os.execvpe(own[0], own, environment)  # does not return


def commands(arguments: argparse.Namespace, environ: Mapping[str, str], here: str) -> list[tuple[str, list[str]]]:
    """Return (host, command) for each host; the host is "" for this machine alone.  Reads the hostfile only."""
    launch = Launch(
        nproc=arguments.nproc or default_nproc(environ),
        port=arguments.master_port,
        max_restarts=max_restarts_of(arguments),
        binds_cores=arguments.bind_cores,
        script=(*(("-m",) if arguments.module else ()), arguments.script, *arguments.arguments),
    )
    elastic = elastic_of(arguments)
    if elastic is not None and not arguments.hostfile:
        if _is_allocation(environ):
            address = arguments.master_addr or _first_node(environ)
            joint = attrs.evolve(elastic, endpoint=f"{address}:{launch.port}")
            each = attrs.evolve(launch, nproc=_nproc_of_nodes(launch, environ, arguments.nproc))
            return [("", [*srun_line(environ, "--no-kill", "--kill-on-bad-exit=0"), *elastic_line(each, joint)])]
        return [("", elastic_line(launch, attrs.evolve(elastic, address=unnamed_address(elastic.endpoint))))]
    if arguments.hostfile:
        hosts = _hosts(arguments)
        if elastic is not None:
            joint = attrs.evolve(elastic, endpoint=f"{arguments.master_addr or hosts[0].name}:{launch.port}")
            return [(host.name, elastic_line(launch, joint, host)) for host in hosts]
        master = arguments.master_addr or hosts[0].name
        return [
            (host.name, torchrun_line(launch, host=host, index=index, num_hosts=len(hosts), master=master))
            for index, host in enumerate(hosts)
        ]
    if arguments.include or arguments.exclude:
        raise CommandError("--include and --exclude filter a --hostfile; on one host set CUDA_VISIBLE_DEVICES")
    if _is_allocation(environ):
        return [("", slurm_line(launch, environ, arguments.nproc))]
    return [("", torchrun_line(launch))]


def variables(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to add for the processes."""
    nproc = arguments.nproc or default_nproc(environ)
    wanted = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc))}
    if arguments.keep_memory:
        wanted |= KEEP_MEMORY
    if arguments.elastic:
        wanted |= OWN_STORE
    return {name: value for name, value in wanted.items() if name not in environ}


def torchrun_line(
    launch: Launch, *, host: Host | None = None, index: int = 0, num_hosts: int = 1, master: str = ""
) -> list[str]:
    """Return the torchrun command of one host; without `host`, of this machine alone."""
    nproc = launch.nproc if host is None else len(host.devices)
    line = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
    if launch.max_restarts:
        line.append(f"--max-restarts={launch.max_restarts}")
    if host is None:
        line.append("--standalone")
    else:
        line += [f"--nnodes={num_hosts}", f"--node-rank={index}"]
        line += [f"--master-addr={master}", f"--master-port={launch.port}"]
    line += ["-m", BOUND, *launch.script] if launch.binds_cores else [*launch.script]
    if host is not None and not host.uses_all:
        return ["env", f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.devices))}", *line]
    return line


def elastic_of(arguments: argparse.Namespace) -> Elastic | None:
    """Return the numbers of hosts of `--elastic MIN:MAX`; None without it.  Raises CommandError."""
    if not arguments.elastic:
        return None
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", arguments.elastic)
    if match is None or int(match[1]) > int(match[2]):
        raise CommandError(f'--elastic "{arguments.elastic}" is not MIN:MAX, such as 1:4: numbers of hosts')
    endpoint = f"{arguments.master_addr or 'localhost'}:{arguments.master_port}"
    return Elastic(int(match[1]), int(match[2]), endpoint, arguments.job_id)


def max_restarts_of(arguments: argparse.Namespace) -> int:
    """Return the restarts after a failure; by default an elastic job outlives many."""
    given: int | None = arguments.max_restarts
    return (100 if arguments.elastic else 0) if given is None else given


def unnamed_address(endpoint: str) -> str:
    """Return this host's address on the way to "address:port" if its own name does not resolve to it; else "".

    torchrun tells other hosts the name of this one, and compares the endpoint with it to find out who keeps the list
    of hosts.  A second interface, or a container, has an address without that name.
    """
    address, _, port = endpoint.rpartition(":")
    try:
        source = _source_address(address, int(port))
    except OSError:  # an unknown name or network: torchrun says so
        return ""
    try:
        named = {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:  # the host does not know its own name
        named = set()
    return "" if source in named or ipaddress.ip_address(source).is_loopback else source


def _source_address(address: str, port: int) -> str:
    """Return the address from which this host sends to another; nothing is sent.  Raises OSError."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _address_options(elastic: Elastic) -> tuple[list[str], str]:
    """Return options of torchrun, and of its --rdzv-conf, for a host whose address has no name."""
    if not elastic.address:
        return [], ""
    host, _, port = elastic.endpoint.rpartition(":")
    options = [f"--local-addr={elastic.address}"]
    if elastic.address not in {str(each[4][0]) for each in socket.getaddrinfo(host, None)}:
        return options, ",is_host=0"
    with socket.socket(socket.AF_INET6 if ":" in elastic.address else socket.AF_INET) as probe:
        is_kept = probe.connect_ex((elastic.address, int(port))) == 0  # by another process of this host
    return options, f",is_host={int(not is_kept)}"


def elastic_line(launch: Launch, elastic: Elastic, host: Host | None = None) -> list[str]:
    """Return the torchrun command of one host of an elastic job."""
    nproc = launch.nproc if host is None else len(host.devices)
    options, more = _address_options(elastic)
    line = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={elastic.least}:{elastic.most}"),
        *(f"--nproc-per-node={nproc}", f"--max-restarts={launch.max_restarts}", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint={elastic.endpoint}", f"--rdzv-id={elastic.job}", f"--rdzv-conf={MEMBERSHIP}{more}"),
        *options,
    ]
    line += ["-m", BOUND, *launch.script] if launch.binds_cores else [*launch.script]
    if host is not None and not host.uses_all:
        return ["env", f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.devices))}", *line]
    return line


def slurm_line(launch: Launch, environ: Mapping[str, str], nproc: int) -> list[str]:
    """Return the srun command of an allocation: one torchrun per node, with the rendezvous on the first."""
    per_node = _nproc_of_nodes(launch, environ, nproc)
    nodes = environ.get("SLURM_NNODES", "1")
    job = environ["SLURM_JOB_ID"]
    inner = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={per_node}"),
        *("--rdzv-backend=c10d", f"--rdzv-id={job}", f"--rdzv-endpoint={_first_node(environ)}:{launch.port}"),
        *((f"--max-restarts={launch.max_restarts}",) if launch.max_restarts else ()),
        *(("-m", BOUND) if launch.binds_cores else ()),
        *launch.script,
    ]
    return [*srun_line(environ), *inner]


def _nproc_of_nodes(launch: Launch, environ: Mapping[str, str], nproc: int) -> int:
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    return nproc or (int(gpus) if gpus.isdigit() else launch.nproc)


def srun_line(environ: Mapping[str, str], *options: str) -> list[str]:
    """Return the beginning of a command that runs once on each node of the allocation."""
    nodes = environ.get("SLURM_NNODES", "1")
    # An allocation for more tasks a node has SLURM_NTASKS, which counts more than --ntasks-per-node.
    return ["srun", *options, f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]


def default_nproc(environ: Mapping[str, str]) -> int:
    """Return the number of visible GPUs of this host, at least 1."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        listed = [part for part in environ["CUDA_VISIBLE_DEVICES"].split(",") if part.strip() not in ("", "-1")]
        return max(1, len(listed))
    import torch

    return max(1, torch.cuda.device_count())


def _is_allocation(environ: Mapping[str, str]) -> bool:
    """Return True inside an allocation of several nodes, outside of its tasks."""
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ and int(environ.get("SLURM_NNODES", "1")) > 1


def _first_node(environ: Mapping[str, str]) -> str:
    """Return the first name of SLURM's node list: gpu003 of "gpu[003-007,9],x1"."""
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or os.uname().nodename
    name, bracket, rest = listed.partition("[")
    if not bracket or "," in name:
        return listed.partition(",")[0]
    return name + rest.partition("]")[0].partition(",")[0].partition("-")[0]


def _is_here(host: str) -> bool:
    """Return True if a name of a hostfile is this machine."""
    return host in ("", "localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().partition(".")[0])


def _hosts(arguments: argparse.Namespace) -> list[Host]:
    try:
        text = Path(arguments.hostfile).read_text()
    except OSError as error:
        raise CommandError(f"--hostfile {arguments.hostfile}: {error.strerror}") from None
    try:
        return select_hosts(parse_hosts(text), include=arguments.include, exclude=arguments.exclude)
    except ValueError as error:
        raise CommandError(f"{arguments.hostfile}: {error}") from None


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts in file order.  Raises ValueError with the number of an invalid line."""
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _HOST_LINE.match(line)
        if match is None:
            raise ValueError(f'line {number}: "{line}" is not "name slots=8"')
        if match["name"] in found:
            raise ValueError(f"line {number}: {match['name']} is listed twice")
        slots = int(match["slots"])
        found[match["name"]] = Host(match["name"], tuple(range(slots)), slots)
    if not found:
        raise ValueError('the file has no host; write lines like "worker-1 slots=8"')
    return list(found.values())


def select_hosts(hosts: list[Host], *, include: str = "", exclude: str = "") -> list[Host]:
    """Return the hosts that pass a filter.  Raises ValueError for unknown names and devices, or an empty result."""
    if include and exclude:
        raise ValueError("--include and --exclude are mutually exclusive")
    named = _filter(include or exclude, hosts)
    found = []
    for host in hosts:
        picked = named.get(host.name, ())
        devices = tuple(d for d in host.devices if (d in picked) == bool(include)) if named else host.devices
        if devices:
            found.append(attrs.evolve(host, devices=devices))
    if not found:
        raise ValueError("the filter selects no device")
    return found


def _filter(text: str, hosts: list[Host]) -> dict[str, tuple[int, ...]]:
    """Return host -> devices named by the filter."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in filter(None, text.split("@")):
        name, colon, numbers = part.partition(":")
        if name not in known:
            raise ValueError(f'"{name}" is not in the file; its hosts are {", ".join(known)}')
        if colon and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise ValueError(f'"{part}" is not "host:0,2"')
        devices = tuple(map(int, numbers.split(","))) if colon else known[name].devices
        beyond = [device for device in devices if device >= known[name].slots]
        if beyond:
            raise ValueError(f"{name} has devices 0 to {known[name].slots - 1}, not {beyond[0]}")
        found[name] = devices
    return found
