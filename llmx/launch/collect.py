"""Checkpoints of hosts with disks of their own: committed ones come to this machine while the run
goes on, and what a host lacks goes back before the next attempt.

So a host that never comes back costs one save interval, and another host can take its place.
Used with ``launch.sync=rsync``; everywhere else nothing is done.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from llmx.checkpoint.choose import newest_usable, verify
from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Problem,
    rank_file,
    read_manifest,
    step_name,
)
from llmx.checkpoint.pointers import PINNED, pin, pinned
from llmx.errors import LaunchError
from llmx.launch import sync
from llmx.launch.fleet import AgentError, Channel
from llmx.launch.record import read_went_back
from llmx.launch.spec import LaunchSpec
from llmx.text import plural

PULL_EVERY_S = 5.0
BANDWIDTH_MIB_PER_S = 256
"""At most, while the run goes on: the network belongs to the training."""
_STEP = re.compile(r"checkpoints/(step-\d{8})/(.+)")


class Collector:
    """One attempt's traffic of checkpoints with the hosts that do not see this run directory."""

    def __init__(
        self, spec: LaunchSpec, channels: list[Channel], log: Callable[[str], None]
    ) -> None:
        self.spec, self.log = spec, log
        self.private = [c for c in channels if c.is_remote and c.hosts and not c.shared]
        if spec.exp.launch.sync != "rsync":
            self.private = []
        self.has_ranks_here = any(host.is_local for host in spec.plan.hosts)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._rsync: subprocess.Popen[str] | None = None
        self._verified: set[str] = set()
        self._went_back = read_went_back(spec.run_dir)

    def start(self) -> None:
        """Begin to pull in the background."""
        if not self.private:
            # Of an attempt that copied: nobody would take the pins back.
            (self.spec.run_dir.checkpoints / PINNED).unlink(missing_ok=True)
        else:
            self._thread = threading.Thread(target=self._loop, name="collect", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the background work soon; an unfinished copy is taken up again later."""
        self._stop.set()
        rsync = self._rsync
        if rsync is not None:
            with contextlib.suppress(OSError):
                rsync.terminate()
        if self._thread is not None:
            self._thread.join(timeout=2)  # it may be hashing, and the ranks are to be ended now

    def finish(self, channels: list[Channel]) -> None:
        """After the ranks have left: bring what is still missing, from the hosts that answer."""
        if self._thread is not None:
            self._thread.join()  # two at once would meet in one directory
        names = {channel.name for channel in channels}
        self.private = [c for c in channels if c.name in names and not c.shared and c.hosts]
        if self.spec.exp.launch.sync != "rsync" or not self.private:
            return
        self._stop.clear()
        try:
            self._pull_all(limit=False)
        except (AgentError, LaunchError, OSError) as error:
            self.log(f"checkpoints: {error}")

    def push_missing(self, say: Callable[[str], None]) -> None:
        """Give each host what it needs of the newest checkpoint that is complete here.

        A host needs the files that its own ranks wrote; all of them where ranks lie otherwise now.
        """
        try:
            for channel in self.private:
                self._push_metrics(channel)
            if self.private:
                self._push_newest(say)
        except AgentError as error:
            raise LaunchError(f"launch.sync=rsync: checkpoints: {error}") from error

    def _push_newest(self, say: Callable[[str], None]) -> None:
        checkpoints = self.spec.run_dir.checkpoints
        # The ranks check the hashes; here sizes tell what is missing.
        newest = newest_usable(checkpoints, hashes=False).step
        if newest is None:
            return
        directory = committed_dir(checkpoints, newest)
        manifest = read_manifest(directory)
        if isinstance(manifest, Problem):
            return
        for channel in self.private:
            inside = f"checkpoints/{directory.name}/"
            there = channel.ask("list", patterns=[f"{inside}**"], timeout_s=60)["files"]
            missing = [
                name
                for name in sorted(self._needed(manifest, channel))
                if there.get(inside + name) != manifest.files[name].bytes
            ]
            if inside + MANIFEST not in there:
                missing.append(MANIFEST)
            if missing:
                say(
                    f"sync: {channel.name}: {plural(len(missing), 'file')} of {directory.name} sent"
                )
                self._push(channel, directory, missing)

    def _needed(self, manifest: Manifest, channel: Channel) -> set[str]:
        """Files of a checkpoint that the ranks of a host read."""
        ranks = self.spec.plan.ranks
        written = {name for name in manifest.files if name.startswith("rank-")}
        own = {rank_file(rank.rank) for rank in ranks if rank.host in channel.hosts}
        as_now = written == {rank_file(rank.rank) for rank in ranks}
        return set(manifest.files) - (written - own if as_now else set())

    def _push(self, channel: Channel, directory: Path, names: list[str]) -> None:
        """No rank runs meanwhile."""
        target = f"{channel.name}:{directory}"
        parents = [str((directory / name).parent) for name in names]
        channel.ask("mkdir", paths=sorted({str(directory), *parents}), timeout_s=60)
        # The manifest last: without it the directory is no checkpoint.
        for part in ([name for name in names if name != MANIFEST], [MANIFEST]):
            if set(part) & set(names):
                self._run(["--files-from=-", f"{directory}/", f"{target}/"], stdin="\n".join(part))

    def _push_metrics(self, channel: Channel) -> None:
        """Rank 0 cuts its metrics back where it goes on from, so it must have them."""
        if self.spec.plan.ranks[0].host not in channel.hosts:
            return
        names = [p.name for p in (self.spec.run_dir.metrics, self.spec.run_dir.samples)]
        there = channel.ask("list", patterns=names, timeout_s=60)["files"]
        for name in names:
            path = self.spec.run_dir.root / name
            if path.exists() and path.stat().st_size > there.get(name, -1):
                self._run([str(path), f"{channel.name}:{path}"])

    def _loop(self) -> None:
        # Hashing must not take a core from the ranks.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        told = ""
        while not self._stop.wait(PULL_EVERY_S):
            try:
                self._pull_all(limit=True)
            except (AgentError, LaunchError, OSError) as error:
                if not self._stop.is_set() and str(error) != told:
                    told = str(error)
                    self.log(f"checkpoints: not collected this time: {error}")

    def _pull_all(self, *, limit: bool) -> None:
        """The newest committed checkpoint of the hosts, file by file, verified; old copies go."""
        there: dict[str, set[str]] = {}
        for channel in self.private:
            files = channel.ask(
                "list", patterns=["checkpoints/step-*/manifest.json"], timeout_s=30
            )["files"]
            for path in files:
                if match := _STEP.fullmatch(path):
                    there.setdefault(match[1], set()).add(channel.name)
        names = {channel.name for channel in self.private}
        for path in self.spec.run_dir.checkpoints.glob(".step-*.pull"):
            if path.name[1:-5] not in there:
                shutil.rmtree(path, ignore_errors=True)  # removed there before it was here
        everywhere = sorted((step for step, have in there.items() if have >= names), reverse=True)
        for step in everywhere:
            target = self.spec.run_dir.checkpoints / step
            if self.has_ranks_here and not target.is_dir():
                continue  # not committed by our own ranks yet, or removed by them again
            if step in self._verified and target.is_dir():
                break
            if self._stop.is_set():
                return
            if self._is_given_up(step, target):
                continue
            self._pin({step, *self._whole()})
            self._pull_step(step, target, limit=limit)
            self._pin({step})
            break
        if not self.has_ranks_here:
            self._forget(set(there))

    def _is_given_up(self, step: str, target: Path) -> bool:
        """Whether it is of a past that the run was sent back from, left there until the next
        save: here it would be the newest, and go to other hosts. Its manifest tells."""
        if not self._went_back:
            return False
        beside = target.with_name(f".{step}.pull")
        beside.mkdir(parents=True, exist_ok=True)
        self._run([f"{self.private[0].name}:{target}/{MANIFEST}", f"{beside}/"])
        manifest = read_manifest(beside)
        return isinstance(manifest, Manifest) and manifest.is_given_up(self._went_back)

    def _whole(self) -> set[str]:
        """The newest copy that is whole, of this attempt or an earlier one."""
        kept = {step_name(step) for step in pinned(self.spec.run_dir.checkpoints)}
        return {max(self._verified)} if self._verified else kept

    def _pin(self, steps: set[str]) -> None:
        """Keep the ranks from removing what is being copied, and the copy before it: saves may
        come faster than copies."""
        for channel in self.private:
            channel.ask("pin", steps=sorted(steps), timeout_s=30)
        if self.has_ranks_here:
            pin(self.spec.run_dir.checkpoints, [int(step[5:]) for step in steps])

    def _pull_step(self, step: str, target: Path, *, limit: bool) -> None:
        """Beside, then verified, then moved to where it belongs: a committed name is whole."""
        beside = target.with_name(f".{step}.pull")
        beside.mkdir(parents=True, exist_ok=True)
        rate = [f"--bwlimit={BANDWIDTH_MIB_PER_S}m"] if limit else []
        for channel in self.private:
            link = [f"--link-dest={target}"] if target.is_dir() else []
            self._run([*rate, *link, f"{channel.name}:{target}/", f"{beside}/"])
        manifest = read_manifest(beside)
        if isinstance(manifest, Problem):
            raise LaunchError(f"{step}: {manifest}")
        present = [name for name in manifest.files if (beside / name).is_file()]
        if not self.has_ranks_here and len(present) < len(manifest.files):
            lacking = sorted(set(manifest.files) - set(present))
            raise LaunchError(f"{step}: {lacking[0]} is on no host")
        for problem in verify(beside, present):
            (beside / problem.file).unlink()
            raise LaunchError(f"{step}: arrived damaged, fetched again: {problem}")
        if target.is_dir():
            for name in present:
                if not (target / name).exists():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    (beside / name).rename(target / name)
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.rename(target)
        self._verified.add(step)
        self.log(f"checkpoints: {step} collected and verified, {plural(len(present), 'file')}")

    def _forget(self, there: set[str]) -> None:
        """On a machine without ranks nobody else removes copies: keep what the hosts keep."""
        newest = max(self._verified, default="")
        for path in self.spec.run_dir.checkpoints.glob("step-*"):
            if path.name not in there and path.name < newest:
                shutil.rmtree(path, ignore_errors=True)

    def _run(self, words: list[str], *, stdin: str = "") -> None:
        argv = ["rsync", "-a", "--partial", "--no-owner", "--no-group", "-s"]
        argv += ["-e", f"ssh -F {self.spec.run_dir.ssh_config}", *words]
        self._rsync = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=sync.plain_env(),
        )
        if self._stop.is_set():
            self._rsync.terminate()  # asked to in the moment in which it was started
        try:
            _, said = self._rsync.communicate(stdin)
            code = self._rsync.returncode
        except BaseException:  # the user asked for the end
            self._rsync.terminate()
            self._rsync.wait()
            raise
        finally:
            self._rsync = None
        if code != 0:
            raise LaunchError(
                f"rsync ended with code {code}: {said.strip()[-500:] or 'no message'}"
            )
