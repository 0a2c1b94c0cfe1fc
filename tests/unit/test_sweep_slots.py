"""Which slots of the cluster the trials of a sweep get."""

from __future__ import annotations

import dataclasses

import pytest

from llmx.config import Experiment, HardwareConfig, HostConfig
from llmx.errors import ConfigError
from llmx.launch.environment import rank_env
from llmx.launch.files import make_spec
from llmx.plan import make_plan
from llmx.run.rundir import RunDir
from llmx.sweep.slots import Placed, Slots, first_of, placed_on
from tests.composing import composed

TWO_TYPES = ["model=llama2_7b", "data=demo", "hardware=a100x2_v100x2"]


def hosts(*slots: int, device: str = "a100_40g", first: str = "a") -> list[HostConfig]:
    return [
        HostConfig(name=chr(ord(first) + at), slots=count, device=device, memory_gib=64.0)
        for at, count in enumerate(slots)
    ]


def hardware(*slots: int) -> HardwareConfig:
    return HardwareConfig(hosts=hosts(*slots))


def taken(pool: HardwareConfig, count: int) -> list[str]:
    """Where trials go until there is no room."""
    slots, first, found = Slots(), first_of(pool, count), []
    while (placed := slots.take(pool.hosts, count, first)) is not None:
        found.append(str(placed))
    return found


def test_trials_share_no_slot() -> None:
    assert taken(hardware(2, 2), 1) == ["a:0", "a:1", "b:0", "b:1"]
    assert taken(hardware(4, 2), 2) == ["b:0,1", "a:0,1", "a:2,3"], "the fullest first"
    assert taken(hardware(2, 3), 2) == ["a:0,1", "b:0,1"], "on one host, where one has so many"
    assert taken(hardware(2, 2, 2), 4) == ["a:0,1 b:0,1"], "several, where none has so many"
    assert taken(hardware(2, 2, 2, 2), 3) == ["a:0,1 b:0", "c:0,1 d:0"], "all of one shape"


def test_slots_are_given_back() -> None:
    pool, slots = hardware(2), Slots()
    first = first_of(pool, 1)
    one, two = (slots.take(pool.hosts, 1, first) for _ in range(2))
    assert one is not None
    assert two is not None
    assert slots.take(pool.hosts, 1, first) is None
    slots.give_back(one)
    assert str(slots.take(pool.hosts, 1, first)) == "a:0"


def test_a_trial_has_one_type_of_device() -> None:
    pool = HardwareConfig(hosts=[*hosts(2), *hosts(2, device="v100_32g", first="b")])
    assert taken(pool, 1) == ["a:0", "a:1", "b:0", "b:1"]
    assert taken(pool, 2) == ["a:0,1", "b:0,1"]
    with pytest.raises(ConfigError, match=r"2 slots of a100_40g, 2 slots of v100_32g.* at most 2"):
        first_of(pool, 3)


def test_the_part_is_written_into_the_hardware_of_the_trial() -> None:
    exp = composed(TWO_TYPES).experiment
    node_b = exp.hardware.hosts[1]
    found = placed_on(exp, Placed(((node_b, (1,)),)))
    (host,) = found.hardware.hosts
    assert (host.name, host.slots, host.gpus) == ("node-b", 1, ["1"])
    assert host.memory_gib == 128, "its share of the RAM"
    assert found.hardware.env["LLMX_RANKS_PER_HOST"] == "2"
    mine = dataclasses.replace(node_b, gpus=["4", "6"])
    (host,) = placed_on(exp, Placed(((mine, (1,)),))).hardware.hosts
    assert host.gpus == ["6"], "of those that the user chose"
    cpu = composed(["hardware=cpu2"]).experiment
    found = placed_on(cpu, Placed(((cpu.hardware.hosts[0], (1,)),)))
    assert found.hardware.hosts[0].gpus == [], "a CPU rank has no device"
    assert found.hardware.env["LLMX_RANKS_PER_HOST"] == "2"


def gpus(*indices: list[int], transport: str = "auto") -> Experiment:
    """On hosts of which only some GPUs are used."""
    exp = composed([*TWO_TYPES, "batch.accumulation=1", f"launch.transport={transport}"]).experiment
    chosen = [
        dataclasses.replace(host, slots=len(part), gpus=list(map(str, part)))
        for host, part in zip(exp.hardware.hosts, indices, strict=False)
    ]
    return dataclasses.replace(exp, hardware=dataclasses.replace(exp.hardware, hosts=chosen))


def test_only_the_chosen_gpus_are_used(tmp_path: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank makes those of its host visible."""
    exp = gpus([1], [0, 3])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = make_spec(exp, make_plan(exp), RunDir(tmp_path), port=1)
    assert rank_env(spec)["LLMX_GPUS"] == "1:0,3"
    exp = gpus([1])
    plan = make_plan(exp, local_names=frozenset({"10.0.0.1"}))
    assert plan.transport == "local"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    spec = make_spec(exp, plan, RunDir(tmp_path), port=1)
    assert rank_env(spec)["LLMX_GPUS"] == "7", "of those that are left"


def test_mistakes_in_the_choice_of_devices() -> None:
    words = ["hardware.kind=static", "model=tiny"]
    for host, said in [
        ("{name: localhost, slots: 2, device: a100_40g, gpus: [1]}", "slots=2"),
        ("{name: localhost, slots: 2, device: a100_40g, gpus: [1, 1]}", "twice"),
        ("{name: localhost, slots: 1, device: cpu, gpus: [0]}", "is for hosts with GPUs"),
    ]:
        with pytest.raises(ConfigError, match=said):
            composed([*words, f"hardware.hosts=[{host}]"])
    host = "{name: node-a, slots: 1, device: a100_40g, gpus: [1]}"
    with pytest.raises(ConfigError, match="slurm chooses the GPUs"):
        composed([*words, f"hardware.hosts=[{host}]", "launch.transport=slurm"])
