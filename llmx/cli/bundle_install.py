"""Installs a bundle of llmx on a machine without internet: ``python DIR/install.py VENV``.

``python -m llmx bundle DIR`` writes this file there. It needs Python alone: it verifies every file,
makes the environment VENV from the wheels, and prints the command that starts the run. Without
VENV it only verifies. A bundle without wheels gives llmx to an environment that exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"
PARTS = ("conf", "files", "hub", "wheels")
HERE = "@BUNDLE@"
"""Stands in the command of the manifest for the directory of the bundle."""
PYTHON = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {sysconfig.get_platform()}"


def sha256(path: Path) -> str:
    """The hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hashed(bundle: Path) -> dict[str, dict[str, object]]:
    """Name -> size and SHA-256 of each file of the bundle, without what Python caches."""
    paths = [bundle / "install.py", *(p for part in PARTS for p in (bundle / part).rglob("*"))]
    paths = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    names = sorted(str(path.relative_to(bundle)) for path in paths)

    def entry(name: str) -> dict[str, object]:
        return {"bytes": (bundle / name).stat().st_size, "sha256": sha256(bundle / name)}

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(entry, names), strict=True))


def problems(bundle: Path) -> list[str]:
    """A sentence for each file that is not what the manifest says."""
    try:
        expected = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, LookupError) as error:
        return [f"{bundle / MANIFEST} cannot be read ({error}). Make or copy the bundle again."]
    actual = hashed(bundle)
    lines = [
        f"{bundle / name} is {'damaged' if name in actual else 'missing'}. Copy it again."
        for name, entry in expected.items()
        if entry != actual.get(name)
    ]
    added = [name for name in actual if name not in expected]
    return lines + [f"{bundle / name} does not belong to the bundle. Remove it." for name in added]


def main(words: list[str]) -> None:
    """Verify, install, print the command; SystemExit says what is wrong."""
    bundle = Path(__file__).resolve().parent
    if words[1:] or any(word.startswith("-") for word in words):
        sys.exit(f"usage: python {bundle / 'install.py'} [VENV]")
    if lines := problems(bundle):
        sys.exit("\n".join([*lines[:20], f"{len(lines)} files are wrong."]))
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    print(f"{len(manifest['files'])} files are as they were bundled; the SHA-256 of {MANIFEST} is")
    print(f"  {sha256(bundle / MANIFEST)}", flush=True)
    if not words:
        return
    if set(str(bundle)) & set("'\"\\$`!\n"):  # it stands between quotes in the command
        sys.exit(f"{bundle}: move the bundle to a path without quotes, \\, $ and !.")
    python = Path(os.path.abspath(words[0]), "bin", "python")  # links stay
    wheels = sorted(map(str, (bundle / "wheels").glob("*.whl")))
    if manifest["has_wheels"] and manifest["python"] != PYTHON:
        sys.exit(f"This is {PYTHON}, and the wheels are for {manifest['python']}. Use that Python.")
    if not python.exists():
        if not manifest["has_wheels"]:
            sys.exit(f"{python} is missing, and the bundle has no packages to make it from.")
        if subprocess.run([sys.executable, "-m", "venv", words[0]]).returncode:
            sys.exit(f"{words[0]}: Python cannot create the environment (its message is above).")
    pip = [str(python), "-m", "pip", "--isolated", "--disable-pip-version-check", "install"]
    pip += ["--quiet", "--no-index", "--no-deps", "--force-reinstall", *wheels]
    # No index or constraint of this machine counts.
    if subprocess.run(pip, env={**os.environ, "PIP_CONFIG_FILE": os.devnull}).returncode:
        machine = f"This is {PYTHON}, {' '.join(platform.libc_ver())}"
        made_on = f"{manifest['python']}, {manifest['libc']}"
        sys.exit(f"pip failed (its message is above). {machine}; the bundle was made on {made_on}.")
    print(f"{words[0]} is ready. To start the run:\n")
    command = [str(python), *(word.replace(HERE, str(bundle)) for word in manifest["command"])]
    print(" ".join(map(quoted, command)))


def quoted(word: str) -> str:
    """As ``shlex.quote``, but Hydra's quotes stay readable."""
    return f'"{word}"' if "'" in word and not set(word) & set('"\\$`!') else shlex.quote(word)


if __name__ == "__main__":
    main(sys.argv[1:])
