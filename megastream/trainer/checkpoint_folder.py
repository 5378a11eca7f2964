"""The folder of a trainer's checkpoints: what is complete, what is published, what is swept. Knows files only.

    step_00000040/      complete: its manifest was written last, then it got this name in one rename
    CURRENT             the name of the newest one, replaced atomically; for people and other programs
    LOCK                held by the trainer that writes here
    .saving-...         a save that goes on, or was killed; swept at the next start
    .removing-...       an old checkpoint on its way out; swept too
    .replaced-...       one whose step was saved again; swept once that has its name, else it gets its own back
    refused-step_...    was not whole when a training went on from an older one; never picked, counted or removed

A checkpoint is complete when it has its final name, a manifest that can be read, and every file of the manifest with
its size and checksum. Nothing else is ever picked.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

logger = logging.getLogger(__name__)

MANIFEST, CURRENT, LOCK = "manifest.json", "CURRENT", "LOCK"
FORMAT = 1
_STEP = re.compile(r"step_(\d{8,})")
_SAVING, _REMOVING, _REFUSED = ".saving-", ".removing-", "refused-"
_CHUNK_BYTES = 1 << 24
_POLL_S = 0.05
_REPLACED = ".replaced-"


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used. Names it, what is wrong, and the remedy."""


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says of itself. `files`: relative name -> (bytes, xxh3-64 in hex).

    `facts` are what a training that resumes must share (model, data, schedule), `state` where it goes on.
    """

    step: int
    facts: dict[str, Any]
    state: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, path: Path) -> None:
        """Synced to the disk when it returns."""
        write_synced(path, json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(folder: Path) -> Manifest:
        """CheckpointError when there is none, it is not one of this program, or it is another folder's."""
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} has no {MANIFEST}: its save did not finish") from error
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error})") from error
        if manifest.format != FORMAT:
            raise CheckpointError(f"{folder} has format {manifest.format}; this version reads format {FORMAT}")
        if (named := _STEP.fullmatch(folder.name)) and int(named[1]) != manifest.step:
            raise CheckpointError(f"{folder} is of step {manifest.step}, as its {MANIFEST} says; give it that name")
        return manifest


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def measure(path: Path) -> tuple[int, str]:
    """Size in bytes and xxh3-64 of a file's content."""
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def faults(folder: Path, files: Iterable[tuple[str, tuple[int, str]]]) -> Iterator[str]:
    """One line for each of these files that is missing, cannot be read, or differs from what the manifest says."""
    for name, told in files:
        try:
            if fault := _fault(folder / name, *told):
                yield f"file {name} {fault}"
        except OSError as error:
            yield f"file {name} cannot be read ({error.strerror})"


def _fault(path: Path, size: int, digest: str) -> str:
    if not path.is_file():
        return "is missing"
    if (found := path.stat().st_size) != size:
        return f"has {found} bytes, the manifest says {size}"
    return "" if measure(path)[1] == digest else "does not have the checksum of the manifest"


class CheckpointFolder:
    """The rank that writes and reads the folder's names calls these; see `Checkpointer` for all ranks together."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: int | None = None
        self._deadline_s = 0.0

    def open(self, deadline_s: float) -> list[str]:
        """Takes the folder for this trainer and sweeps what killed ones left; returns the swept names.

        CheckpointError when another trainer holds it beyond the deadline, or when it cannot be written. The deadline
        also ends later waits for who reads here.
        """
        self._deadline_s = deadline_s
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if (self.root / CURRENT).is_dir():
                raise CheckpointError(f"{self.root / CURRENT} is a folder, and a file goes there; move it away")
            self._lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(f"checkpoint folder {self.root} cannot be written: {error.strerror}") from error
        end = time.monotonic() + deadline_s
        while not _locked(self._lock, fcntl.LOCK_EX):
            if time.monotonic() > end:
                self.close()
                raise CheckpointError(
                    f"checkpoint folder {self.root} is in use by another trainer for {deadline_s:g} s; end that one, "
                    f"or choose another folder"
                )
            time.sleep(_POLL_S)
        for path in self.root.glob(f"{_REPLACED}*"):
            own = self.root / path.name.removeprefix(_REPLACED).partition("-")[0]
            if not own.exists():  # killed before the new one had the name
                path.rename(own)
        swept = [path for path in self.root.iterdir() if path.name.startswith((_SAVING, _REMOVING, _REPLACED))]
        for path in swept:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        return sorted(path.name for path in swept)

    def close(self) -> None:
        """Idempotent. The lock also ends with the process, however that ends."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, step: int, launch: str) -> Path:
        """A new empty folder for a save, under a name that is never picked."""
        path = self.root / f"{_SAVING}{step_name(step)}-{launch}"
        path.mkdir()
        return path

    def publish(self, saved: Path, manifest: Manifest) -> Path:
        """Manifest, final name, CURRENT, in this order, each on the disk before the next.

        CheckpointError when the step was saved before and is being read until the deadline.
        """
        for path in saved.iterdir():
            sync(path)
        manifest.write(saved / MANIFEST)
        sync(saved)
        target = self.root / step_name(manifest.step)
        replaced = self._replace(target) if target.exists() else None  # of a training that was rolled back
        saved.rename(target)
        sync(self.root)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        write_synced(self.root / CURRENT, target.name + "\n")
        sync(self.root)
        return target

    def complete(self) -> list[tuple[int, Path]]:
        """(step, folder) of everything under a final name, newest first. Whether it is whole is not looked at."""
        found = [(int(match[1]), path) for path in self.root.iterdir() if (match := _STEP.fullmatch(path.name))]
        return sorted(found, reverse=True)

    def go_back(self, chosen: Path) -> None:
        """A training goes on from `chosen`: what is newer was not whole, gets another name, and CURRENT names `chosen`.

        So it counts for nothing from now on, also when it can be read again; the next save is the newest one.
        """
        found = self.complete()
        step = next(number for number, path in found if path.name == chosen.name)
        for path in [path for number, path in found if number > step]:
            path.rename(path.with_name(f"{_REFUSED}{path.name}-{time.time_ns()}"))
        write_synced(self.root / CURRENT, chosen.name + "\n")
        sync(self.root)

    def prune(self, keep: int, newest: int) -> list[str]:
        """Removes all but `keep` of those up to `newest`, the step just published, which always stays.

        One that somebody reads stays until the next time; so does one that cannot be moved, with a warning: the step
        just published is whole all the same. Returns the names.
        """
        removed = []
        for _, path in [found for found in self.complete() if found[0] <= newest][keep:]:
            try:
                if self._set_aside(path):
                    removed.append(path.name)
            except OSError as error:
                logger.warning("checkpoint %s is older than the %d that are kept, and stays: %s", path, keep, error)
        return removed

    def _set_aside(self, path: Path) -> bool:
        """Takes the name away first, so that nobody picks a folder that is half gone. False while it is being read."""
        if (aside := _renamed(path, _REMOVING)) is None:
            return False
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def _replace(self, path: Path) -> Path:
        """Waits until nobody reads it, and takes its name away; nothing of it is gone yet. Where it lies then."""
        end = time.monotonic() + self._deadline_s
        while (aside := _renamed(path, _REPLACED)) is None:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{path} is read by another process for {self._deadline_s:g} s, and its step was saved again; end "
                    f"that process, or save to another folder"
                )
            time.sleep(_POLL_S)
        return aside


def _renamed(path: Path, prefix: str) -> Path | None:
    """The folder under a name that is never picked; None, and nothing happens, while it is being read."""
    # NFS gives an exclusive lock only to who could write the file, see flock(2).
    with _opened(path / MANIFEST, os.O_RDWR) as file:
        if file is not None and not _locked(file, fcntl.LOCK_EX):
            return None
        return path.rename(path.with_name(f"{prefix}{path.name}-{time.time_ns()}"))


@contextmanager
def reading(folder: Path) -> Iterator[Manifest]:
    """Keeps a checkpoint from being pruned while it is read, by whatever process. CheckpointError when it is gone."""
    with _opened(folder / MANIFEST, os.O_RDONLY) as file:
        if file is not None and not _locked(file, fcntl.LOCK_SH):
            raise CheckpointError(f"{folder} is being removed; choose a newer one")
        yield Manifest.read(folder)


@contextmanager
def _opened(path: Path, access: int) -> Iterator[int | None]:
    """A descriptor, or None when there is no such file."""
    try:
        file: int | None = os.open(path, access)
    except FileNotFoundError:
        file = None
    try:
        yield file
    finally:
        if file is not None:
            os.close(file)


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    """Replaces a file as a whole: whoever reads it sees the old or the new text, also after a crash.

    OSError names the file, which the system does not where a disk is full.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
