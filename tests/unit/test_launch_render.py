"""Everything that is rendered before a launch: golden files, properties, and every refusal.

``make golden`` records the golden files.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import ipaddress
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmx.config import HostConfig, experiment_from_dict
from llmx.config.addresses import FINGERPRINT, address_problem
from llmx.config.by_host import KEYS, experiment_on, keys_of, path_on
from llmx.config.plugins import TRANSPORTS
from llmx.config.schema import Experiment
from llmx.config.validate import validate
from llmx.errors import ConfigError, LaunchError
from llmx.launch import files
from llmx.launch.environment import launcher_env, rank_env
from llmx.launch.files import (
    check_launch,
    check_programs,
    make_spec,
    path_problems,
    rank_environment,
    rendered_files,
    runner_env,
)
from llmx.launch.ssh_config import render_ssh_config
from llmx.launch.transports import deepspeed_argv, transport_of
from llmx.launch.transports.slurm import missing_nodes, share_of_cores, slurm_cores
from llmx.plan import make_plan
from llmx.plan.knowledge import Knowledge
from llmx.plan.types import HostPlan
from llmx.run.rundir import RunDir
from tests.launches import ENVIRON, experiment, spec_of

ODD_VALUE = "two words $HOME `id` \"quoted\" 'single' 50%n back\\slash;&|"
SLOTS = {
    "local": (2,), "ssh": (2, 1), "pdsh": (2, 1), "openmpi": (2, 1), "slurm": (2, 2),
    "external": (2, 1),
}  # fmt: skip
TWO = (1, 1)


@pytest.mark.parametrize("transport", sorted(TRANSPORTS.shipped))
def test_rendered_files(transport: str, golden: Callable[[str, str], None]) -> None:
    """They are as recorded, and no secret gets into them."""
    exp = experiment(transport, SLOTS[transport])
    files = rendered_files(spec_of(exp, **({"cpus_per_task": 8} if transport == "slurm" else {})))
    text = "".join(f"===== {name}\n{content}" for name, content in files.items())
    golden(f"launch/{transport}.txt", text)
    spec = spec_of(exp)
    text = "".join(rendered_files(spec).values()) + repr(runner_env(spec))
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "LLMX_PROXY"):
        assert name not in text
        assert ENVIRON[name] not in text or len(ENVIRON[name]) < 4
    assert "PS1" not in runner_env(spec)
    assert launcher_env(spec)["SSH_AUTH_SOCK"] == "/tmp/agent"
    assert "SSH_AUTH_SOCK" not in rank_env(spec)
    if not transport_of(transport).agents_start_ranks:
        assert spec.token not in " ".join(transport_of(transport).argv(spec))


NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)


def _plan_hosts() -> st.SearchStrategy[HostPlan]:
    """Whatever the rules of the hardware let through."""
    words = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_.@+-]{0,20})", fullmatch=True)
    paths = st.text(
        st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="\"'\\"),
        min_size=1,
        max_size=30,
    ).map(lambda text: f"/keys/my {text}")
    addresses = st.one_of(
        st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), NAMES
    ).filter(lambda text: address_problem(text) is None)
    return st.builds(
        HostPlan,
        name=NAMES,
        address=addresses,
        ssh_port=st.integers(1, 65535),
        user=words.filter(lambda text: text.isascii()),
        identity_file=paths.filter(lambda text: "${" not in text),
        slots=st.integers(1, 8),
        device=st.just("a100"),
        interface=st.none(),
        is_local=st.just(False),
        fingerprint=st.none() | st.from_regex(FINGERPRINT, fullmatch=True),
    )


def _address(host: str) -> object:
    """An IP address may be written in several ways; ssh writes it in its own."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    return host.lower()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_plan_hosts())
def test_ssh_reads_what_was_written(host: HostPlan) -> None:
    """The real ssh says what it makes of the file: these values, and no command of its own."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config"
        ours = render_ssh_config([host]).split("Include ")[0]
        config.write_text(ours, encoding="utf-8")
        done = subprocess.run(
            ["ssh", "-G", "-F", config, host.name], capture_output=True, text=True, check=True
        )
    read = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert _address(read["hostname"]) == _address(host.address)
    assert (read["port"], read["user"]) == (str(host.ssh_port), host.user)
    assert read["identityfile"].replace("%%", "%") == host.identity_file
    assert read.get("proxycommand", "none") == "none"
    pinned = ("true", "/dev/null") if host.fingerprint else ("accept-new", None)
    assert read["stricthostkeychecking"] == pinned[0]
    assert pinned[1] in (None, read["userknownhostsfile"])
    assert f" sh %f {host.fingerprint} " in read.get("knownhostscommand", " sh %f None ")


def test_what_people_have_in_their_own_ssh_config(tmp_path: Path) -> None:
    """As ssh itself reads it: what is for a terminal does not hold here, the way there does."""
    own, ours = tmp_path / "own", tmp_path / "ours"
    own.write_text(
        "Host node-*\n  RemoteCommand tmux attach\n  RequestTTY force\n  ControlMaster auto\n"
        "  ControlPath /tmp/master-%r\n  ControlPersist 1h\n  LocalForward 8888 localhost:8888\n"
        "  ProxyJump gate\n  Port 9\n"
    )
    rendered = rendered_files(spec_of(experiment("pdsh", TWO)))["ssh_config"]
    ours.write_text(rendered.replace("~/.ssh/config", str(own)))
    argv = ["ssh", "-G", "-F", ours, "node-a", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    values = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "localforward" not in values
    assert {
        "controlmaster": "false", "requesttty": "false", "clearallforwardings": "yes",
        "proxyjump": "gate", "controlpath": "/tmp/master-ada", "hostname": "10.0.0.1",
        "port": "2201",
    }.items() <= values.items()  # fmt: skip


def test_secrets_in_the_config_are_refused() -> None:
    for name in ("HF_TOKEN", "WANDB_MODE", "DB_PASSWORD", "API_KEY", "GIT_AUTH", "MY_CREDENTIALS"):
        exp = experiment("pdsh", TWO, env={name: "value"})
        with pytest.raises(ConfigError, match=f"launch.env.{name}: looks like a secret"):
            validate(exp)
        with pytest.raises(ConfigError, match=f"launch.env.{name}: looks like a secret"):
            rank_env(spec_of(exp))  # a config.yaml that was edited


def test_rank_0_behind_nat() -> None:
    exp = experiment("ssh", TWO, master_port=9527)
    exp.hardware.reach = "[fd00::7]:30846"
    environments = [rank_env(spec_of(exp, port=9527), host) for host in (0, 1)]
    met = [(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments]
    assert met == [("127.0.0.1", "9527"), ("fd00::7", "30846")]
    exp.launch.master_port = 0
    with pytest.raises(ConfigError, match=r"must lead to a port that is known. Set launch.master"):
        validate(exp)
    exp.launch.transport = "pdsh"
    with pytest.raises(ConfigError, match=r"transport=pdsh gives every rank the same address"):
        validate(exp)


def test_what_openmpi_would_change_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmx.launch.files.code_root", lambda: "/home/Zoë/my clone")
    exp = experiment("openmpi", TWO, env={"ODD": "two words"})
    with pytest.raises(ConfigError, match="ODD='two words'"):
        rendered_files(spec_of(exp))
    exp = experiment("openmpi", TWO)
    with pytest.raises(ConfigError, match=r"PYTHONPATH='/home/Zoë/my clone.*Move that directory"):
        rank_environment(exp, make_plan(exp))
    exp = experiment("pdsh", TWO)
    assert rank_environment(exp, make_plan(exp))["PYTHONPATH"].startswith("/home/Zoë/my clone")


def test_interfaces_that_differ() -> None:
    spec = spec_of(experiment("pdsh", TWO), interfaces=("eth0", "ens5"))
    env = rank_env(spec)
    assert "GLOO_SOCKET_IFNAME" not in env
    assert env["LLMX_INTERFACES"] == "eth0,ens5"
    (arguments,) = [a for a in transport_of("openmpi").argv(spec) if "launcher_args" in a]
    assert "oob_tcp_if_include ens5,eth0" in arguments


def test_the_config_wins_over_the_environment_and_that_over_what_is_found() -> None:
    exp = experiment("pdsh", TWO, env={"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"})
    wanted = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "NCCL_IB_DISABLE": "1"}
    assert wanted.items() <= rank_env(spec_of(exp)).items()
    environ = {**ENVIRON, "NCCL_SOCKET_IFNAME": "ib0"}
    assert rank_env(spec_of(exp, environ=environ))["NCCL_SOCKET_IFNAME"] == "eth1"  # configured
    for host in exp.hardware.hosts:
        host.interface = None
    found = rank_env(spec_of(exp, environ=environ, interfaces=("eth0", "eth0")))
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("ib0", "eth0")


def at(run_dir: str, transport: str = "pdsh", **launch: object) -> Experiment:
    exp = experiment(transport, TWO if transport == "pdsh" else (1,), **launch)
    exp.run_dir = run_dir
    return exp


@pytest.mark.parametrize("letter", [" ", "'", '"', "$", "(", "&", ";", "%", "\\", "*", "{"])
def test_paths_that_another_shell_would_read(letter: str) -> None:
    """DeepSpeed writes them into the remote command without quotes; pdsh expands %h."""
    run_dir = f"/runs/a{letter}b"
    exp = at("/runs/demo", python=f"/opt/py{letter}x/bin/python")
    for refused, key in ((at(run_dir), "run_dir"), (exp, "launch.python")):
        with pytest.raises(ConfigError, match=f"{key}="):
            check_launch(refused, make_plan(refused))
    exp.dry_run = True  # a plan warns, and may be launched from another place
    check_launch(exp, make_plan(exp))
    problems = [problem.partition("=")[0] for problem in path_problems(exp, make_plan(exp))]
    assert problems == ["launch.python"]
    odd = at("/家/0_optim.lr-1e-3,x=2@b+c:d~e#f-[a,b]", python="/usr/bin/python3")
    for travels in (at(run_dir, "local"), odd):
        check_launch(travels, make_plan(travels))


def test_local_refuses_other_machines() -> None:
    exp = experiment("local", (1,))
    plan = make_plan(exp)
    far = dataclasses.replace(plan.hosts[0], name="far", is_local=False)
    with pytest.raises(ConfigError, match='"far" is another machine'):
        check_launch(exp, dataclasses.replace(plan, hosts=(far,)))


def test_the_hosts_of_an_example_are_told_from_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their addresses, and by what answers: somebody may have hosts there."""
    exp, banner = experiment("ssh", TWO), b"HTTP/1.1 400"

    def connect(*_: Any, **__: Any) -> socket.socket:
        near, far = socket.socketpair()
        with far:
            far.sendall(banner)
        return near

    monkeypatch.setattr(files.socket, "create_connection", connect)
    plan = make_plan(exp)
    check_launch(exp, plan)  # of the user's own file
    exp.hardware.name = "a100x2_v100x2"
    with pytest.raises(ConfigError, match=r"10.0.0.1 to 10.0.0.2 are the addresses of an example"):
        check_launch(exp, plan)
    banner = b"SSH-2.0-OpenSSH_9.6"
    check_launch(exp, plan)


def test_a_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    exp = experiment("pdsh", TWO, sync="rsync")
    with pytest.raises(LaunchError, match="apt-get install openssh-client pdsh rsync"):
        check_programs(exp.launch, make_plan(exp))


def test_the_gpus_of_several_hosts() -> None:
    """Here, by the hardware file, and by the environment of the host."""
    exp = experiment("pdsh", (2, 2, 2, 1))
    exp.hardware.hosts[1].gpus = ["GPU-3f3a", "MIG-77aa"]
    exp.hardware.hosts[2].gpus = ["0", "2"]
    plan = make_plan(exp, Knowledge(frozenset({"10.0.0.1"})))
    spec = spec_of(exp, plan=plan, visible_gpus={"node-b": "0,1", "node-c": "4,5,6"})
    assert rank_env(spec)["LLMX_GPUS"] == "2,3:GPU-3f3a,MIG-77aa:4,6:0"


def test_gpus_that_are_too_few() -> None:
    for visible, count in (("0", "1 GPU"), ("-1", "0 GPUs"), ("", "0 GPUs")):
        spec = spec_of(experiment("ssh", (1, 2)), visible_gpus={"node-b": visible})
        with pytest.raises(LaunchError, match=f"node-b: CUDA_VISIBLE_DEVICES=.* leaves {count},"):
            rank_env(spec)


def test_slurm_gives_each_rank_its_cores() -> None:
    """Its default is one core for a rank with eight threads; GPUs that are bound one to a rank
    would make LOCAL_RANK a number that is not there."""
    spec = spec_of(experiment("slurm", (2, 2)), cpus_per_task=24, cores=48)
    (words,) = [part for part in transport_of("slurm").argv(spec) if "launcher_args" in part]
    assert "--cpus-per-task=24 --cpu-bind=cores --gpus-per-node=2 --gpu-bind=none" in words
    assert rank_env(spec)["OMP_NUM_THREADS"] == "8"
    without = transport_of("slurm").argv(spec_of(experiment("slurm", (2, 2), "cpu")))
    assert not any("gpus-per-node" in part for part in without)


def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node of 2 cores says nothing of its hosts."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    for transport, overrides, environ, threads in (
        ("local", {}, {}, "8"),  # of 64 cores and 4 ranks 16 each
        ("local", {"offload_optimizer": "cpu", "stage": 2}, {}, "16"),
        ("local", {}, {"LLMX_RANKS_PER_HOST": "16"}, "4"),
        ("local", {}, {"OMP_NUM_THREADS": "3"}, "3"),
        ("pdsh", {}, {}, None),  # each rank looks at its own host
        ("pdsh", {}, {"OMP_NUM_THREADS": "3"}, "3"),
    ):
        exp = experiment(transport, (4,) if transport == "local" else (4, 2))
        exp = dataclasses.replace(exp, zero=dataclasses.replace(exp.zero, **overrides))
        spec = make_spec(exp, make_plan(exp), RunDir(Path(exp.run_dir)), port=1)
        env = rank_env(dataclasses.replace(spec, environ=environ))
        assert env.get("OMP_NUM_THREADS") == threads
        assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_cores_of_slurm_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "sinfo"
    for environ, said, cores in (
        ({}, None, None),
        ({"SLURM_JOB_CPUS_PER_NODE": "16"}, None, 16),
        ({"SLURM_JOB_CPUS_PER_NODE": "64(x2),32"}, None, 32),
        ({"SLURM_JOB_ID": "3"}, "64\\n48\\n", None),
        ({}, "64\\n48\\n", 48),
        ({}, "", None),
    ):
        if said is not None:
            program.write_text(f"#!/bin/sh\nprintf '{said}'\n")
            program.chmod(0o755)
        assert slurm_cores(environ, ["a", "b"]) == cores


def test_shares_of_cores_fit_on_the_host() -> None:
    for cores in range(1, 300):
        for slots in range(1, 17):
            share = share_of_cores(cores, slots)
            assert share == 1 or (share % 2 == 0 and share * slots <= cores)
    assert share_of_cores(96, 8) == 12
    assert share_of_cores(None, 8) is None


def test_commands_for_each_host_can_be_pasted(tmp_path: Path) -> None:
    """With ``ssh`` and DeepSpeed's launcher replaced by a program that shows what it is given."""
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['ODD']]), flush=True)"
    (tmp_path / "deepspeed/launcher").mkdir(parents=True)
    for name in ("__init__.py", "launcher/__init__.py", "launcher/launch.py"):
        (tmp_path / "deepspeed" / name).write_text(show if "launch.py" in name else "")
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift 3\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    exp = experiment("ssh", (2, 1), "cpu", env={"ODD": ODD_VALUE, "PYTHONPATH": str(tmp_path)})
    exp.run_dir = str(tmp_path)
    spec = spec_of(exp, python=sys.executable, environ={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    argv = ["sh", "-c", rendered_files(spec)["command.txt"]]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=spec.environ)
    shown = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [odd for _, odd in shown] == [ODD_VALUE, ODD_VALUE]
    assert [argv[1] for argv, _ in shown] == ["--node_rank=0", "--node_rank=1"]
    encoded = shown[0][0][0].removeprefix("--world_info=")
    assert json.loads(base64.urlsafe_b64decode(encoded)) == {"node-a": [0, 1], "node-b": [0]}


def test_the_ranks_of_each_host() -> None:
    """As DeepSpeed's launcher would start them; one host may have fewer than the others."""
    exp = experiment("ssh", (1, 2))
    spec = spec_of(exp, environ={**ENVIRON, "CUDA_VISIBLE_DEVICES": "1"})
    message = transport_of("ssh").start_message(spec, 1)
    assert message["argv"][1:] == ["-u", "-m", "llmx.worker", "/runs/demo"]
    assert message["ranks"][2] == {
        "RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_SIZE": "2",
        "CROSS_RANK": "1", "CROSS_SIZE": "2",
    }  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES" not in message["env"], "that of this machine"
    assert "HOME" not in message["env"]


@pytest.mark.parametrize("name", ["env", "an environment", "e" * 130])
def test_the_script_of_deepspeed_is_run_where_a_kernel_can(tmp_path: Path, name: str) -> None:
    """pip writes the path of Python into its first line, which holds no blank and 127 bytes."""
    programs = tmp_path / name / "bin"
    programs.mkdir(parents=True)
    python, script = programs / "python", programs / "deepspeed"
    python.symlink_to(sys.executable)
    script.write_text(f"#!{python}\nprint('started')\n")
    script.chmod(0o755)
    spec = spec_of(experiment("local", (1,)), python=str(python))
    argv = deepspeed_argv(spec, [])
    if argv[0] == str(script):
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        assert done.stdout == "started\n"
    else:
        assert argv[:3] == [str(python), "-m", "deepspeed.launcher.runner"]
    assert (argv[0] == str(script)) == (name == "env")


def test_hosts_that_slurm_has_not_allocated() -> None:
    nodes = ["gpu01", "gpu02"]
    assert missing_nodes(nodes, nodes, job="7") == []
    assert missing_nodes(["gpu09"], [], job="") == []
    assert missing_nodes(["gpu01", "gpu09"], nodes, job="7") == [
        "gpu09: is not in the allocation of job 7 (nodes: gpu01, gpu02). Use the names of these "
        "nodes in the hardware file, or allocate it (salloc --nodelist=gpu09)."
    ]
    (unknown,) = missing_nodes(["gpu09"], nodes, job="")
    assert unknown.startswith("gpu09: is not a node of Slurm (nodes: gpu01, gpu02).")


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
    own = {"PYTHONPATH": "/scratch/ada/code", "NCCL_IB_HCA": "mlx5_1"}
    assert own.items() <= far["env"].items()
    assert "NCCL_IB_HCA" not in near["env"]
    assert "NCCL_IB_HCA" in far["fixed"]
    command = rendered_files(spec)["command.txt"]
    entered = "node-b 'nsenter -t 7 -m -- bash -s' <<'END' &\ncd /scratch/ada/demo || exit\n"
    assert entered in command
    assert "\n. '/etc/profile.d/my setup.sh'\nexec /opt/b/bin/python -m deepspeed" in command


def test_one_command_for_all_hosts_takes_none_of_them() -> None:
    for transport, key in (
        *(("pdsh", key) for key in OWN),
        ("openmpi", "python"),
        ("slurm", "enter"),
    ):
        with pytest.raises(ConfigError, match=rf"node-b has {key}\. Use launch\.transport=ssh"):
            validate(of_two(transport, **{key: OWN[key]}))


def test_this_machine_alone_may_have_them() -> None:
    exp = experiment("auto", (1,), "cpu")
    names = frozenset({"10.0.0.1"})
    assert make_plan(exp, Knowledge(names)).transport == "local"
    exp.hardware.hosts[0].env = {"A": "1"}
    assert make_plan(exp, Knowledge(names)).transport == "ssh"


def test_mistakes() -> None:
    for keys, message in (
        ({"python": "python3"}, "python=python3: must be an absolute path of this host"),
        ({"model": "/m"}, "model stands for model.path there, which is not set"),
        ({"enter": ["-i"]}, "enter=-i: must begin with a program"),
        ({"env": {"HF_TOKEN": "x"}}, r"\(node-b\)\.env\.HF_TOKEN: looks like a secret"),
        ({"env": {"RANK": "1"}}, r"\.env\.RANK: is set by llmx"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(of_two(**keys))
    assert keys_of(HostConfig(**{**OWN, "data": "/d", "model": "/m"})) == list(KEYS)


def test_what_a_rank_reads() -> None:
    values = {
        "run_dir": "/runs/demo",
        "model": {"kind": "hf", "path": "/runs/m", "tokenizer": "/runs/m"},
        "data": {"path": "/runs/d.jsonl", "cache_dir": "/runs/cache"},
        "hardware": {"root": "/runs", "hosts": [{"name": "b", "root": "/x/", "data": "/d.jsonl"}]},
    }
    exp = experiment_from_dict(values)
    (host,) = exp.hardware.hosts
    paths = [path_on(exp.hardware, host, path) for path in ("/runs", "/runs2/x", "/other")]
    assert paths == ["/x", "/runs2/x", "/other"]
    there = experiment_on(exp, host)
    read = (there.run_dir, there.data.path, there.data.cache_dir)
    assert read == ("/x/demo", "/d.jsonl", "/x/cache")
    assert (there.model.path, there.model.tokenizer) == ("/x/m", "/x/m")
    assert there.hardware == exp.hardware
    there = experiment_on(exp, HostConfig(model="/m"))
    assert (there.model.path, there.model.tokenizer) == ("/m", "/m")
    assert experiment_on(exp, HostConfig()) == exp
