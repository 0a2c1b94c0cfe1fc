"""What is recorded of a run's origin: exact where it is cheap, honest where it is not."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

import pytest

from llmx.hardware import survey
from llmx.launch import rank_environment
from llmx.run.provenance import code_files, content, git_state, record
from llmx.run.provenance.content import fingerprint, fingerprints, hub_commit
from tests.composing import composed


def git(directory, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(directory), *identity, *words], check=True)


@pytest.fixture
def checkout(tmp_path):
    """A repository whose package is ``pkg``; one tracked file."""
    git(tmp_path, "init", "-q")
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    assert git_state(package) is None  # nothing of it is tracked
    git(tmp_path, "add", "."), git(tmp_path, "commit", "-qm", "x")
    return tmp_path


def test_commit_diff_and_untracked_files(checkout) -> None:
    package = checkout / "pkg"
    (package / "__init__.py").write_text("a = 2\n")
    (package / "new.py").write_text("b = 1\n")
    (checkout / "elsewhere.py").write_text("c = 1\n")
    (checkout / "notes.txt").write_text("d")
    state = git_state(package)
    assert state is not None
    assert len(state["commit"]) == 40
    assert "+a = 2" in state["diff"]
    # The text only of what llmx would run.
    assert state["untracked"] == {"elsewhere.py": None, "pkg/new.py": "b = 1\n"}
    assert json.dumps(state)


def test_the_diff_applies_again_whatever_the_users_configuration(checkout, tmp_path) -> None:
    package = checkout / "pkg"
    for name, value in (("diff.noprefix", "true"), ("color.ui", "always"), ("diff.relative", "1")):
        git(checkout, "config", name, value)
    (package / "__init__.py").write_text("a = '\u2028 übergröße'\n", encoding="utf-8")
    (package / "blob.bin").write_bytes(bytes(range(256)))
    git(checkout, "add", "pkg/blob.bin")
    state = git_state(package)
    assert state is not None
    git(checkout, "stash", "-q")
    patch = tmp_path / "then.patch"
    patch.write_text(state["diff"], encoding="utf-8")
    git(checkout, "apply", str(patch))
    assert (package / "__init__.py").read_text(encoding="utf-8") == "a = '\u2028 übergröße'\n"
    assert (package / "blob.bin").read_bytes() == bytes(range(256))


def test_a_diff_that_is_no_utf8_is_not_recorded_as_another(checkout) -> None:
    (checkout / "pkg" / "__init__.py").write_bytes(b"# caf\xe9\n")
    state = git_state(checkout / "pkg")
    assert state is not None
    assert state["diff"] is None


def test_no_git_no_state(tmp_path, monkeypatch) -> None:
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_every_file_of_the_package_has_a_hash(tmp_path) -> None:
    files = code_files()
    assert {"llmx/train/loop.py", "llmx/__init__.py"} <= set(files)
    (tmp_path / "a.py").write_text("a")
    before = code_files(tmp_path)
    (tmp_path / "a.py").write_text("b")
    assert code_files(tmp_path).keys() == before.keys() == {"llmx/a.py"}
    assert code_files(tmp_path) != before


def test_a_fingerprint_is_of_the_content_not_of_the_place(tmp_path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("hello")
    one = fingerprint(str(tmp_path / "one"), kind="models")
    two = fingerprint(str(tmp_path / "two"), kind="models")
    assert one is not None
    assert two is not None
    assert one["digest"] == two["digest"]
    assert (one["files"], one["bytes"], one["exact"]) == (1, 5, True)
    glob = fingerprint(str(tmp_path / "one" / "*.txt"), kind="datasets")
    assert glob is not None
    assert glob["digest"] == one["digest"]
    (tmp_path / "two" / "a.txt").rename(tmp_path / "two" / "b.txt")
    assert fingerprint(str(tmp_path / "two"), kind="models") != two
    assert fingerprint(str(tmp_path / "none"), kind="models") is None
    assert fingerprint(str(tmp_path / "*.none"), kind="models") is None


def test_one_byte_counts_in_a_small_input_and_size_and_ends_in_a_large_one(
    tmp_path, monkeypatch
) -> None:
    file = tmp_path / "a.bin"
    data = bytearray(os.urandom(3 << 20))
    file.write_bytes(data)
    small = fingerprint(str(file), kind="models")
    data[1_234_567] ^= 1
    file.write_bytes(data)
    assert fingerprint(str(file), kind="models") != small

    monkeypatch.setattr(content, "FULL_BYTES", 1 << 20)
    large = fingerprint(str(file), kind="models")
    assert large is not None
    assert not large["exact"]
    for at in (0, len(data) - 1):
        data[at] ^= 1
        file.write_bytes(data)
        assert fingerprint(str(file), kind="models") != large
        data[at] ^= 1
    file.write_bytes(data[:-1])
    assert fingerprint(str(file), kind="models") != large


def test_a_hub_id_is_known_by_its_commit(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert fingerprint("owner/name", kind="models") is None
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    assert hub_commit("owner/name", kind="models") == "abc123"
    found = fingerprint("owner/name", kind="models")
    assert found is not None
    assert found["digest"] == "abc123"
    assert hub_commit("owner/name", kind="models", revision="v2") is None
    (repository / "snapshots" / "f").mkdir(parents=True)
    assert hub_commit("owner/name", kind="models", revision="f") == "f"


def test_the_tokenizer_is_not_the_whole_model(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("1")
    exp = composed([]).experiment
    exp = dataclasses.replace(
        exp, model=dataclasses.replace(exp.model, path=str(tmp_path), tokenizer=None)
    )
    before = fingerprints(exp.model, exp.data)
    (tmp_path / "model.safetensors").write_text("2")
    after = fingerprints(exp.model, exp.data)
    assert before["tokenizer"] == after["tokenizer"]
    assert before["model"]["digest"] != after["model"]["digest"]
    assert before["data"]["files"] == 2  # the demo's


def test_facts_of_a_gpu_machine(tmp_path) -> None:
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC 12\n"
    )
    assert survey.nvidia_driver(str(driver)) == "570.86.15"
    assert survey.nvidia_driver(str(tmp_path / "none")) is None
    for index, name in enumerate(("NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB")):
        folder = tmp_path / "gpus" / f"0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    names = survey.gpu_names(str(tmp_path / "gpus"))
    assert names == ["NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB"]
    cpu = tmp_path / "cpuinfo"
    cpu.write_text("model name\t: Big CPU @ 2 GHz\nflags\t\t: fpu avx2 sse avx512f\n" * 2)
    assert survey.cpu_model(str(cpu)) == "Big CPU @ 2 GHz avx2 avx512f"


def test_the_record_is_whole_and_has_the_ranks_variables(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    done = composed(["hardware=cpu2", "launch.env.NCCL_DEBUG=INFO"])
    made = record(
        done.experiment,
        done.plan,
        ["seed=1"],
        environment=rank_environment(done.experiment, done.plan),
    )
    assert made["environment"]["OMP_NUM_THREADS"] == "3"
    assert made["environment"]["NCCL_ALGO"] == "Ring"
    assert made["packages"]["torch"]
    assert made["parent"] is None
    text = json.dumps(made)
    assert "hf_aaaa" not in text
