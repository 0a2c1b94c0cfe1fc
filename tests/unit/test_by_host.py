"""What differs from host to host, in the config and on the host.

``pytest tests/unit/test_by_host.py``
"""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.config import HostConfig, experiment_from_dict
from llmx.config.by_host import KEYS, experiment_on, keys_of, path_on
from llmx.config.schema import Experiment
from llmx.config.validate import validate
from llmx.errors import ConfigError
from llmx.launch.files import rendered_files
from llmx.launch.ssh_config import ssh_argv
from llmx.launch.transports import transport_of
from llmx.plan import make_plan
from tests.unit.test_launch_render import experiment, spec_of

OWN: dict[str, Any] = {
    "python": "/opt/b/bin/python",
    "root": "/scratch/ada",
    "env": {"NCCL_IB_HCA": "mlx5_1"},
    "setup": "/etc/profile.d/my setup.sh",
    "enter": ["nsenter", "-t", "7", "-m", "--"],
}


def of_two(transport: str = "ssh", **keys: Any) -> Experiment:
    """A run below /runs, on node-a and on node-b, which has ``keys``."""
    exp = experiment(transport, (1, 1), "cpu")
    exp.hardware.root = "/runs"
    exp.hardware.hosts[1] = dataclasses.replace(exp.hardware.hosts[1], **keys)
    return exp


def test_each_host_gets_a_command_of_its_own() -> None:
    spec = spec_of(of_two(**OWN), code_root="/runs/code")
    near, far = (transport_of("ssh").start_message(spec, host) for host in (0, 1))
    assert near["argv"][0] == "/opt/venv/bin/python3"
    assert far["argv"] == ["/opt/b/bin/python", "-u", "-m", "llmx.worker", "/scratch/ada/demo"]
    assert far["env"]["PATH"].startswith("/opt/b/bin:")
    assert far["env"]["PYTHONPATH"] == "/scratch/ada/code"
    assert far["env"]["NCCL_IB_HCA"] == "mlx5_1"
    assert "NCCL_IB_HCA" not in near["env"]
    assert "NCCL_IB_HCA" in far["fixed"]
    command = rendered_files(spec)["command.txt"]
    assert (
        "node-b 'nsenter -t 7 -m -- bash -s' <<'END' &\ncd /scratch/ada/demo || exit\n" in command
    )
    assert "\n. '/etc/profile.d/my setup.sh'\nexec /opt/b/bin/python -m deepspeed" in command


@pytest.mark.parametrize("transport", ["pdsh", "openmpi", "slurm"])
@pytest.mark.parametrize("key", OWN)
def test_one_command_for_all_hosts_takes_none_of_them(transport: str, key: str) -> None:
    exp = of_two(transport, **{key: OWN[key]})
    with pytest.raises(ConfigError, match=rf"node-b has {key}\. Use launch\.transport=ssh"):
        validate(exp)


def test_this_machine_alone_may_have_them() -> None:
    exp = experiment("auto", (1,), "cpu")
    names = frozenset({"10.0.0.1"})
    assert make_plan(exp, local_names=names).transport == "local"
    exp.hardware.hosts[0].env = {"A": "1"}
    assert make_plan(exp, local_names=names).transport == "ssh"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"python": "python3"}, "python=python3: must be an absolute path of this host"),
        ({"model": "/m"}, "model stands for model.path there, which is not set"),
        ({"enter": ["-i"]}, "enter=-i: must begin with a program"),
        ({"env": {"HF_TOKEN": "x"}}, r"\(node-b\)\.env\.HF_TOKEN: looks like a secret"),
        ({"env": {"RANK": "1"}}, r"\.env\.RANK: is set by llmx"),
    ],
)
def test_mistakes(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(of_two(**keys))


def test_all_keys_are_known() -> None:
    host = HostConfig(**{**OWN, "data": "/d", "model": "/m"})
    assert keys_of(host) == list(KEYS)


def test_paths_of_a_host() -> None:
    exp = of_two(root="/scratch/ada/")
    host = exp.hardware.hosts[1]
    paths = ("/runs/demo", "/runs", "/runs2/x", "/other")
    there = [path_on(exp.hardware, host, path) for path in paths]
    assert there == ["/scratch/ada/demo", "/scratch/ada", "/runs2/x", "/other"]


def test_what_a_rank_reads() -> None:
    values = {
        "run_dir": "/runs/demo",
        "model": {"kind": "hf", "path": "/runs/m", "tokenizer": "/runs/m"},
        "data": {"path": "/runs/d.jsonl", "cache_dir": "/runs/cache"},
        "hardware": {"root": "/runs", "hosts": [{"name": "b", "root": "/x", "data": "/d.jsonl"}]},
    }
    exp = experiment_from_dict(values)
    (host,) = exp.hardware.hosts
    there = experiment_on(exp, host)
    assert (there.run_dir, there.data.path, there.data.cache_dir) == (
        "/x/demo",
        "/d.jsonl",
        "/x/cache",
    )
    assert (there.model.path, there.model.tokenizer) == ("/x/m", "/x/m")
    assert there.hardware == exp.hardware
    there = experiment_on(exp, HostConfig(model="/m"))
    assert (there.model.path, there.model.tokenizer) == ("/m", "/m")
    assert experiment_on(exp, HostConfig()) == exp


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=4), st.dictionaries(st.just("ODD"), WORDS))
def test_no_word_becomes_code(words: list[str], env: dict[str, str]) -> None:
    """Neither for the login shell of ssh, nor in ``command.txt``."""
    remote = ssh_argv(Path("c"), "h", [*words, "sh", "-s"])[-1]
    show = ["sh", "-c", f"printf '%s\\0' {remote}"]
    done = subprocess.run(show, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [*words, "sh", "-s"]
    spec = spec_of(of_two(enter=words, env=env, setup=f"/{words[0]}"))
    (last,) = [
        part for part in rendered_files(spec)["command.txt"].split("END") if "node-b" in part
    ][:1]
    assert shlex.split(last.split("<<")[0])[-1] == shlex.join([*words, "bash", "-s"])
