"""``python -m llmx doctor [overrides] [--bandwidth] [--fix] [--json]``: what a launch would check,
without one. Everything that is wrong is listed, not only the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from llmx.errors import ConfigError, LaunchError, LlmxError

if TYPE_CHECKING:
    from llmx.compose.complete import Composed
    from llmx.compose.words import Words
    from llmx.launch.agents.connection import Connection
    from llmx.launch.agents.mesh import AllReduce, Mesh, Node
    from llmx.launch.spec import LaunchSpec


@dataclass
class Report:
    """What was found. Errors would stop a launch."""

    hosts: list[str] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host -> its survey."""
    clock_offsets_s: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    mesh: Mesh | None = None
    all_reduce: AllReduce | None = None
    meaning: str = ""
    """What the network means for a step of this config."""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """A check that raises adds its sentences to the errors, and the next one goes on."""
        try:
            yield
        except LlmxError as error:
            self.errors += str(error).splitlines()


def run(words: Words, *, stream: TextIO | None = None) -> int:
    """Check the hosts of a config; the exit code is 0 without errors."""
    from llmx.cli.plan import composed_line
    from llmx.launch.files import make_spec
    from llmx.run.rundir import RunDir

    out, began = stream or sys.stdout, time.monotonic()
    if words.fix and words.json:
        raise ConfigError("--fix asks before it removes something: leave out --json.")
    if words.show or words.multirun:
        raise ConfigError(
            "doctor: takes overrides, --config-dir, --bandwidth and --fix and --json only."
        )
    composed = composed_line(words)
    exp, plan = composed.experiment, composed.plan
    place = Path(exp.run_dir)
    while not place.is_dir():
        place = place.parent
    # Where the run directory would be, so that the disk and the file system are those of the run.
    with tempfile.TemporaryDirectory(prefix=".llmx-doctor-", dir=place) as directory:
        for name in ("logs", "ranks"):
            (Path(directory) / name).mkdir()
        spec = make_spec(exp, plan, RunDir(Path(directory)), port=0)
        leftovers: dict[str, dict[str, list[Any]]] = {}
        for removes in (True, False):
            report = examine(spec, bandwidth=words.bandwidth, remove=leftovers)
            if report.all_reduce and len(report.hosts) > 1:
                report.meaning = network_time(composed, report.all_reduce.gbit_per_s)
            for texts in (report.errors, report.warnings):
                texts[:] = [pasteable(text, spec).replace(directory, exp.run_dir) for text in texts]
            report.seconds = time.monotonic() - began
            if words.json:
                print(json.dumps(to_json(report), indent=2), file=out)
            else:
                print("\n".join(lines_of(report)), file=out)
            leftovers = leftovers_of(report) if words.fix and removes else {}
            if not leftovers or not agreed(leftovers, out):
                break
            began = time.monotonic()
    return LaunchError.exit_code if report.errors else 0


def leftovers_of(report: Report) -> dict[str, dict[str, list[Any]]]:
    """Host -> what may be removed there without harm: stale locks of extension builds, and
    processes of dead runs."""
    leftovers = {}
    for name, facts in report.facts.items():
        pids = [rank["pid"] for rank in facts["runs"] if rank["is_dead"]]
        if facts["stale_locks"] or pids:
            leftovers[name] = {"locks": facts["stale_locks"], "pids": pids}
    return leftovers


def agreed(leftovers: Mapping[str, Mapping[str, list[Any]]], out: TextIO) -> bool:
    """List what would be removed, and ask."""
    for name, removed in leftovers.items():
        for lock in removed["locks"]:
            print(f"  {name}: rm {lock}", file=out)
        if removed["pids"]:
            print(f"  {name}: kill -9 {' '.join(map(str, removed['pids']))}", file=out)
    print("Do that? [y/N] ", end="", file=out, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def pasteable(text: str, spec: LaunchSpec) -> str:
    """A command that needs no ``ssh_config``: the run directory of the doctor is removed."""
    for host in spec.plan.hosts:
        words = ["-p", str(host.ssh_port)]
        words += ["-i", host.identity_file] if host.identity_file else []
        words.append(f"{host.user}@{host.address}" if host.user else host.address)
        with_config = shlex.join(["-F", str(spec.run_dir.ssh_config), host.name])
        text = text.replace(with_config, shlex.join(words))
    return text


def examine(
    spec: LaunchSpec, *, bandwidth: bool, remove: Mapping[str, Mapping[str, list[Any]]]
) -> Report:
    """Run every check of a launch on its hosts. ``remove``: host -> leftovers to remove first."""
    from llmx.launch.agents.preflight import handshake, start_agents
    from llmx.launch.files import check_launch, check_programs
    from llmx.launch.transports import transport_of

    report = Report([host.name for host in spec.plan.hosts])
    transport = transport_of(spec.plan.transport)
    with report.collect():
        check_launch(spec.exp, spec.plan)
    with report.collect():
        check_programs(spec.exp.launch, spec.plan)
    report.errors += transport.host_problems(spec)
    inbox: queue.Queue[tuple[Connection, dict[str, Any]]] = queue.Queue()
    connections = start_agents(spec, inbox)
    try:
        with report.collect():
            spec = handshake(spec, connections)
        # The clocks of hosts are measured by the pings of the handshake, meanwhile.
        with report.collect():
            runs_python = [
                agent
                for agent in connections
                if agent.host_info and "error" not in (agent.host_info["python"] or {})
            ]
            _examine_hosts(report, spec, runs_python, remove)
        answering = [agent for agent in connections if agent.host_info and agent.hosts]
        with report.collect():
            _examine_network(report, spec, answering, bandwidth=bandwidth)
    finally:
        for connection in connections:
            connection.close(timeout_s=5)
    unseen = [name for name in report.hosts if name not in report.facts]
    if not transport.has_agents and unseen:
        report.warnings.append(
            f"{', '.join(unseen)}: not looked at: launch.transport={spec.plan.transport} has no "
            "agents there. Use launch.transport=ssh for this command where ssh works."
        )
    return report


def _examine_hosts(
    report: Report,
    spec: LaunchSpec,
    connections: list[Connection],
    remove: Mapping[str, Mapping[str, list[Any]]],
) -> None:
    from llmx.hardware.compare import compare_hosts, runs_on
    from llmx.launch.agents.connection import AgentError, request_all
    from llmx.launch.agents.preflight import check_disks, clock_offsets, survey_hosts
    from llmx.launch.environment import gpus_of_hosts

    locks = {name: leftovers["locks"] for name, leftovers in remove.items()}
    report.facts, problems = survey_hosts(spec, connections, remove=locks)
    report.errors += problems.values()
    for name, facts in report.facts.items():
        report.warnings += [f"{name}: {text}" for text in facts["removed"]]
    for connection, reply in request_all(
        [connection for connection in connections if connection.name in report.facts],
        "busy",
        timeout_s=30,
        message=lambda each: {"kill": remove.get(each.name, {}).get("pids", [])},
    ):
        name = connection.name
        answer = {"ranks": [], "ended": []} if isinstance(reply, AgentError) else reply
        report.facts[name]["runs"] = answer["ranks"]
        report.warnings += [f"{name}: ended process {pid}" for pid in answer["ended"]]
    report.clock_offsets_s = clock_offsets(connections)
    findings = compare_hosts(
        spec.exp,
        spec.plan,
        report.facts,
        offsets_s=report.clock_offsets_s,
        gpus=gpus_of_hosts(spec),
    )
    report.errors += findings.errors
    (report.warnings if spec.exp.launch.allow_busy else report.errors).extend(findings.busy)
    report.warnings += findings.warnings
    for name, facts in report.facts.items():
        report.warnings += runs_on(name, facts["runs"])
    with report.collect():
        report.warnings += check_disks(spec, report.facts, is_restart=False)


def _examine_network(
    report: Report, spec: LaunchSpec, connections: list[Connection], *, bandwidth: bool
) -> None:
    from llmx.launch.agents.mesh import find_nodes, measure_all_reduce, mesh_problems, probe_mesh
    from llmx.launch.agents.preflight import reserve_port

    hosts = spec.plan.hosts
    has_first = any(0 in agent.hosts for agent in connections)
    port = reserve_port(spec, connections) if has_first else 0
    spec = dataclasses.replace(spec, port=port)
    if len(connections) > 1:
        report.nodes = find_nodes(hosts, connections)
        report.mesh = probe_mesh(report.nodes, connections, port=port, rendezvous=spec.rendezvous)
        report.errors += mesh_problems(report.mesh)
    answer = {index for agent in connections for index in agent.hosts}
    is_whole = len(answer) == len(hosts) and spec.plan.world_size > 1
    if bandwidth and port and is_whole and not report.errors:
        report.all_reduce = measure_all_reduce(spec, report.nodes, connections)


def network_time(composed: Composed, gbit_per_s: float) -> str:
    """What the plan predicts with a network of this bandwidth."""
    from llmx.compose.complete import plan_experiment
    from llmx.lifecycle.knowledge import gather

    exp = composed.experiment
    hardware = dataclasses.replace(exp.hardware, network_gbit_per_s=float(f"{gbit_per_s:.3g}"))
    measured = dataclasses.replace(exp, hardware=hardware)
    planned = plan_experiment(measured, is_checked=True, knowledge=gather(composed, variants=False))
    time_plan = planned.plan.time
    key = f"hardware.network_gbit_per_s={gbit_per_s:.3g}"
    if time_plan is None or not time_plan.step_s:
        return f"With {key} the plan predicts by it."
    return (
        f"By the plan with {key} a step of this config takes {time_plan.step_s:.3g} s, of which "
        f"{time_plan.exposed_s:.3g} s wait for communication."
    )


def to_json(report: Report) -> dict[str, Any]:
    """The report for scripts."""
    pairs = report.mesh.seconds if report.mesh else {}
    return {
        "ok": not report.errors,
        "seconds": round(report.seconds, 2),
        "hosts": {
            name: {
                "survey": report.facts.get(name),
                "clock_offset_s": report.clock_offsets_s.get(name),
                "interface": report.nodes[name].interface if name in report.nodes else None,
                "address": report.nodes[name].address if name in report.nodes else None,
                "mtu": report.nodes[name].mtu if name in report.nodes else None,
            }
            for name in report.hosts
        },
        "answers_ms": [
            {"from": source, "to": target, "ms": round(1e3 * seconds, 3)}
            for (source, target), seconds in pairs.items()
            if target in report.nodes
        ],
        "all_reduce": None if report.all_reduce is None else dataclasses.asdict(report.all_reduce),
        "meaning": report.meaning,
        "errors": report.errors,
        "warnings": report.warnings,
    }


def lines_of(report: Report) -> Iterator[str]:
    """The report for people: a row for each fact, its values by host; then what is wrong."""
    from llmx.text import columns, plural

    rows = [(label, by_value(values)) for label, values in _facts(report).items() if values]
    yield from columns(rows, indent="  ")
    if report.meaning:
        yield f"  {report.meaning}"
    for sign, texts in (("✗", report.errors), ("!", report.warnings)):
        for text in texts:
            yield f"{sign} {text}"
    count = f"{plural(len(report.errors), 'error')}, {plural(len(report.warnings), 'warning')}"
    sign = "✗" if report.errors else "✓"
    yield f"{sign} {plural(len(report.hosts), 'host')} in {report.seconds:.1f} s: {count}"


def by_value(values: Mapping[str, str]) -> str:
    """``2.13.0``, or where hosts differ ``2.13.0 on a, b; 2.9.1 on c``."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())


def _facts(report: Report) -> dict[str, dict[str, str]]:
    """Label -> host -> value."""
    from llmx import text as human

    def rows(show: Any) -> dict[str, str]:
        return {name: str(show(facts)) for name, facts in report.facts.items()}

    def gpus(facts: Mapping[str, Any]) -> str:
        names = facts["gpu_names"] or ["GPU"] * (facts["gpus"] or 0)
        return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) or "none"

    def memory(facts: Mapping[str, Any]) -> str:
        """The least and the most that is in use."""
        used = [state["used_mib"] for state in facts["gpu_states"] if state["used_mib"] is not None]
        return f"{min(used):,.0f} to {max(used):,.0f} MiB" if used else "unknown"

    def lanes(facts: Mapping[str, Any]) -> str:
        slots = [(s["pcie_gen"], s["lanes"]) for s in facts["gpu_states"] if s["lanes"]]
        pcie = [f"{gen or 0:.0f}.0 x{count:.0f}" for gen, count in dict.fromkeys(slots)]
        return ", ".join(pcie) or "unknown"

    def port(port: Mapping[str, Any]) -> str:
        return f"{port['port']} {port['state']} ({port['rate']})"

    def least(label: str) -> str:
        """A size that differs from host to host by nature: the smallest."""
        sizes = {n: facts[label] for n, facts in report.facts.items() if facts[label] is not None}
        if not sizes:
            return "unknown"
        name = min(sizes, key=lambda n: sizes[n])
        return f"at least {human.size(sizes[name])} ({name})"

    names = ", ".join(report.facts) if len(report.facts) <= 4 else f"{len(report.facts)} hosts"
    verb = "answers" if len(report.facts) == 1 else "answer"
    facts = {
        "ssh": dict.fromkeys(report.facts, f"{names} {verb}"),
        "Python": rows(lambda f: f["python"]),
        "torch": rows(lambda f: f["packages"]["torch"]),
        "DeepSpeed": rows(lambda f: f["packages"]["deepspeed"]),
        "llmx": rows(lambda f: f["code"] or "installed"),
        "GPUs": rows(gpus),
        **(
            {"GPU memory in use": rows(memory), "PCIe": rows(lanes)}
            if any(facts["gpu_states"] for facts in report.facts.values())
            else {}
        ),
        "driver": rows(lambda f: f["driver"] or "none"),
        "NCCL": rows(lambda f: (f["torch_build"] or {}).get("nccl") or ", ".join(f["nccl"]) or "-"),
        "open files": rows(lambda f: f["open_files"]),
        "locked memory": rows(
            lambda f: "unlimited" if f["locked_bytes"] < 0 else human.size(f["locked_bytes"])
        ),
        "InfiniBand": rows(lambda f: ", ".join(map(port, f["infiniband"])) or "none"),
    }
    if report.facts:
        for label, key in (
            ("free RAM", "ram_available_bytes"),
            ("free disk", "free_bytes"),
            ("/dev/shm", "shm_bytes"),
        ):
            facts[label] = dict.fromkeys(report.facts, least(key))
        if any(host["container"] for host in report.facts.values()):
            facts["container"] = rows(lambda f: f["container"] or "none")
        offsets = report.clock_offsets_s.values()
        facts["clocks"] = {"": f"{max(map(abs, offsets), default=0.0):.2f} s apart at most"}
    facts["network"] = {
        name: f"{node.interface} (MTU {node.mtu})" for name, node in report.nodes.items()
    }
    if report.mesh is not None:
        trips = [
            1e3 * seconds
            for (_, target), seconds in report.mesh.seconds.items()
            if target in report.nodes
        ]
        all_pairs = len(trips) + len(report.mesh.faults)
        text = f"{len(trips)} of {all_pairs} work"
        if trips:
            text += f", an answer takes {statistics.median(trips):.1f} ms with all at once"
        facts["connections"] = {"": text}
    if reduced := report.all_reduce:
        facts["all-reduce"] = {
            "": f"{reduced.world} ranks met in {reduced.connect_s:.1f} s; 64 MB in "
            f"{reduced.seconds:.3g} s ({reduced.gbit_per_s:.3g} Gbit/s), 8 bytes in "
            f"{1e3 * reduced.latency_s:.2g} ms"
        }
    return facts
