"""What a run owns outside its results: processes, a temporary folder, shared-memory segments. And how all of it ends.

Processes are known by a mark in the environment that every child inherits, segments by being mapped by such a process
or by the name that vLLM gave them after a file in our temporary folder. Nothing else is ever touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

MARK = "MEGASTREAM_RUN"
"""Environment variable that names the run in each of its processes."""

SHM = Path("/dev/shm")
TRACKER_S = 3.0
OWNER_FILE = "owner.json"
PREFIX = "megastream-"
MARKER_FILE = ".megastream-run"
"""In a run's temporary folder; holds the run's id."""


class StillRunning(RuntimeError):
    """Processes of a run do not end, whatever they are sent. Names them."""


@dataclass
class Owner:
    """The owner file of a run folder. `segments` are names in /dev/shm, `folder` the run's temporary folder.

    `place` is where the run's process ids mean anything; see `this_place`.
    """

    run_id: str
    pid: int
    started: float
    folder: str
    segments: list[str] = field(default_factory=list)

    place: str = ""

    def write(self, run_folder: Path) -> None:
        path = run_folder / OWNER_FILE
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(self))
        partial.replace(path)

    @staticmethod
    def read(run_folder: Path) -> Owner | None:
        """None when no run left an owner file here. ValueError, in one line, when the file is something else."""
        path = run_folder / OWNER_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=Owner)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is no owner file of a run ({error}); remove it when no run uses this folder, or choose "
                "another --out"
            ) from error

    def note_segments(self) -> bool:
        """Adds the segments that our processes use now; True when there were new ones."""
        found = {name for pid in processes(self.run_id) for name in mapped(pid)}
        found |= {name for ident in _idents(Path(self.folder)) for name in _named_after(ident)}
        new = sorted(found - set(self.segments))
        self.segments += new
        return bool(new)


def this_place() -> str:
    """Host, boot and process namespace: only there a process id of an owner file says whether its run still lives."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"host {socket.gethostname()}, boot {boot}, {os.readlink('/proc/self/ns/pid')}"


def make_folder(run_id: str) -> Path:
    """A new temporary folder of a run, with its marker; absolute also where TMPDIR is not."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX)).absolute()
    (folder / MARKER_FILE).write_text(run_id)
    return folder


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
    """SIGKILLs every process of the run until none is left; returns those that outlived the deadline.

    Python's resource trackers are killed last: once the others are gone they remove the semaphores that those have left
    in /dev/shm, whose names nobody else knows, and end by themselves.
    """
    begin = time.monotonic()
    while (left := processes(run_id)) and time.monotonic() < begin + deadline_s:
        patient = time.monotonic() < begin + TRACKER_S
        for pid in left:
            if not (patient and _is_resource_tracker(pid)):
                _signal(pid, signal.SIGKILL)
        time.sleep(0.05)
    return left


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def clean(run_folder: Path, owner: Owner) -> list[str]:
    """Ends and removes all that a run owned; returns what it found, in words. The owner file goes last."""
    owner.note_segments()
    found = [f"process {pid}" for pid in processes(owner.run_id)]
    left = kill_all(owner.run_id)
    if left:
        raise StillRunning(f"processes {left} of run {owner.run_id} do not end; end them by hand and start again")
    for name in filter(_is_our_segment, owner.segments):
        found.append(f"shared memory {name}")
        (SHM / name).unlink(missing_ok=True)
    if Path(owner.folder).is_dir() and folder_refusal(owner) is None:
        found.append(f"folder {owner.folder}")
        shutil.rmtree(owner.folder)
    (run_folder / OWNER_FILE).unlink(missing_ok=True)
    return found


def sweep(run_folder: Path) -> list[str]:
    """Before a start: removes what a dead run left in this folder.

    ValueError, and nothing is touched, when that run is alive, when that cannot be known from here, or when its owner
    file names a temporary folder that is not a run's.
    """
    owner = Owner.read(run_folder)
    if owner is None:
        return []
    by_hand = f"end what is left of it by hand, remove {run_folder / OWNER_FILE}, and start again"
    if owner.place != this_place():
        raise ValueError(
            f"{run_folder} was last used by process {owner.pid} of another machine, boot or container ({owner.place}), "
            f"and nobody can tell from here whether it still runs; {by_hand}"
        )
    if start_time(owner.pid) == owner.started:
        raise ValueError(
            f"{run_folder} is in use by the run of process {owner.pid}; wait for it, or choose another --out"
        )
    if Path(owner.folder).exists() and (reason := folder_refusal(owner)):
        raise ValueError(f"{run_folder / OWNER_FILE} names the folder {owner.folder}, which {reason}; {by_hand}")
    return clean(run_folder, owner)


def folder_refusal(owner: Owner) -> str | None:
    """Why the owner's folder is not one that a run made for itself and may delete; None when it is."""
    folder = Path(owner.folder)
    temporary = {Path(path).resolve() for path in (tempfile.gettempdir(), "/tmp", "/var/tmp")}
    if not folder.is_absolute() or folder.is_symlink() or not folder.name.startswith(PREFIX):
        return f"is no absolute path of a folder named {PREFIX}..."
    if folder.parent.resolve() not in temporary:
        return f"is not directly in a temporary folder ({', '.join(sorted(map(str, temporary)))}); TMPDIR names another"
    if folder.stat().st_uid != os.getuid():
        return f"belongs to user {folder.stat().st_uid}"
    try:
        marked = (folder / MARKER_FILE).read_text()
    except (OSError, ValueError):
        marked = ""
    return None if marked == owner.run_id else f"has no {MARKER_FILE} of run {owner.run_id}"


def _is_our_segment(name: str) -> bool:
    """A file directly in /dev/shm that belongs to our user; the names come out of a file."""
    path = SHM / name
    return path.parent == SHM and name not in ("", ".", "..") and path.is_file() and path.stat().st_uid == os.getuid()


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def mapped(pid: int) -> set[str]:
    """Names of the segments in /dev/shm that a process uses; none of a process that is gone."""
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
