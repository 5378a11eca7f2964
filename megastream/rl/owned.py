"""What a run owns outside its results: processes, a temporary folder, shared-memory segments. And how all of it ends.

Processes are known by a mark in the environment that every child inherits, segments by being mapped by such a process
or by the name that vLLM gave them after a file in our temporary folder. Nothing else is ever touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

MARK = "MEGASTREAM_RUN"
"""Environment variable that names the run in each of its processes."""

SHM = Path("/dev/shm")
OWNER_FILE = "owner.json"


class StillRunning(RuntimeError):
    """Processes of a run do not end, whatever they are sent. Names them."""


@dataclass
class Owner:
    """The owner file of a run folder. `segments` are names in /dev/shm, `folder` the run's temporary folder."""

    run_id: str
    pid: int
    started: float
    folder: str
    segments: list[str] = field(default_factory=list)

    def write(self, run_folder: Path) -> None:
        path = run_folder / OWNER_FILE
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @staticmethod
    def read(run_folder: Path) -> Owner | None:
        """None when no run left an owner file here; a file of that name that somebody else wrote is none."""
        try:
            return Owner(**json.loads((run_folder / OWNER_FILE).read_text()))
        except (FileNotFoundError, NotADirectoryError, TypeError, json.JSONDecodeError):
            return None

    def note_segments(self) -> bool:
        """Adds the segments that our processes use now; True when there were new ones."""
        found = {name for pid in processes(self.run_id) for name in _mapped(pid)}
        found |= {name for ident in _idents(Path(self.folder)) for name in _named_after(ident)}
        new = sorted(found - set(self.segments))
        self.segments += new
        return bool(new)


def start_time(pid: int) -> float | None:
    """Clock ticks since boot at which a process began, None when there is none: with the pid it names a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    return None if state == "Z" else float(fields[18])


def processes(run_id: str) -> list[int]:
    """Process ids that carry the mark of this run."""
    mark = f"{MARK}={run_id}".encode()
    return [pid for pid in _pids() if pid != os.getpid() and mark in _environment(pid)]


def kill_all(run_id: str, deadline_s: float = 10.0) -> list[int]:
    """SIGKILLs every process of the run until none is left; returns those that outlived the deadline."""
    end = time.monotonic() + deadline_s
    while (left := processes(run_id)) and time.monotonic() < end:
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.05)
    return left


def clean(run_folder: Path, owner: Owner) -> list[str]:
    """Ends and removes all that a run owned; returns what it found, in words. The owner file goes last."""
    owner.note_segments()
    found = [f"process {pid}" for pid in processes(owner.run_id)]
    left = kill_all(owner.run_id)
    if left:
        raise StillRunning(f"processes {left} of run {owner.run_id} do not end; end them by hand and start again")
    for name in owner.segments:
        if (SHM / name).exists():
            found.append(f"shared memory {name}")
            (SHM / name).unlink(missing_ok=True)
    if Path(owner.folder).is_dir():
        found.append(f"folder {owner.folder}")
        shutil.rmtree(owner.folder)
    (run_folder / OWNER_FILE).unlink(missing_ok=True)
    return found


def sweep(run_folder: Path) -> list[str]:
    """Before a start: removes what a dead run left in this folder. ValueError when that run is still alive."""
    owner = Owner.read(run_folder)
    if owner is None:
        return []
    if start_time(owner.pid) == owner.started:
        raise ValueError(
            f"{run_folder} is in use by the run of process {owner.pid}; wait for it, or choose another --out"
        )
    return clean(run_folder, owner)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _mapped(pid: int) -> set[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/dev/shm/" in line)
    return {path.removeprefix("/dev/shm/") for path in paths if not path.endswith("(deleted)")}


def _idents(folder: Path) -> set[str]:
    """vLLM's rendezvous files; their names are what VLLM_DIST_IDENT holds in the workers."""
    return {path.name for path in folder.rglob("vllm_dist_*")}


def _named_after(ident: str) -> set[str]:
    return {name for name in os.listdir(SHM) if ident in name}


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
