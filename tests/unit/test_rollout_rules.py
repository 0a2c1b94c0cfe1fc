"""``rollout.hosts``: which hosts train and which draw samples, and what cannot work."""

from __future__ import annotations

import pytest

from llmx.config import HardwareConfig, HostConfig, RolloutConfig
from llmx.config.rollout_rules import with_rollout_hosts
from llmx.errors import ConfigError
from llmx.plan import Plan
from tests.composing import composed

HOSTS = (
    "hardware=static",
    "hardware.hosts=[{name: node-a, slots: 2, device: here}, {name: node-b, device: here}]",
    "+hardware.devices.here={accelerator: cpu, precisions: [fp32]}",
)
GRPO = ("task=grpo", *HOSTS)


def test_rollout_hosts_do_not_train() -> None:
    result = composed([*GRPO, "rollout.hosts=[node-b]"])
    plan = result.plan
    assert [host.name for host in plan.hosts] == ["node-a"]
    assert plan.world_size == 2
    assert [host.name for host in plan.rollout_hosts] == ["node-b"]
    assert Plan.from_dict(plan.to_dict()) == plan
    assert [host.name for host in result.experiment.rollout.servers] == ["node-b"]
    assert "rollout_hosts" not in composed(list(GRPO)).plan.to_dict()


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
def test_what_cannot_work_is_refused_with_the_fix(servers: str, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed([*GRPO, f"rollout.hosts=[{servers}]", *words.split()])


@pytest.mark.parametrize(
    "words", ["rollout.wait_s=600 launch.hang_timeout_s=0", "rollout.port=65000"]
)
def test_what_works(words: str) -> None:
    composed([*GRPO, "rollout.hosts=[node-b]", *words.split()])
