"""Hardware files: what is understood, and what is refused with the value, the rule and the fix."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmx.compose.complete import Composed, complete, plan_experiment
from llmx.compose.user_files import check_user_files
from llmx.config import HardwareConfig, HostConfig, RolloutConfig, experiment_from_dict
from llmx.config.rollout_rules import with_rollout_hosts
from llmx.errors import ConfigError
from llmx.hardware.resolve import HostSlots, parse_hostfile, render_hostfile
from llmx.launch.files import check_launch, make_spec, rendered_files
from llmx.plan import Plan
from llmx.run.rundir import RunDir
from tests.composing import composed, values

composition = functools.cache(lambda *words: values(["hardware=a100x2_v100x2", *words]))
"""The values of a config on two hosts."""
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
A100 = {"device": "a100_80g", "slots": 2}


def hardware(*hosts: dict[str, Any], overrides: list[str] | None = None, **more: Any) -> Composed:
    """Composed on these hosts."""
    given = copy.deepcopy(composition(*(overrides or [])))
    given["hardware"] |= {"hosts": [{**A100, **host} for host in hosts]} | more
    return plan_experiment(*complete(experiment_from_dict(given)))


TWO = ({"name": "a", "address": "10.0.0.1"}, {"name": "b", "address": "10.0.0.2"})


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ({"address": "10.0.0.3:2222"}, r"write 10.0.0.3 and ssh_port: 2222"),
        ({"address": "[fd00::3]:2222"}, r"write fd00::3 and ssh_port: 2222"),
        ({"address": "ada@10.0.0.3"}, r"write 10.0.0.3 and user: ada"),
        ({"address": "10.0.0.3 10.0.0.4"}, "an address is one word"),
        ({"address": "10.0.0.3\n    ProxyCommand x"}, r"hosts\[2\].address=.*must be text on one"),
        ({"address": "ssh://10.0.0.3"}, "no URL"),
        ({"address": "10.0.0.0/24"}, "no network"),
        ({"address": "10.0.0.300"}, "no IPv4 address"),
        ({"address": "fd00::x"}, "no IPv6 address"),
        ({"address": "fe80::1%eth0"}, "a zone"),
        ({"address": "0.0.0.0"}, "not the address of one host"),
        ({"address": "127.0.0.1"}, "other hosts cannot reach this one as 127.0.0.1"),
        ({"address": "-oProxyCommand=x"}, "a DNS name has letters"),
        ({"address": ""}, "the address is empty"),
        ({"name": "c:22"}, "ssh_port=22"),
        ({"name": "ada@c"}, "its user=ada"),
        ({"name": "c d"}, "letters, digits, dots"),
        ({"name": "node[1-3]"}, "one host a line"),
        ({"name": "", "address": None}, "no name and no address"),
        ({"name": "b"}, r"hosts\[1\] \(b\) has this name, too"),
        ({"name": "B"}, r"hosts\[1\] \(b\) has this name, too"),
        ({"address": "10.0.0.2"}, r"address=10.0.0.2 with ssh_port=22 is hardware.hosts\[1\]"),
        ({"name": "localhost", "address": None}, "other hosts cannot reach this one as localhost"),
        ({"user": "ada\nProxyCommand x"}, r"hosts\[2\].user=.*must"),
        ({"user": "-l"}, "must be the name of a user"),
        ({"identity_file": 'a"b'}, "a path without quotes"),
        ({"fingerprint": "MD5:00:11"}, "must be a fingerprint of ssh-keygen -l: SHA256:"),
        ({"interface": "eth0 ib0"}, "must be one network interface"),
        ({"device": "a100_80gb"}, 'Did you mean "a100_80g"'),
        ({"device": ""}, "no device type"),
        ({"gpus": [1]}, "names 1, but slots=2"),
        ({"gpus": [1, 1]}, "a GPU is there twice"),
    ],
)
def test_a_host_that_cannot_be(host: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        hardware(*TWO, {"name": "c", "address": "10.0.0.3", **host})
    assert "\n    ProxyCommand" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("master_addr", "10.0.0.1:29500", "write 10.0.0.1 and launch.master_port: 29500"),
        ("master_addr", "127.0.0.1", "other hosts cannot reach rank 0 there"),
        ("hosts", {"a": {"slots": 2}}, "hardware.hosts=.*must be a list"),
        ("hosts", ["a"], r"hardware.hosts\[0\]=a: must be a mapping"),
        ("env", {"A": "1\nB=2"}, "hardware.env.A=.*must be text on one line"),
        ("devices", ["a"], "hardware.devices=.*must be a mapping"),
    ],
)
def test_a_value_that_cannot_be(key: str, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hardware(*TWO, **{key: given})


def places(done: Composed) -> list[tuple[str, str | None]]:
    return [(host.name, host.address) for host in done.experiment.hardware.hosts]


def test_a_host_has_a_name_or_an_address() -> None:
    """Hosts that differ in their ssh port alone are two: containers in their host's network."""
    ports = (
        {"name": name, "address": "10.0.0.1", "ssh_port": port}
        for name, port in (("c", 1), ("d", 2))
    )
    done = hardware({"address": "gpu-1.lab"}, {"name": "b"}, *ports)
    expected = [("gpu-1.lab", "gpu-1.lab"), ("b", None), ("c", "10.0.0.1"), ("d", "10.0.0.1")]
    assert places(done) == expected
    bad = ({"name": "a:1"}, {"name": "b", "address": "x@y"}, {"name": "c", "device": "no"})
    with pytest.raises(ConfigError) as caught:
        hardware(*bad)
    keys = [line.split(" ")[0] for line in str(caught.value).splitlines()]
    assert keys == [f"hardware.hosts[{index}]" for index in range(3)], "all problems at once"
    (host,) = hardware({"address": "10.0.0.9"}).plan.hosts
    assert (host.name, host.is_local) == ("10.0.0.9", False), "not localhost"


@pytest.mark.parametrize(
    ("key", "address"), [("address", "fd00::1"), ("name", "[fd00::1]"), ("name", "FD00:0:0::1")]
)
def test_ipv6(address: str, key: str) -> None:
    """Understood bare and in brackets, as an address and as a name; bare where it is rendered."""
    names = {"name": "a", "address": address} if key == "address" else {"name": address}
    done = hardware(names, {"name": "b", "address": "[fd00::2]"}, master_addr=None)
    name = "a" if key == "address" else "ipv6-fd00--1"
    hosts = [(host.name, host.address) for host in done.plan.hosts]
    assert hosts == [(name, "fd00::1"), ("b", "fd00::2")]
    assert done.plan.master_addr == "fd00::1"
    spec = make_spec(done.experiment, done.plan, RunDir("/runs/test"), port=29500, token="t")
    files = rendered_files(spec)
    assert files["hostfile"] == f"{name} slots=2\nb slots=2\n"
    assert f"Host {name}\n    HostName fd00::1\n" in files["ssh_config"]
    assert "MASTER_ADDR=fd00::1\n" in files["ds_env"]
    assert "--master_addr=fd00::1 " in files["command.txt"]


@given(st.dictionaries(NAMES, st.integers(1, 64), min_size=1))
def test_hostfile_round_trip(slots: dict[str, int]) -> None:
    hosts = tuple(HostSlots(name, count) for name, count in slots.items())
    text = render_hostfile(hosts)
    assert parse_hostfile(text) == hosts
    commented = text.replace(" slots", " \t slots").replace("\n", " max_slots=2 # rack\n\n# x\n")
    assert parse_hostfile(commented) == hosts
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(f"a\n{text}c slots = 3\n", source="/job/hostfile")
    lines = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert lines == ["/job/hostfile:1", f"/job/hostfile:{len(hosts) + 2}"], "all of them at once"


def of_hostfile(path: Path | str) -> Composed:
    return composed(["hardware=hostfile", f"hardware.path={path}", "hardware.device=a100_80g"])


def test_ipv6_in_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("\ufefffd00::1 slots=2\n[fd00::2] slots=2\n", encoding="utf-8")
    expected = [("ipv6-fd00--1", "fd00::1"), ("ipv6-fd00--2", "fd00::2")]
    assert places(of_hostfile(path)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(range(256)), "cannot be read .*is not UTF-8"),
        (b"a slots=2\n\0\0\n", ":2: "),
        ("a slots=2\n".encode("utf-16"), "cannot be read .*a text in UTF-8"),
        (b"x" * 2_000_000, "over 1 MiB"),
        (b"a slots=" + b"9" * 5000, "at most 1024 slots"),
        ("a slots=٢".encode(), 'expected "slots=N"'),
        (b"a slots=2\nfd00::1:22:33::1 slots=2", "a name has no colon"),
        (b"[fd00::1] slots=2\nfd00:0::1 slots=2", "is already in line 1"),
        (b"fe80::1%eth0 slots=2", "a zone"),
        (b"u@h\x07 slots=1", r"write \"h.x07\" and"),
        (b"? slots=2\n" * 5000, "and 4980 more invalid lines"),
        (b"", "has no hosts"),
    ],
)
def test_a_file_that_is_no_hostfile(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        of_hostfile(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 8000


@pytest.mark.parametrize("path", ["/", "/nowhere", "/dev/zero"])
def test_a_hostfile_that_cannot_be_read(path: str) -> None:
    with pytest.raises(ConfigError, match=f"hardware.path={path}: no such file"):
        of_hostfile(path)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ({"memory_gib": 16}, "precisions is empty, so nothing says what it can compute"),
        ({"compute_capability": 8.0, "peak_tflops": {"fp61": 1}}, "tflops.fp61: runs compute"),
        ({"memory_gib": -16, "precisions": ["fp16"]}, r"memory_gib=-16.*must be .*from 0"),
        ({"precisions": ["int8"]}, r"precisions\[0\]=int8: must be one of fp32, bf16, fp16"),
        ({"precisions": ["fp16", "fp16"]}, "has fp16 twice"),
        ({"precisions": ["bf16"], "compute_capability": 7.0}, "compute_capability=7 emulates it"),
        ({"precisions": ["fp32"], "accelerator": "cpu", "compute_capability": 8}, "Leave it out"),
    ],
)
def test_a_device_that_cannot_be(device: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hardware(*({**host, "device": "mine"} for host in TWO), devices={"mine": device})


@pytest.mark.parametrize(("capability", "precision"), [(7.0, "fp16"), (8.0, "bf16")])
def test_precisions_follow_from_the_compute_capability(capability: float, precision: str) -> None:
    devices = {"mine": {"memory_gib": 32, "compute_capability": capability}}
    done = hardware(*({**host, "device": "mine"} for host in TWO), devices=devices)
    assert done.plan.precision == precision
    assert precision in done.experiment.hardware.devices["mine"].precisions


def test_fp32_on_a_gpu_is_not_because_of_a_cpu() -> None:
    devices = {"old": {"memory_gib": 12, "precisions": ["fp32"]}}
    done = hardware(*({**host, "device": "old"} for host in TWO), devices=devices)
    assert done.plan.precision_reason == "old (a, b) computes neither bf16 nor fp16"


def test_a_device_that_can_only_be_planned_for() -> None:
    plan = hardware({"name": "localhost", "device": "ascend_910b"}, overrides=["dry_run=true"])
    assert any("no rank runs on it" in note for note in plan.plan.notes)
    check_launch(plan.experiment, plan.plan)
    launched = dataclasses.replace(plan.experiment, dry_run=False)
    with pytest.raises(ConfigError, match="accelerator=npu .* Train on NVIDIA GPUs, on AMD"):
        check_launch(launched, plan.plan)


HPZ = "zero.hpz_partition_size=2"


@pytest.mark.parametrize(
    ("second", "words", "message"),
    [
        ({"device": "v100_32g"}, "model.attention=flash_attention_2", "bf16 .*v100_32g does not"),
        ({}, f"zero=stage3_offload {HPZ}", "gradients of zero"),
        ({}, f"zero=stage3 zero.offload_optimizer=cpu {HPZ}", "=cpu: Deep"),
        ({}, f"zero=infinity zero.nvme_path=/nvme {HPZ}", "do not offload"),
        (
            {"slots": 1}, "zero=stage3 zero.quantized_gradients=true",
            r"they have: a 2, b 1\). Use hardware.slots=1",
        ),
        ({"gpus": [0, 1]}, "launch.transport=slurm", "slurm chooses the GPUs"),
    ],
)  # fmt: skip
def test_what_these_two_hosts_cannot_do(second: Any, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hardware(TWO[0], {**TWO[1], **second}, overrides=words.split())
    if second:
        assert hardware(*TWO, overrides=words.split()).plan.world_size == 4


def test_cpus_are_not_chosen() -> None:
    with pytest.raises(ConfigError, match="gpus is for hosts with GPUs, and cpu is none"):
        hardware(*({**host, "device": "cpu", "gpus": [0, 1]} for host in TWO))


def test_a_plan_that_was_tampered_with_is_not_rendered() -> None:
    """Rendering refuses by itself what would be read as more than a value."""
    done = hardware(*TWO)
    for key, value in {
        "name": "a\nHost *",
        "address": "10.0.0.1\n    ProxyCommand touch /tmp/x",
        "user": "ada\n    ProxyCommand x",
        "identity_file": 'k"\n    ProxyCommand x',
        "fingerprint": f"SHA256:{'x' * 43}\n    ProxyCommand x",
    }.items():
        bad = dataclasses.replace(done.plan.hosts[0], **{key: value})
        plan = dataclasses.replace(done.plan, hosts=(bad, done.plan.hosts[1]))
        spec = make_spec(done.experiment, plan, RunDir("/runs/test"), port=29500, token="t")
        with pytest.raises(ConfigError):
            rendered_files(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts:\n  a: {slots: 2}\n", "line 4: hardware.hosts must be a list"),
        ("devices:\n  mine: 8.0\n", "line 4: hardware.devices.mine must be a mapping"),
    ],
)
def test_a_file_with_a_value_of_another_shape(text: str, message: str, tmp_path) -> None:
    """With file and line, before Hydra merges it, which says "Cannot merge DictConfig"."""
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware/mine.yaml").write_text(f"# mine\nname: mine\n{text}")
    with pytest.raises(ConfigError, match=message):
        check_user_files([("hardware", "mine")], [tmp_path])
    (tmp_path / "hardware/mine.yaml").write_text("hosts: null\nenv: ${launch.env}\nslots: 2\n")
    check_user_files([("hardware", "mine")], [tmp_path])


ROLLOUT_HOSTS = (
    "hardware=static",
    "hardware.hosts=[{name: node-a, slots: 2, device: here}, {name: node-b, device: here}]",
    "+hardware.devices.here={accelerator: cpu, precisions: [fp32]}",
)
GRPO = ("task=grpo", *ROLLOUT_HOSTS)


def test_rollout_hosts_do_not_train() -> None:
    result = composed([*GRPO, "rollout.hosts=[node-b]"])
    plan = result.plan
    assert [host.name for host in plan.hosts] == ["node-a"]
    assert plan.world_size == 2
    assert [host.name for host in plan.rollout_hosts] == ["node-b"]
    assert Plan.from_dict(plan.to_dict()) == plan
    assert [host.name for host in result.experiment.rollout.servers] == ["node-b"]
    assert composed(list(GRPO)).plan.rollout_hosts == ()
    words = "rollout.port=65000 rollout.wait_s=600 launch.hang_timeout_s=0"
    composed([*GRPO, "rollout.hosts=[node-b]", *words.split()])


def test_a_host_that_is_no_longer_named_trains_again() -> None:
    hardware = HardwareConfig(hosts=[HostConfig(name="a"), HostConfig(name="b")])
    hardware, rollout = with_rollout_hosts(hardware, RolloutConfig(hosts=["b"]))
    assert [host.name for host in hardware.hosts] == ["a"]
    assert with_rollout_hosts(hardware, rollout) == (hardware, rollout)
    rollout.hosts = []
    hardware, rollout = with_rollout_hosts(hardware, rollout)
    assert [host.name for host in hardware.hosts] == ["a", "b"]
    assert rollout.servers == []


VLLM = "rollout.vllm_python=/opt/v"
STALE = "rollout.max_staleness=1"
UPDATES = "task.options.updates=2"


@pytest.mark.parametrize(
    ("servers", "words", "message"),
    [
        ("node-a,node-b", "", "then no host is left to train. Leave one of them"),
        ("node-c", "", r"node-c is not in hardware\.hosts\..* Hosts: node-a, node-b"),
        ("node-b", "task=sft", "task=sft generates no samples"),
        ("node-b", "launch.transport=pdsh", r"starts the ranks\. Use launch\.transport=ssh"),
        ("node-b", f"{VLLM} adapter=lora", "vLLM gets whole models here"),
        ("node-b", f"{VLLM} {UPDATES}", rf"{UPDATES}, rollout\.vllm_python: .* leave rollout\."),
        ("", STALE, "only rollout servers draw ahead"),
        ("node-b", f"{STALE} {UPDATES}", rf"{UPDATES}, {STALE}: .* Set task\.options\.updates=1"),
        ("node-b", f"{STALE} task.options.loss=gspo", r"Set rollout\.importance=sequence"),
        (
            "node-b", "launch.hang_timeout_s=60",
            r"hang_timeout_s=60: .* wait 60 s for .* Set launch\.hang_timeout_s=120",
        ),
        ("node-b", "rollout.wait_s=600", r"hang_timeout_s=null: .* wait 630 s"),
        ("node-b", "model.trust_remote_code=true", "needs the repository's code"),
    ],
)  # fmt: skip
def test_rollout_hosts_that_cannot_work(servers: str, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed([*GRPO, f"rollout.hosts=[{servers}]", *words.split()])
