"""Files and commands with which another launcher trains a plan, and the screen of `pipette order`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pipette_launch.errors import UsageError
from pipette_launch.facts import Plan
from pipette_launch.facts.co_location import DeviceBinding, bindings
from pipette_launch.report.plan import chosen_line, rank_ranges, schedule_words
from pipette_launch.report.screen import Line, bullet, columns, grid, paste_text, screen, text
from pipette_launch.text import plural, printable, seconds_text

Target = Literal["ft_launcher", "mpirun", "slurm", "ray", "kubernetes"]
MOST_HOSTS = 12
"""Largest number of hosts in a table of a screen."""
NEWLINE = "\n"
NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")
SLOT = {"mpirun": "OMPI_COMM_WORLD_LOCAL_RANK", "slurm": "SLURM_LOCALID"}
"""Variable with the index of a process on its host, for launchers without LOCAL_RANK. These launchers number the
processes of a host by RANK, and take the host of each RANK from hosts.txt."""
BY_NODE = {
    "ft_launcher": "with GROUP_RANK set to each host's place in the order of hosts",
    "ray": "in a framework that numbers the GPUs of one node after another, nodes in the order of hosts",
    "kubernetes": "in a static rendezvous with PET_NODE_RANK set to each host's place in the order of hosts, and "
    "PET_MASTER_ADDR to the first",
}
"""Ways to order whole hosts without rank.sh, for launchers that number the devices of one host after another."""
TEMPLATES = Path(__file__).with_name("orders")


class HostRanks(NamedTuple):
    """A host, and RANK and device of each of its processes by LOCAL_RANK."""

    host: str
    bound: tuple[DeviceBinding, ...]

    @property
    def devices(self) -> list[int]:
        """Device of each LOCAL_RANK."""
        return [one.device for one in self.bound]


def host_ranks(plan: Plan, placement: tuple[int, ...]) -> list[HostRanks]:
    """Return the hosts by their smallest RANK, under a placement on the plan's slots."""
    size = plan.devices_per_host
    rows = (placement[start : start + size] for start in range(0, len(placement), size))
    return sorted(map(HostRanks, plan.hosts, map(bindings, rows)), key=lambda one: min(one.bound).rank)


def by_host(plan: Plan) -> tuple[int, ...]:
    """Return the placement nearest to the plan's that numbers the devices of one host after another.

    Hosts are in the order of their mean RANK in the plan, and devices of a host in the order of their RANK.
    """
    size, ranks = plan.devices_per_host, plan.chosen.placement
    starts = range(0, len(ranks), size)
    order = sorted(starts, key=lambda start: sum(ranks[start : start + size]))
    return tuple(
        order.index(start) * size + sorted(ranks[start : start + size]).index(ranks[start + device])
        for start in starts
        for device in range(size)
    )


def order_files(plan: Plan, target: Target, environment: dict[str, str]) -> dict[str, str]:
    """Return name and text of each file that a launcher needs. `environment` has variables that the layout needs."""
    odd = [host for host in plan.hosts if not NAME.fullmatch(host)]
    if odd:
        raise UsageError(
            f"host {odd[0]!r} of the plan: launchers need names of letters, digits, dots and dashes; measure with one "
            "launcher on each host and one name for each host"
        )
    hosts = host_ranks(plan, plan.chosen.placement)
    found = {"rank.sh": _rank_script(plan, hosts, target, environment)}
    if target in SLOT:
        host_of = {one.rank: host.host for host in hosts for one in host.bound}
        found["hosts.txt"] = "".join(f"{host_of[rank]}\n" for rank in sorted(host_of))
    elif target == "ray":
        gpus = plan.devices_per_host if plan.device_kind == "cuda" else 0
        values = {"HOSTS": [one.host for one in hosts], "SIZE": plan.devices_per_host, "GPUS": gpus}
        found["ray_job.py"] = _filled("ray_job.txt", values)
    elif target == "kubernetes":
        names = (f"{{key: metadata.name, operator: In, values: [{json.dumps(one.host)}]}}" for one in hosts)
        terms = "\n".join(f"        - matchFields: [{name}]" for name in names)
        found["pod.yaml"] = _filled("pod.yaml", {"HOSTS": terms, "SIZE": plan.devices_per_host})
    return found


def _rank_script(plan: Plan, hosts: list[HostRanks], target: Target, environment: dict[str, str]) -> str:
    size = plan.devices_per_host
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
    moves = plan.device_kind == "cuda" and any(one.devices != sorted(one.devices) for one in hosts)
    rows = []
    for host in hosts:
        slots = sorted(enumerate(host.bound), key=lambda slot: slot[1].rank if target in SLOT else slot[0])
        words = {"ranks": [one.rank for _, one in slots], "locals": [local for local, _ in slots]}
        words |= {"devices": host.devices} if moves else {}
        row = " ".join(f"{name}='{' '.join(map(str, values))}'" for name, values in words.items())
        rows.append(f"{host.host}) {row} ;;")
    # RANK 0 opens the store, on its own host, unless torchrun or the driver of Ray has a store.
    meeting = f'export MASTER_ADDR={hosts[0].host} MASTER_PORT="${{MASTER_PORT:-29500}}"'
    if target == "kubernetes":
        meeting = '{ echo "rank.sh: unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >&2; exit 2; }'
    if target in ("ft_launcher", "kubernetes"):
        meeting = f'[ "$TORCHELASTIC_USE_AGENT_STORE" = True ] || {meeting}'
    if target != "ray":
        exports.append(f"{meeting}\n")
    if moves:
        exports.append(_filled("devices.sh", {"ALL": ",".join(map(str, range(size)))}))
    values = {
        "NODE": "${PIPETTE_NODE:-${SLURMD_NODENAME:-$(uname -n)}}",
        "HOSTS": "\n".join(rows),
        "SLOT": SLOT.get(target, "LOCAL_RANK"),
        "WORLD": len(plan.chosen.placement),
        "SIZE": size,
        "EXPORTS": "".join(exports),
    }
    return _filled("rank.sh", values)


def _filled(template: str, values: Mapping[str, object]) -> str:
    text_so_far = (TEMPLATES / template).read_text(encoding="utf-8")
    for name, value in values.items():
        text_so_far = text_so_far.replace(f"@{name}@", str(value))
    return text_so_far


def command_words(plan: Plan, target: Target) -> str:
    """Return the command that starts the job; ARGS stands for the script's own arguments."""
    hosts, size, world = len(plan.hosts), plan.devices_per_host, len(plan.chosen.placement)
    script = shlex.quote(plan.setting.script if plan.setting else "SCRIPT")
    job, meet = f"python {script} ARGS", f"{host_ranks(plan, plan.chosen.placement)[0].host}:29500"
    return {
        "ft_launcher": "# on each host\n"
        f"ft_launcher --nnodes {hosts} --nproc-per-node {size} --rdzv-backend c10d \\\n"
        f"  --rdzv-endpoint {meet} --rdzv-id order --no-python sh rank.sh {job}\n",
        "mpirun": f"mpirun -np {world} --hostfile hosts.txt --map-by seq --bind-to none sh rank.sh \\\n  {job}\n",
        "slurm": f"SLURM_HOSTFILE=hosts.txt srun --distribution=arbitrary --nodes={hosts} --ntasks={world} \\\n"
        f"  --kill-on-bad-exit sh rank.sh {job}\n",
        "ray": f"python ray_job.py {job}\n",
        "kubernetes": "kubectl create configmap order --from-file=rank.sh\n"
        f"# Merge pod.yaml into the pod's spec; its args are {script} ARGS.\n",
    }[target]


def order_screen(
    plan: Plan, target: Target, found: dict[str, str], *, steps_s: tuple[float, ...] | None, unpriced: str, folder: str
) -> str:
    """Draw the order of a plan under a launcher. Files, command and flags to paste stand below the frame.

    `steps_s` has the predicted step under the launcher with rank.sh, and with the order of hosts alone. None = not
    priced, for the reason `unpriced`. `folder` has the written files; if `folder` is empty, the files are printed.
    """
    alone = by_host(plan)
    shows_alone = target in BY_NODE and alone != plan.chosen.placement
    drawn = screen(
        f"pipette order --for {target}",
        (
            ("Plan", [chosen_line(plan)]),
            ("Hosts", _host_rows(plan, host_ranks(plan, plan.chosen.placement))),
            ("Order", map(bullet, _order_words(plan, target, steps_s, unpriced))),
            ("By host", _host_rows(plan, host_ranks(plan, alone)) if shows_alone else ()),
        ),
    )
    here = "".join(f"cat > {name} <<'END'\n{body}END\n" for name, body in found.items())
    written = f"Written to {printable(folder)}: {', '.join(found)}\n" if folder else here
    setting = plan.setting
    flags = paste_text(setting.arguments, setting.new_arguments, width=columns(sys.stdout)) if setting else ""
    return f"{drawn}{written}{printable(command_words(plan, target), keep=NEWLINE)}{flags}{schedule_words(plan)}"


def _host_rows(plan: Plan, hosts: list[HostRanks]) -> Iterator[Line]:
    rows: list[tuple[Line, ...]] = [(text("host", "dim"), text("ranks", "dim"), text("CUDA_VISIBLE_DEVICES", "dim"))]
    for one in hosts[:MOST_HOSTS]:
        devices = ",".join(map(str, one.devices)) if plan.device_kind == "cuda" else "-"
        rows.append((one.host, rank_ranges([bound.rank for bound in one.bound]), devices))
    yield grid("lwl", rows)
    if len(hosts) > MOST_HOSTS:
        yield text(f"… and {len(hosts) - MOST_HOSTS} more {plural('host', len(hosts) - MOST_HOSTS)}, in rank.sh", "dim")


def _order_words(plan: Plan, target: Target, steps_s: tuple[float, ...] | None, unpriced: str) -> Iterator[str]:
    """Return sentences on the part of the plan's gain that the launcher keeps."""
    if target in SLOT:
        yield "hosts.txt gives each RANK its host, and rank.sh gives each RANK its device: exactly the plan's order."
    else:
        yield "rank.sh gives each process the plan's RANK and device: exactly the plan's order."
    if plan.chosen.order is not None:
        loss = _loss(plan, steps_s[0]) if steps_s else f"not priced: {unpriced}"
        yield f"Without the schedule {plan.chosen.order.name}: {loss}."
    if target in BY_NODE:
        if by_host(plan) == plan.chosen.placement:
            loss = "nothing is lost"
        else:
            loss = _loss(plan, steps_s[1]) if steps_s else f"the loss is not priced: {unpriced}"
        yield f"Without rank.sh, {BY_NODE[target]}: {loss}."
    if plan.provenance.source == "imagined":
        yield "The hosts are imagined: replace their names by the names of your hosts."


def _loss(plan: Plan, step_s: float) -> str:
    """Return the loss of a step time against the plan, as a share of the plan's gain over the user's configuration."""
    planned_s, own_s = plan.chosen.step_time_s, plan.own.step_time_s
    words = f"a step takes {seconds_text(step_s)} instead of {seconds_text(planned_s)}"
    if plan.keeps_own or plan.own_fault or own_s <= planned_s:
        return words
    return f"{words}, which loses {(step_s - planned_s) / (own_s - planned_s):.0%} of the plan's gain"
