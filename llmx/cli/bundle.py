"""``python -m llmx bundle DIR [overrides]``: a run for a machine without internet, in a directory.

    python -m llmx bundle /media/disk/mine experiment=mine hardware=h100x8
    python -m llmx bundle --check /media/disk/mine
    python /media/disk/mine/install.py VENV     # on the other machine (bundle_install.py)

DIR has ``wheels`` of the packages here and of llmx, in ``files`` and ``hub`` what ranks read (the
paths that ``launch=rsync`` copies, and models of the Hub), in ``conf`` the options of
``--config-dir``; and ``manifest.json``, which is written last.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from llmx.cli import bundle_install
from llmx.cli.bundle_install import HERE, MANIFEST, PYTHON
from llmx.config.groups import GROUPS
from llmx.errors import ConfigError, DataError, DiskFullError, LaunchError
from llmx.text import plural, size

if TYPE_CHECKING:
    from llmx.compose.complete import Composed
    from llmx.launch.sync import RsyncPool, SyncPath

WHEELS_PART = 0.5
"""Of the size of an installed environment, what its wheels take at most: 0.3 with torch for CPU,
more with the libraries of CUDA, which shrink less."""


def main(words: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Collect a bundle, or verify one; returns the exit code."""
    from llmx.cli.arguments import as_meant, read_line
    from llmx.cli.plan import composed_line
    from llmx.compose.overrides import quoted
    from llmx.launch.files import make_spec
    from llmx.launch.sync import RsyncPool, source_of
    from llmx.lifecycle.preflight import with_checked_inputs
    from llmx.run.rundir import RunDir, write_json
    from llmx.run.scratch import scratch_directory

    out = stream or sys.stdout
    place, *rest = [word for word in words if word not in ("--check", "--no-wheels")] or ["-"]
    if place.startswith("-") or "=" in place:
        raise ConfigError("bundle: needs a directory, e.g. python -m llmx bundle /media/disk/mine.")
    bundle = Path(place).expanduser().absolute()
    if "--check" in words:
        if lines := bundle_install.problems(bundle):
            raise DataError("\n".join(lines))
        print(f"{bundle}: every file is as it was bundled", file=out)
        return 0
    if bundle.exists() and any(bundle.iterdir()):
        raise ConfigError(f"bundle {place}: is not empty. Name a new directory, or remove it.")
    if not shutil.which("rsync"):
        raise LaunchError("bundle: needs rsync on this machine (apt-get install rsync).")
    line = read_line(rest)
    if line.show or line.multirun:
        raise ConfigError("bundle: takes overrides, --config-dir, --check and --no-wheels only.")
    composed = with_checked_inputs(composed_line(line))
    command = as_meant(line.overrides)
    if any(word.startswith("hydra.") for word in command):  # also of experiment=DIR/best
        raise ConfigError(
            "bundle: a search path of Hydra does not travel: give the directory of your options as "
            "--config-dir DIR (experiment=DIR/best: --config-dir DIR experiment=best)."
        )
    packages = [] if "--no-wheels" in words else _packages()
    with scratch_directory() as scratch:
        spec = make_spec(composed.experiment, composed.plan, RunDir(scratch), port=0)
        pool = RsyncPool(spec)
        items, values = _contents(composed, pool)
        _check_space(bundle, items, pool, packages, out=out)
        (bundle / "wheels").mkdir(parents=True)
        _write_wheels(bundle / "wheels", scratch, packages, spec.code_root)
        for item, target in items:
            print(f"copying {item.path}", file=out, flush=True)
            (bundle / target).parent.mkdir(parents=True, exist_ok=True)
            arguments, names = source_of(item)
            pool.run(["-L", *arguments, str(bundle / target)], label=item.path, stdin=names)
    for group in GROUPS if line.config_dir else ():
        if (options := Path(line.config_dir or "").expanduser() / group).is_dir():
            shutil.copytree(options, bundle / "conf" / group)
    shutil.copyfile(bundle_install.__file__, bundle / "install.py")
    print("hashing", file=out, flush=True)
    files = bundle_install.hashed(bundle)
    command = [word for word in command if word.lstrip("+").partition("=")[0] not in values]
    manifest = {
        "format": 1,
        "python": PYTHON,
        "libc": " ".join(platform.libc_ver()),
        "has_wheels": bool(packages),
        "command": [
            *(
                "-m",
                "llmx",
                *(["--config-dir", f"{HERE}/conf"] if line.config_dir else []),
                *command,
            ),
            *(f"{key}={quoted(value)}" for key, value in values.items()),
        ],
        "files": files,
    }
    write_json(bundle / MANIFEST, manifest)
    total = sum((bundle / name).stat().st_size for name in files)
    print(
        f"{bundle}: {plural(len(files), 'file')}, {size(total)}; the SHA-256 of {MANIFEST} is",
        file=out,
    )
    print(f"  {bundle_install.sha256(bundle / MANIFEST)}", file=out)
    print(f"On the other machine ({PYTHON}): python3 DIR/install.py VENV", file=out)
    return 0


def _contents(
    composed: Composed, pool: RsyncPool
) -> tuple[list[tuple[SyncPath, str]], dict[str, Any]]:
    """Each path to copy with its place in the bundle; and the keys that name them there.

    Raises:
        ConfigError: something is not on this machine, or is streamed from the Hub.
    """
    from llmx.compose.task_rules import model_sources
    from llmx.launch.sync import SyncPath, matches, named_paths, paths_to_push

    exp, values = composed.experiment, dict[str, Any]()
    to_push = [item for item in paths_to_push(pool.spec, run_dir=False) if item.what != "code"]
    items = [(item, f"files{item.path}") for item in to_push]
    revisions = {network.source: network.revision for network in composed.plan.beside}
    moved = {"demo": "demo"}
    of_task = [(f"task.options.{name}", path) for name, path in model_sources(exp.task).items()]
    for key, path in [*((key, path) for key, path, _ in named_paths(exp)), *of_task]:
        if path in moved:
            pass
        elif Path(path).is_absolute():
            if not matches(path):
                raise ConfigError(f"{key}={path}: no such file on this machine.")
            moved[path] = f"{HERE}/files{os.path.normpath(path)}"
        elif key.startswith("data."):
            name = path.removeprefix("hub:")
            raise ConfigError(
                f"{key}={path}: is streamed from the Hub. Download it (hf download {name} "
                f"--repo-type dataset --local-dir DIR), and set {key}=DIR."
            )
        else:
            revision = exp.model.revision if key.startswith("model.") else revisions.get(path)
            has_weights = exp.model.init == "pretrained" and path == exp.model.path
            snapshot = _hub_snapshot(path, revision, weights=has_weights or path in revisions)
            items.append((SyncPath(str(snapshot), what="Hub"), f"hub/{path}"))
            moved[path] = f"{HERE}/hub/{path}"
        if path != "demo":
            values[key] = moved[path]
    if exp.model.revision:
        values["model.revision"] = None
    if exp.data.sources:
        values.pop("data.path", None)
        values["data.sources"] = [
            {key: value for key, value in dataclasses.asdict(source).items() if value}
            | {"path": moved[source.path]}
            for source in exp.data.sources
        ]
    if exp.launch.sync_extra:
        values["launch.sync_extra"] = [moved[path] for path in exp.launch.sync_extra]
    if exp.task.code_path:
        values["task.code_path"] = f"{HERE}/files{os.path.normpath(exp.task.code_path)}"
    return items, values


def _hub_snapshot(name: str, revision: str | None, *, weights: bool) -> Path:
    """The files of a model of the Hub in its cache here, which it fills."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
    try:
        for pattern in ("*.safetensors", "pytorch_model*.bin") if weights else ("*.json",):
            snapshot = Path(
                snapshot_download(name, revision=revision, allow_patterns=[*patterns, pattern])
            )
            if any(snapshot.glob(pattern)):
                break
    except Exception as error:  # the client's errors have no common base
        raise ConfigError(
            f"{name}: is not a directory here, and cannot be downloaded from the Hub: {error} Set "
            "it to a local directory, or HF_HOME to a cache that has it."
        ) from error
    return snapshot


def _check_space(
    bundle: Path,
    items: Sequence[tuple[SyncPath, str]],
    pool: RsyncPool,
    packages: Sequence[metadata.Distribution],
    *,
    out: TextIO,
) -> None:
    """Show what is copied with its size. DiskFullError where the disk is too small."""
    from llmx.launch.sync import count

    installed = sum(file.size or 0 for dist in packages for file in dist.files or ())
    needed = int(WHEELS_PART * installed)
    if packages:
        print(f"  wheels of {plural(len(packages), 'package')}: up to {size(needed)}", file=out)
    for item, _ in items:
        files, num_bytes = count(pool, item, "-L")
        needed += num_bytes
        print(f"  {item.what} {item.path}: {plural(files, 'file')}, {size(num_bytes)}", file=out)
    disk = next(path for path in (bundle, *bundle.parents) if path.is_dir())
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise DiskFullError(
            f"bundle {bundle}: takes {size(needed)}, and {disk} has {size(free)} free. Free some "
            "space, or name a directory on a larger disk. --no-wheels leaves out the packages."
        )
    print(f"  {size(needed)} in all; {disk} has {size(free)} free", file=out, flush=True)


def _packages() -> list[metadata.Distribution]:
    """The packages of this environment, but for llmx and pip."""
    packages: dict[str, metadata.Distribution] = {}
    for dist in metadata.distributions():
        packages.setdefault(re.sub(r"[-_.]+", "-", dist.metadata["Name"] or "").lower(), dist)
    return [dist for name, dist in sorted(packages.items()) if name not in ("", "llmx", "pip")]


def _origin(dist: metadata.Distribution) -> str:
    """What ``pip wheel`` makes the installed version of."""
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    url, version_control = origin.get("url"), origin.get("vcs_info")
    if version_control:
        url = f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
    name = dist.metadata["Name"]
    return f"{name} @ {url}" if url else f"{name}=={dist.version}"


def _write_wheels(
    wheels: Path, scratch: Path, packages: Sequence[metadata.Distribution], code_root: str | None
) -> None:
    """The wheels of packages and of llmx, as ``pip`` finds or builds them by its own settings."""
    (scratch / "packages.txt").write_text("".join(f"{_origin(dist)}\n" for dist in packages))
    # Without isolation, a checkout is built without an index.
    alone = ["--no-build-isolation"] * bool(importlib.util.find_spec("hatchling"))
    steps = [["-r", str(scratch / "packages.txt")]] if packages else []
    steps.append([*alone, code_root or _origin(metadata.distribution("llmx"))])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    for step in steps:
        if subprocess.run([*pip, "--wheel-dir", str(wheels), *step]).returncode:
            shutil.rmtree(wheels.parent)
            raise LaunchError(
                "bundle: pip cannot get all wheels (its message is above). It uses its own "
                "settings: name your index by PIP_INDEX_URL, another by PIP_EXTRA_INDEX_URL (of "
                "torch +cu126: https://download.pytorch.org/whl/cu126), a directory of wheels by "
                "PIP_FIND_LINKS. --no-wheels leaves out the packages, for a machine that has them."
            )
