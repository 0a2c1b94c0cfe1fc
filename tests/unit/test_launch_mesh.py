"""The words for what a probe of the network found, by what passed and what did not.

``pytest tests/unit/test_launch_mesh.py``
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmx.errors import LaunchError
from llmx.launch.agents.mesh import (
    RENDEZVOUS,
    Fault,
    Mesh,
    Node,
    find_nodes,
    mesh_problems,
    nat_hints,
)
from llmx.plan.types import HostPlan
from tests.unit.test_launch_agent import Rig

MTU = 9000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.connection.close(timeout_s=20)


def mesh(*faults: tuple[str, str, str, str], hosts: str = "abc", mtu: int = MTU) -> Mesh:
    """``faults``: (source, target, stage, error); every other connection works."""
    nodes = {h: Node(h, "eth1", f"10.0.0.{n}", mtu) for n, h in enumerate(hosts, start=1)}
    failed = [Fault(s, t, nodes[t].address, 40000, stage, error) for s, t, stage, error in faults]
    pairs = {(s, t) for s in hosts for t in hosts if s != t} - {
        (f.source, f.target) for f in failed
    }
    works = dict.fromkeys(pairs | {(host, RENDEZVOUS) for host in hosts}, 0.001)
    return Mesh(nodes, failed, [], works)


def test_nothing_to_say_of_a_network_that_works() -> None:
    assert mesh_problems(mesh()) == []


def test_a_firewall_names_both_hosts_the_direction_and_the_ports() -> None:
    observation, cause = mesh_problems(mesh(("b", "c", "connect", "ETIMEDOUT")))
    assert observation == (
        "b -> c at 10.0.0.3 (eth1, port 40000): no connection (no answer). The other direction "
        "works."
    )
    assert cause.startswith("A firewall between the hosts drops it")
    assert "from 32768 to 60999: allow all TCP between the hosts" in cause


def test_ports_that_a_firewall_leaves_open() -> None:
    assert "rendezvous is open there" in mesh_problems(mesh(("b", "a", "connect", "ETIMEDOUT")))[0]


def test_a_host_that_nobody_reaches_is_one_line() -> None:
    hosts = "abcdef"
    blocked = [(host, "f", "connect", "ECONNREFUSED") for host in hosts[:5]]
    observation, cause = mesh_problems(mesh(*blocked, hosts=hosts))
    assert observation.startswith("a, b, c and 2 more hosts -> f at 10.0.0.6 ")
    assert cause.startswith("The host does listen there: a firewall rejects it")


def test_a_wrong_mtu_is_told_by_what_is_lost() -> None:
    lost = [("a", "b", "send", "ETIMEDOUT"), ("b", "a", "receive", "ETIMEDOUT")]
    there, back, cause = mesh_problems(mesh(*lost, hosts="ab"))
    assert "one byte passes both ways, but 64 KiB sent there do not arrive" in there
    assert "64 KiB sent back do not arrive" in back
    assert "ip link set dev eth1 mtu 1500" in cause
    assert "on a: ping -c 3 -M do -s 8972 10.0.0.2" in cause
    assert "ip link set dev eth1 mtu 1400" in mesh_problems(mesh(*lost, hosts="ab", mtu=1500))[-1]


def test_a_rendezvous_that_loses_large_packets_is_no_closed_port() -> None:
    lossy = mesh(("a", "b", "send", "ETIMEDOUT"), hosts="ab")
    alone = mesh_problems(lossy)
    lossy.unmet.append(Fault("b", RENDEZVOUS, "10.0.0.1", 29500, "send", "ETIMEDOUT"))
    assert mesh_problems(lossy) == alone
    lossy.faults.clear()  # launch.probe=false
    observation, cause = mesh_problems(lossy)
    assert observation.startswith("b -> a at 10.0.0.1 (eth1, port 29500): a connection opens")
    assert cause.startswith("Large packets are lost")


def test_an_interface_that_is_not_there(rig: Rig) -> None:
    """The agent of this machine lists those that are."""
    hosts = [
        HostPlan("a", "127.0.0.1", 22, None, None, 1, "cpu", "lan7", True),
        HostPlan("b", "127.0.0.1", 22, None, None, 1, "cpu", None, False),
    ]
    rig.handshake()
    with pytest.raises(LaunchError, match=r"a: interface=lan7 is not there.*lo \(127.0.0.1\)"):
        find_nodes(hosts, [rig.connection])
    rig.connection.hosts = (1,)
    node = find_nodes(hosts, [rig.connection])["b"]
    assert (node.interface, node.address, node.ports[0] > 1023) == ("lo", "127.0.0.1", True)


def test_a_host_behind_nat_by_the_address_of_its_ssh() -> None:
    def host(name: str, address: str, *, is_local: bool = False) -> HostPlan:
        return HostPlan(name, address, 22, None, None, 1, "cpu", None, is_local)

    hosts = [
        host("a", "10.0.0.1"),
        host("b", "198.51.100.7"),
        host("c", "fd00::1"),
        host("d", "node-d"),
        host("e", "10.0.0.5", is_local=True),
    ]
    seen = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "fd00:0::1", "d": "10.0.0.4", "e": "10.9.9.9"}
    facts = {name: {"ssh_address": address} for name, address in seen.items()}
    (hint,) = nat_hints(hosts, facts, mesh().nodes)
    assert hint.startswith("b: ssh reached 198.51.100.7, and the host itself has 10.0.0.2: NAT")
    assert "listen at 10.0.0.2, on any port" in hint
