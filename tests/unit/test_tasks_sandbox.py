"""The sandbox of model-written code: what it lets through, and what attacks from inside achieve."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmx.errors import ConfigError
from llmx.tasks import sandbox
from llmx.tasks.rewards import Scored, code_of, outcome, reward_functions

pytestmark = [
    pytest.mark.skipif(
        shutil.which(sandbox.PROGRAM) is None,
        reason="bubblewrap is not installed (scripts/install-system-packages.sh)",
    ),
    pytest.mark.xdist_group("sandbox"),  # they look for what others leave behind
]
TESTS = "assert answer() == 42"
RIGHT = "def answer(): return 42\n"
LIMIT_S = 30.0
"""Of programs that end by themselves, also on a busy machine."""
SHORT_S = 3.0
"""Of those that do not."""


def reward(code: str, tests: str = TESTS, *, limit_s: float = LIMIT_S):
    (function,) = reward_functions(
        ["code"], max_new_tokens=9, overlong_buffer=0, pattern=None, timeout_s=limit_s
    ).values()
    return outcome(function, Scored("", code, tests, 1), limit_s=limit_s)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process of a sandbox outlives its program, and no file of it is written."""
    before = {*Path("/tmp").iterdir()}
    yield
    deadline = time.monotonic() + 30
    while processes := [pid for pid in pids() if b"import json, os, resource" in command(pid)]:
        assert time.monotonic() < deadline, [command(pid) for pid in processes]
        time.sleep(0.01)
    names = {path.name for path in {*Path("/tmp").iterdir()} - before}
    assert not any(name.startswith("sandboxed") for name in names)


def pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def command(pid: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_code_is_the_last_fenced_block() -> None:
    assert code_of("a = 1") == "a = 1"
    assert code_of("First\n```python\na = 1\n```\nthen\n```py\na = 2\n```\nDone.") == "a = 2\n"
    assert code_of("```\na = 1") == "```\na = 1", "a block that is not closed is no code"


def test_a_program_is_rewarded_if_its_tests_pass() -> None:
    assert reward(f"Like this:\n```python\n{RIGHT}```\n").value == 1
    assert reward(RIGHT, f"```python\n{TESTS}\n```").value == 1
    assert reward("def answer(): return 43").value == 0
    assert reward("def answer(: return 42").value == 0, "no Python"
    assert reward("I do not know.").value == 0
    # What ordinary programs use.
    assert (
        reward(
            "from __future__ import annotations\n"
            "import dataclasses, threading, subprocess, sys, tempfile, typing\n"
            "@dataclasses.dataclass\n"
            "class Box:\n"
            "    value: int\n"
            "def answer():\n"
            "    assert typing.get_type_hints(Box) == {'value': int}\n"
            "    thread = threading.Thread(target=lambda: None); thread.start(); thread.join()\n"
            "    file = tempfile.TemporaryFile(); file.write(b'x' * 1000)\n"
            "    return int(subprocess.check_output([sys.executable, '-c', 'print(42)']))\n"
            "if __name__ == '__main__':\n"
            "    print(answer())\n"
        ).value
        == 1
    )


def test_a_row_without_tests_says_nothing() -> None:
    assert "the reference has no tests" in reward(RIGHT, " ").problem
    assert "SyntaxError" in reward(RIGHT, "The answer is 42.").problem


@pytest.mark.parametrize(
    "code",
    [
        "exit(0)",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os\nfor n in range(3, 20):\n    try: os.write(n, b'started ' + b'0' * 32)\n"
        "    except OSError: pass\nos._exit(0)",
    ],
)
def test_an_early_end_is_no_success(code: str) -> None:
    assert reward(code).value == 0


ATTACKS = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "many threads": "import threading, time\n"
    "for _ in range(1000): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "memory": "data = []\nwhile True: data.append(bytearray(2**24))",
    "the disk": "n = 0\nwhile True:\n    n += 1\n"
    "    with open(f'/tmp/sandboxed{n}', 'wb') as file: file.write(b'0' * 2**23)",
    "a large file": "open('/tmp/sandboxed', 'wb').write(b'0' * 2**25)",
    "shadow": "open('/etc/shadow').read()",
    "passwd": "open('/etc/passwd').read()",
    "processes of the host": "open('/proc/1/environ').read()",
    "its home": "import os; os.listdir('/root')[0] == '.bashrc' or 1 / 0",
    "writes to the system": "open('/usr/sandboxed', 'w')",
    "writes to the root": "open('/sandboxed', 'w')",
    "writes to Python": "import os; open(os.__file__, 'a')",
    "another user": "import os; os.setuid(0)",
    "mounts": "import subprocess\n"
    "subprocess.run(['/usr/bin/mount', '-t', 'tmpfs', 'x', '/tmp'], check=True)",
    "names of hosts": "import socket; socket.gethostbyname('localhost.localdomain')",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); 1 / 0",
    "kills everybody": "import os, signal; os.kill(-1, signal.SIGKILL); 1 / 0",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name: str) -> None:
    """Each ends with an error inside, and so without a reward; what would succeed gets one."""
    assert reward(f"{ATTACKS[name]}\n{RIGHT}").value == 0


def test_endless_programs_end() -> None:
    for code in (
        "while True: pass",
        "import time; time.sleep(600)",
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ntime.sleep(600)",
        "while True: print('x' * 2**20)",
        "import os\nwhile True:\n    for n in range(3, 20):\n        try: os.write(n, b'x' * 999)\n"
        "        except OSError: pass",
    ):
        start = time.monotonic()
        assert reward(code, limit_s=SHORT_S).value == 0
        assert time.monotonic() - start < 20 * SHORT_S


def test_output_of_any_length_is_thrown_away() -> None:
    code = (
        f"{RIGHT}import sys\nfor _ in range(1024): print('x' * 2**20); sys.stderr.write('y' * 99)"
    )
    assert reward(code).value == 1


def test_what_is_left_running_ends_with_the_program() -> None:
    """The fixture looks for it."""
    code = (
        f"{RIGHT}import os, time\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    time.sleep(600)\n"
    )
    assert reward(code).value == 1


def test_secrets_and_files_of_the_run_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    secret.chmod(0o644)
    code = f"""
import os
def answer():
    assert "HF_TOKEN" not in os.environ
    assert not os.path.exists({str(secret)!r})
    assert not os.path.exists({str(Path.cwd())!r} + "/pyproject.toml")
    assert os.getuid() != 0 and not os.path.exists("/proc/self") and os.listdir("/tmp") == []
    return 42
"""
    assert reward(code).value == 1


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)\n{RIGHT}"
        assert reward(code).value == 0
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_sandbox_that_cannot_be_started_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PROGRAM", "no-such-program")
    sandbox._usable.cache_clear()
    try:
        failed = reward(RIGHT)
        assert failed.value is None
        assert "no-such-program is not installed" in failed.problem
        with pytest.raises(ConfigError, match="apt install bubblewrap"):
            sandbox.check()
    finally:
        sandbox._usable.cache_clear()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_sandbox_without_a_limit_of_processes_is_refused() -> None:
    """The kernel counts no processes of root, who stays root in a user namespace of its own."""
    assert not sandbox._passes(False, sandbox._PROBE, "", limit_s=LIMIT_S)
    assert sandbox._passes(False, RIGHT, TESTS, limit_s=LIMIT_S)
