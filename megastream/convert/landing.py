"""How files land: all of them under a temporary name, synced, and then one rename. What was there stays until then.

.NAME.converting/journal       what this is (an identity), and how many jobs are on the disk
.NAME.converting/files/        what becomes NAME
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from megastream.convert.types import ConvertError, NewFile, Target

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Landing:
    """The temporary folder of one target; locked while it is in use."""

    def __init__(self, target: Path, identity: str, *, overwrite: bool) -> None:
        self.target, self._identity, self._overwrite = target, identity, overwrite
        self.work = target.with_name(f".{target.name}.converting")
        self.files = self.work / "files"
        self._lock: int | None = None
        self._journal: int | None = None

    def open(self, new: Target, *, resume: bool) -> int:
        """Takes the folder, with all files at their full size; returns the number of jobs that are done already.

        ConvertError when another process is at it, when there is nothing to resume, or when it was of another source.
        """
        if self.target.exists() and not self._overwrite:
            raise ConvertError(f"{self.target} exists; remove it, or give --overwrite")
        done = self._done() if resume else 0
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.work / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConvertError(f"another process is writing {self.target}; wait for it") from error
        if not resume:
            shutil.rmtree(self.files, ignore_errors=True)
            (self.work / "journal").unlink(missing_ok=True)
            self._allocate(new.files)
        self._journal = os.open(self.work / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if not resume:
            self._note(self._identity)
        return done

    def close(self) -> None:
        for descriptor in (self._journal, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._journal = self._lock = None

    def done(self, jobs: int) -> None:
        """Remembers that this many jobs are on the disk."""
        self._note(str(jobs))

    def publish(self, last: Iterable[tuple[str, bytes]]) -> None:
        """Small files, in their order; then everything gets its name at once. What had the name before is removed."""
        for name, data in last:
            _write_synced(self.files / name, data)
        for folder in (*(path for path in self.files.rglob("*") if path.is_dir()), self.files):
            _sync(folder)
        # A swap leaves the old files where the new ones were: a journal beside them would have them published again.
        (self.work / "journal").unlink()
        _sync(self.work)
        if self.target.exists():
            _exchange(self.files, self.target)
        else:
            self.files.rename(self.target)
        _sync(self.target.parent)
        shutil.rmtree(self.work, ignore_errors=True)

    def _allocate(self, files: Iterable[NewFile]) -> None:
        self.files.mkdir()
        needed = sum(file.num_bytes for file in files)
        free = shutil.disk_usage(self.work).free
        if needed > free:
            raise ConvertError(f"{self.target} needs {needed} bytes, and {free} are free on its disk; make room")
        for file in files:
            path = self.files / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as opened:
                opened.truncate(file.num_bytes)
                for start, data in file.fixed:
                    os.pwrite(opened.fileno(), data, start)
                os.fsync(opened.fileno())

    def _done(self) -> int:
        try:
            lines = (self.work / "journal").read_text().splitlines()
        except FileNotFoundError as error:
            raise ConvertError(f"there is nothing of {self.target} to resume; leave --resume out") from error
        if not lines or lines[0] != self._identity:
            raise ConvertError(f"{self.work} is of another source, target or option; leave --resume out to begin anew")
        numbers = [int(line) for line in lines[1:] if line.isdigit()]
        return max(numbers, default=0)

    def _note(self, line: str) -> None:
        assert self._journal is not None
        os.write(self._journal, (line + "\n").encode())
        os.fsync(self._journal)


def _exchange(new: Path, old: Path) -> None:
    """Swaps two names in one step; where the file system cannot, in two, with the old one kept beside until the end."""
    result = ctypes.CDLL(None, use_errno=True).renameat2(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE
    )
    if result == 0:
        return
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(old))
    aside = new.with_name("old")
    old.rename(aside)
    new.rename(old)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
