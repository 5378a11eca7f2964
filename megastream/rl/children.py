"""The processes of a run: started with their own session and log file, watched, and ended with their launcher."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megastream.rl.owned import Owner, start_time

PR_SET_PDEATHSIG = 1
AUTOGROUP = Path("/proc/self/autogroup")
POLL_S = 0.1
NOTE_EVERY_S = 2.0
_GAVE_UP = re.compile(r"(engine host|trainer rank \d+|prepare): |[\w.]*(Error|Exception|Interrupt): ")


class RunFailed(RuntimeError):
    """A process of the run ended before its time, or did not end in time. Names it, and its last words."""


@dataclass
class Child:
    """One process. `process` is None for one that somebody else started and reaps."""

    name: str
    pid: int
    process: subprocess.Popen[bytes] | None
    log: Path | None = None

    @property
    def ended(self) -> bool:
        return start_time(self.pid) is None if self.process is None else self.process.poll() is not None

    def terminate(self) -> None:
        """Asks it to come to its end."""
        if self.process is not None and not self.ended:
            self.process.terminate()

    def last_words(self) -> str:
        """How it ended, and the last line that it wrote."""
        status = None if self.process is None else self.process.returncode
        how = "is gone" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        words = _last_words(self.log) if self.log is not None and how.startswith("ended") else ""
        return f"{self.name} {how}" + (f": {words}" if words else "") + (f"; see {self.log}" if self.log else "")


def _last_words(log: Path) -> str:
    """The last line with which the process itself gave up, else the last line of all."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    gave_up = [line for line in lines if _GAVE_UP.match(line)]
    return (gave_up or lines or [""])[-1].strip()


class Children:
    """Starts and watches; at the end of the `with` block all of them are asked to stop, and killed at the deadline."""

    def __init__(self, folder: Path, owner: Owner, stop_s: float, environment: dict[str, str]) -> None:
        self._folder, self._owner, self._stop_s = folder, owner, stop_s
        self._environment = {**os.environ, **environment, "TMPDIR": owner.folder}
        self._children: list[Child] = []
        self._expected: set[str] = set()
        self._noted = 0.0

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._note()
        for child in self._children:
            child.terminate()
        end = time.monotonic() + self._stop_s
        ours = [child.process for child in self._children if child.process is not None]
        while any(process.poll() is None for process in ours) and time.monotonic() < end:
            time.sleep(POLL_S)
        for process in ours:
            if process.poll() is None:
                process.kill()
                process.wait()

    def start(
        self,
        name: str,
        module: str,
        *arguments: str,
        nice: int = 0,
        environment: dict[str, str] | None = None,
        log_name: str = "",
    ) -> Child:
        """Runs `python -m module arguments` at a scheduling priority; its output goes to `log_name` or `<name>.log`."""
        log = self._folder / (log_name or f"{name}.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._environment, **(environment or {})},
                start_new_session=True,
                preexec_fn=before_program(os.getpid(), nice),
            )
        child = Child(name, process.pid, process, log)
        self._children.append(child)
        return child

    def adopt(self, children: list[Child]) -> None:
        """Watches processes that somebody else started."""
        self._children += children

    def run_to_end(self, name: str, module: str, *arguments: str, deadline_s: float, log_name: str = "") -> None:
        """Starts a process and waits until it has done its work."""
        child = self.start(name, module, *arguments, log_name=log_name)
        self.watch(until=lambda: child.ended, may_end=[child], deadline_s=deadline_s)

    def watch(
        self,
        *,
        until: Callable[[], bool],
        may_end: Sequence[Child],
        deadline_s: float,
        every: Callable[[], object] = lambda: None,
        sign_of_life: Callable[[], object] = lambda: None,
    ) -> None:
        """Blocks until the condition holds, calling `every` now and then.

        The deadline counts from the last change of `sign_of_life`. RunFailed when a process fails, when one that is
        not in `may_end` ends at all, or at the deadline.
        """
        life, since = sign_of_life(), time.monotonic()
        while True:
            done = until()
            self._raise_failed({child.name for child in may_end})
            if done:
                return
            if (now := sign_of_life()) != life:
                life, since = now, time.monotonic()
            if time.monotonic() > since + deadline_s:
                running = [child.name for child in may_end if not child.ended]
                raise RunFailed(f"the launcher waited {deadline_s:g} s for {', '.join(running)} to go on or to end")
            every()
            self._note()
            time.sleep(POLL_S)

    def _raise_failed(self, may_end: set[str]) -> None:
        """A process that may end, and did so in order, may stay ended from then on."""
        ended = [child for child in self._children if child.ended]
        in_order = {child.name for child in ended if child.process is not None and child.process.returncode == 0}
        self._expected |= in_order & may_end
        failed = [child for child in ended if child.name not in self._expected]
        if failed:
            raise RunFailed("; ".join(child.last_words() for child in failed))

    def _note(self) -> None:
        if time.monotonic() - self._noted > NOTE_EVERY_S:
            self._noted = time.monotonic()
            if self._owner.note_segments():
                self._owner.write(self._folder)


def before_program(parent: int, nice: int) -> Callable[[], None]:
    """Runs in the child before its program: the kernel kills it when the thread that started it ends."""
    libc = ctypes.CDLL(None)

    def ask() -> None:
        os.nice(nice)
        # Linux schedules sessions against each other first, and inside one by niceness; each child leads its own.
        if nice and os.access(AUTOGROUP, os.W_OK):
            AUTOGROUP.write_text(str(nice))
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return ask
