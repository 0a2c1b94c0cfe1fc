"""Everything that is rendered before a launch: golden files, properties, and every refusal.

``pytest tests/unit/test_launch_render.py``; ``make golden`` records the golden files.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import ipaddress
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.config import experiment_from_dict
from llmx.config.addresses import FINGERPRINT, address_problem
from llmx.config.plugins import TRANSPORTS
from llmx.config.schema import Experiment
from llmx.config.validate import validate
from llmx.errors import ConfigError, LaunchError
from llmx.hardware.hostfile import HostSlots, parse_hostfile, render_hostfile
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
from llmx.launch.spec import LaunchSpec
from llmx.launch.ssh_config import render_ssh_config
from llmx.launch.transports import deepspeed_argv, transport_of
from llmx.launch.transports.slurm import missing_nodes, share_of_cores, slurm_cores
from llmx.plan import make_plan
from llmx.plan.types import HostPlan
from llmx.run.rundir import RunDir

ENVIRON = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/ada",
    "LANG": "C.UTF-8",
    "NCCL_DEBUG": "WARN",
    "HF_HOME": "/data/hf",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "WANDB_API_KEY": "0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "x",
    "LLMX_PROXY": "http://ada:pw@proxy:3128",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "CUDA_VISIBLE_DEVICES": "2,3",
    "PS1": "$ ",
}


def experiment(
    transport: str, slots: tuple[int, ...], device: str = "a100", **launch: object
) -> Experiment:
    local = transport == "local"
    hosts = [
        {
            "name": "localhost" if local else f"node-{chr(97 + i)}",
            "address": None if local else f"10.0.0.{i + 1}",
            "ssh_port": 22 if local else 2201 + i,
            "user": None if local else "ada",
            "identity_file": None if local else "/home/ada/.ssh/id cluster",
            "slots": count,
            "device": device,
            "interface": None if local else "eth1",
        }
        for i, count in enumerate(slots)
    ]
    sheets = {
        "a100": {"accelerator": "cuda", "precisions": ["fp32", "bf16", "fp16"]},
        "cpu": {"accelerator": "cpu", "precisions": ["fp32"]},
    }
    return experiment_from_dict(
        {
            "run_dir": "/runs/demo",
            "model": {"kind": "llama", "init": "scratch", "config": {"hidden_size": 64}},
            "task": {"steps": 10},
            "batch": {"accumulation": 1},
            "precision": "fp32",
            "hardware": {
                "hosts": hosts,
                "devices": {device: sheets[device]},
                "env": {"NCCL_IB_DISABLE": "1"},
            },
            "launch": {"transport": transport, **launch},
        }
    )


def spec_of(exp: Experiment, **changes: object) -> LaunchSpec:
    plan = make_plan(exp)
    spec = LaunchSpec(
        exp=exp,
        plan=plan,
        run_dir=RunDir(Path(exp.run_dir)),
        port=29876,
        token="00c0ffee00c0ffee",
        python="/opt/venv/bin/python3",
        code_root="/home/ada/llmx",
        environ=ENVIRON,
        cores=16 if plan.transport in ("local", "slurm") else None,
        interfaces=tuple(host.interface for host in plan.hosts),
    )
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


ODD_VALUE = "two words $HOME `id` \"quoted\" 'single' 50%n back\\slash;&|"
SLOTS = {
    "local": (2,), "ssh": (2, 1), "pdsh": (2, 1), "openmpi": (2, 1), "slurm": (2, 2),
    "external": (2, 1),
}  # fmt: skip


@pytest.mark.parametrize("transport", sorted(TRANSPORTS.shipped))
def test_rendered_files(transport: str, golden: Callable[[str, str], None]) -> None:
    more = {"cpus_per_task": 8} if transport == "slurm" else {}
    files = rendered_files(spec_of(experiment(transport, SLOTS[transport]), **more))
    text = "".join(f"===== {name}\n{content}" for name, content in files.items())
    golden(f"launch/{transport}.txt", text)


@pytest.mark.parametrize("transport", sorted(TRANSPORTS.shipped))
def test_no_secret_gets_through(transport: str) -> None:
    spec = spec_of(experiment(transport, SLOTS[transport]))
    text = "".join(rendered_files(spec).values()) + repr(runner_env(spec))
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "LLMX_PROXY"):
        assert name not in text
        assert ENVIRON[name] not in text or len(ENVIRON[name]) < 4
    assert "PS1" not in runner_env(spec)
    if not transport_of(transport).agents_start_ranks:
        assert spec.token not in " ".join(transport_of(transport).argv(spec))


_NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)


@given(st.dictionaries(_NAMES, st.integers(1, 64), min_size=1))
def test_hostfile_round_trip(slots: dict[str, int]) -> None:
    hosts = tuple(HostSlots(name, count) for name, count in slots.items())
    assert parse_hostfile(render_hostfile(hosts)) == hosts


def _plan_hosts() -> st.SearchStrategy[HostPlan]:
    """Whatever the rules of the hardware let through."""
    words = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_.@+-]{0,20})", fullmatch=True)
    paths = st.text(
        st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="\"'\\"),
        min_size=1,
        max_size=30,
    ).map(lambda text: f"/keys/my {text}")
    addresses = st.one_of(
        st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), _NAMES
    ).filter(lambda text: address_problem(text) is None)
    return st.builds(
        HostPlan,
        name=_NAMES,
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


@settings(max_examples=10, deadline=None)
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


def test_hostfile_of_a_user() -> None:
    text = "# my cluster\n\nworker-0 slots=4 # rack 1\n  worker-1\tslots=2 max_slots=2\n"
    assert parse_hostfile(text) == (HostSlots("worker-0", 4), HostSlots("worker-1", 2))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("// rack 1", "a comment begins with #"),
        ("a slots = 2", 'write "a slots=2"'),
        ("a", "the number of ranks is missing"),
        ("a slots=0", "at least one slot"),
        ("a slots=two", 'expected "slots=N"'),
        ("a:2222 slots=2", "hardware.ssh_port=2222"),
        ("ada@a slots=2", "hardware.user=ada"),
        ("node[1-3] slots=2", "one host a line"),
        ("good slots=1", "is already in line 1"),
    ],
)
def test_hostfile_errors_name_line_and_fix(line: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(f"good slots=1\n{line}\n", source="/job/hostfile")
    assert str(caught.value).startswith("/job/hostfile:2: ")
    assert expected in str(caught.value)


def test_hostfile_reports_all_lines_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile("a\nb slots=1\nc slots = 3\n")
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["1", "3"]


def test_empty_hostfile() -> None:
    with pytest.raises(ConfigError, match="has no hosts"):
        parse_hostfile("# nothing\n")


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "WANDB_MODE", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "API_KEY",
     "OPENAI_API_KEY", "GIT_AUTH", "MY_CREDENTIALS"],
)  # fmt: skip
def test_secrets_in_the_config_are_refused(name: str) -> None:
    exp = experiment("pdsh", (1, 1), env={name: "value"})
    with pytest.raises(ConfigError, match=f"launch.env.{name}: looks like a secret"):
        validate(exp)
    with pytest.raises(ConfigError, match=f"launch.env.{name}: looks like a secret"):
        rank_env(spec_of(exp))  # a config.yaml that was edited


def test_reserved_names_say_what_to_set_instead() -> None:
    exp = experiment("pdsh", (1, 1), env={"MASTER_PORT": "1", "RANK": "0"})
    with pytest.raises(ConfigError) as caught:
        validate(exp)
    assert "launch.env.MASTER_PORT" in str(caught.value)
    assert "launch.master_port" in str(caught.value)
    assert "launch.env.RANK" in str(caught.value)


def test_rank_0_behind_nat() -> None:
    exp = experiment("ssh", (1, 1), master_port=9527)
    exp.hardware.reach = "[fd00::7]:30846"
    environments = [rank_env(spec_of(exp, port=9527), host) for host in (0, 1)]
    met = [(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments]
    assert met == [("127.0.0.1", "9527"), ("fd00::7", "30846")]
    exp.launch.master_port = 0
    with pytest.raises(ConfigError, match=r"must lead to a port that is known. Set launch.master"):
        validate(exp)
    exp.launch.transport = "pdsh"
    with pytest.raises(
        ConfigError, match=r"launch.transport=pdsh gives every rank the same address"
    ):
        validate(exp)


def test_the_config_wins_over_the_environment() -> None:
    exp = experiment("pdsh", (1, 1), env={"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"})
    env = rank_env(spec_of(exp))
    assert (env["NCCL_DEBUG"], env["OMP_NUM_THREADS"]) == ("INFO", "3")
    assert env["NCCL_IB_DISABLE"] == "1"


def test_values_that_openmpi_would_change_are_refused() -> None:
    exp = experiment("openmpi", (1, 1), env={"ODD": "two words"})
    with pytest.raises(ConfigError, match="ODD='two words'"):
        rendered_files(spec_of(exp))


def test_a_clone_that_openmpi_cannot_reach_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmx.launch.files.code_root", lambda: "/home/Zoë/my clone")
    exp = experiment("openmpi", (1, 1))
    with pytest.raises(ConfigError, match=r"PYTHONPATH='/home/Zoë/my clone.*Move that directory"):
        rank_environment(exp, make_plan(exp))
    exp = experiment("pdsh", (1, 1))
    assert rank_environment(exp, make_plan(exp))["PYTHONPATH"].startswith("/home/Zoë/my clone")


def test_interfaces_that_differ() -> None:
    spec = spec_of(experiment("pdsh", (1, 1)), interfaces=("eth0", "ens5"))
    env = rank_env(spec)
    assert "GLOO_SOCKET_IFNAME" not in env
    assert env["LLMX_INTERFACES"] == "eth0,ens5"
    (arguments,) = [a for a in transport_of("openmpi").argv(spec) if "launcher_args" in a]
    assert "oob_tcp_if_include ens5,eth0" in arguments


def test_an_exported_interface_is_better_than_a_found_one() -> None:
    exp = experiment("pdsh", (1, 1))
    environ = {**ENVIRON, "NCCL_SOCKET_IFNAME": "ib0"}
    assert rank_env(spec_of(exp, environ=environ))["NCCL_SOCKET_IFNAME"] == "eth1"  # configured
    for host in exp.hardware.hosts:
        host.interface = None
    found = rank_env(spec_of(exp, environ=environ, interfaces=("eth0", "eth0")))
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("ib0", "eth0")


def test_unequal_slots_under_slurm() -> None:
    exp = experiment("slurm", (2, 1))
    with pytest.raises(ConfigError, match="node-a 2, node-b 1\\). Use hardware.slots=1"):
        validate(exp)


@pytest.mark.parametrize("letter", [" ", "'", '"', "$", "(", "&", ";", "%", "\\", "*", "{"])
def test_paths_that_another_shell_would_read(letter: str) -> None:
    """DeepSpeed writes them into the remote command without quotes; pdsh expands %h."""
    exp = experiment("pdsh", (1, 1))
    exp.run_dir = f"/runs/a{letter}b"
    with pytest.raises(ConfigError, match="run_dir="):
        check_launch(exp, make_plan(exp))
    exp = experiment("pdsh", (1, 1), python=f"/opt/py{letter}x/bin/python")
    with pytest.raises(ConfigError, match="launch.python="):
        check_launch(exp, make_plan(exp))
    exp.dry_run = True  # a plan warns, and may be launched from another place
    check_launch(exp, make_plan(exp))
    assert [problem.partition("=")[0] for problem in path_problems(exp, make_plan(exp))] == [
        "launch.python"
    ]
    local = experiment("local", (1,))
    local.run_dir = f"/runs/a{letter}b"
    check_launch(local, make_plan(local))


def test_paths_that_travel() -> None:
    for run_dir in (
        "/runs/0_optim.lr-1e-3,x=2@b+c:d~e#f",
        "/家/运行",
        "/runs/1_data.columns-[a,b]",
    ):
        exp = experiment("pdsh", (1, 1), python="/usr/bin/python3")
        exp.run_dir = run_dir
        check_launch(exp, make_plan(exp))


def test_what_people_have_in_their_own_ssh_config(tmp_path: Path) -> None:
    """As ssh itself reads it: what is for a terminal does not hold here, the way there does."""
    own, ours = tmp_path / "own", tmp_path / "ours"
    own.write_text(
        "Host node-*\n  RemoteCommand tmux attach\n  RequestTTY force\n  ControlMaster auto\n"
        "  ControlPath /tmp/master-%r\n  ControlPersist 1h\n  LocalForward 8888 localhost:8888\n"
        "  ProxyJump gate\n  Port 9\n"
    )
    rendered = rendered_files(spec_of(experiment("pdsh", (1, 1))))["ssh_config"]
    ours.write_text(rendered.replace("~/.ssh/config", str(own)))
    done = subprocess.run(
        ["ssh", "-G", "-F", ours, "node-a", "true"], capture_output=True, text=True, check=True
    )
    values = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert values["controlmaster"] == values["requesttty"] == "false"
    assert "localforward" not in values
    assert values["clearallforwardings"] == "yes"
    assert values["proxyjump"] == "gate"
    assert values["controlpath"] == "/tmp/master-ada"
    assert (values["hostname"], values["port"]) == ("10.0.0.1", "2201")


def test_rsync_under_slurm() -> None:
    exp = experiment("slurm", (1, 1), sync="rsync")
    with pytest.raises(ConfigError, match="launch.sync=rsync copies over ssh"):
        validate(exp)


def test_local_refuses_other_machines() -> None:
    exp = experiment("local", (1,))
    plan = make_plan(exp)
    far = dataclasses.replace(plan.hosts[0], name="far", is_local=False)
    with pytest.raises(ConfigError, match='"far" is another machine'):
        check_launch(exp, dataclasses.replace(plan, hosts=(far,)))


def test_a_host_name_with_a_port() -> None:
    exp = experiment("pdsh", (1, 1))
    plan = make_plan(exp)
    bad = dataclasses.replace(plan.hosts[1], name="b:22")
    edited = dataclasses.replace(plan, hosts=(plan.hosts[0], bad))
    with pytest.raises(ConfigError, match="hardware.ssh_port=22"):
        rendered_files(spec_of(exp, plan=edited))


def test_a_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    exp = experiment("pdsh", (1, 1), sync="rsync")
    with pytest.raises(LaunchError, match="apt-get install openssh-client pdsh rsync"):
        check_programs(exp.launch, make_plan(exp))


def test_chosen_gpus_stay_chosen() -> None:
    """DeepSpeed would put the ranks of everybody on GPUs 0 and 1."""
    spec = spec_of(experiment("local", (2,)))
    assert rank_env(spec)["LLMX_GPUS"] == "2,3"
    spec = dataclasses.replace(spec, environ={"CUDA_VISIBLE_DEVICES": "GPU-3f3a,GPU-1f"})
    assert rank_env(spec)["LLMX_GPUS"] == "GPU-3f3a,GPU-1f"


@pytest.mark.parametrize("transport", ["ssh", "pdsh", "openmpi"])
def test_the_gpus_of_several_hosts(transport: str) -> None:
    """Here, by the hardware file, and by the environment of the host."""
    exp = experiment(transport, (2, 2, 2, 1))
    exp.hardware.hosts[1].gpus = ["GPU-3f3a", "MIG-77aa"]
    exp.hardware.hosts[2].gpus = ["0", "2"]
    spec = spec_of(exp, plan=make_plan(exp, local_names=frozenset({"10.0.0.1"})))
    spec = dataclasses.replace(spec, visible_gpus={"node-b": "0,1", "node-c": "4,5,6"})
    assert rank_env(spec)["LLMX_GPUS"] == "2,3:GPU-3f3a,MIG-77aa:4,6:0"


@pytest.mark.parametrize(("visible", "count"), [("0", "1 GPU"), ("-1", "0 GPUs"), ("", "0 GPUs")])
def test_gpus_that_are_too_few(visible: str, count: str) -> None:
    spec = spec_of(experiment("ssh", (1, 2)), visible_gpus={"node-b": visible})
    with pytest.raises(LaunchError, match=f"node-b: CUDA_VISIBLE_DEVICES=.* leaves {count}, and"):
        rank_env(spec)


def test_slurm_asks_for_gpus_only_where_there_are_some() -> None:
    for device, wanted in (("a100", True), ("cpu", False)):
        argv = transport_of("slurm").argv(spec_of(experiment("slurm", (2, 2), device)))
        assert any("--gpus-per-node=2" in part for part in argv) == wanted


def test_slurm_gives_each_rank_its_cores() -> None:
    """Its default is one core for a rank with eight threads; GPUs that are bound one to a rank
    would make LOCAL_RANK a number that is not there."""
    spec = spec_of(experiment("slurm", (2, 2)), cpus_per_task=24, cores=48)
    (words,) = [part for part in transport_of("slurm").argv(spec) if "launcher_args" in part]
    assert "--cpus-per-task=24 --cpu-bind=cores --gpus-per-node=2 --gpu-bind=none" in words
    assert rank_env(spec)["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(
    ("transport", "overrides", "environ", "threads"),
    [
        ("local", {}, {}, "8"),  # of 64 cores and 4 ranks 16 each
        ("local", {"offload_optimizer": "cpu", "stage": 2}, {}, "16"),
        ("local", {}, {"LLMX_RANKS_PER_HOST": "16"}, "4"),
        ("local", {}, {"OMP_NUM_THREADS": "3"}, "3"),
        ("pdsh", {}, {}, None),  # each rank looks at its own host
        ("pdsh", {}, {"OMP_NUM_THREADS": "3"}, "3"),
    ],
)
def test_threads_of_a_rank(transport, overrides, environ, threads, monkeypatch) -> None:
    """A login node of 2 cores says nothing of its hosts."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    exp = experiment(transport, (4,) if transport == "local" else (4, 2))
    exp = dataclasses.replace(exp, zero=dataclasses.replace(exp.zero, **overrides))
    spec = make_spec(exp, make_plan(exp), RunDir(Path(exp.run_dir)), port=1)
    env = rank_env(dataclasses.replace(spec, environ=environ))
    assert env.get("OMP_NUM_THREADS") == threads
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("environ", "said", "cores"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "16"}, None, 16),
        ({"SLURM_JOB_CPUS_PER_NODE": "64(x2),32"}, None, 32),
        ({"SLURM_JOB_ID": "3"}, "64\\n48\\n", None),
        ({}, "64\\n48\\n", 48),
        ({}, "", None),
        ({}, None, None),
    ],
)
def test_the_cores_of_slurm_hosts(environ, said, cores, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if said is not None:
        program = tmp_path / "sinfo"
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


def test_launcher_only_variables_stay_here() -> None:
    spec = spec_of(experiment("pdsh", (1, 1)))
    assert launcher_env(spec)["SSH_AUTH_SOCK"] == "/tmp/agent"
    assert "SSH_AUTH_SOCK" not in rank_env(spec)


def test_command_can_be_pasted(tmp_path: Path) -> None:
    """A shell that runs command.txt gives the program exactly the argv and the variables."""
    exp = experiment("local", (2,), "cpu", env={"ODD": 'it\'s $HOME "here"'})
    exp.run_dir = str(tmp_path)
    spec = spec_of(exp)
    command = rendered_files(spec)["command.txt"]
    *head, last = command.strip().splitlines()
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['ODD'], os.getcwd()]))"
    argv = shlex.split(last)
    assert argv == transport_of("local").argv(spec)
    script = "\n".join([*head, shlex.join([sys.executable, "-c", show, *argv])])
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [argv, 'it\'s $HOME "here"', str(tmp_path)]


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
    done = subprocess.run(
        ["sh", "-c", rendered_files(spec)["command.txt"]],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
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


def test_nothing_heavy_is_imported() -> None:
    """The control process starts in well under a second because of it."""
    code = (
        "import sys, llmx.launch, llmx.failures.diagnose;"
        "heavy = {'torch', 'deepspeed', 'transformers', 'datasets', 'wandb', 'matplotlib', 'numpy',"
        "'hydra', 'omegaconf', 'rich', 'psutil'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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
