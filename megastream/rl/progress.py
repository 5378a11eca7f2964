"""What a person sees: the run while it goes on, and its figures at the end."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from megastream.control.redis_log import RedisLog
from megastream.rl.job import Job, LineLog, Pass, passes_of, read_lines
from megastream.rl.versions import Ledger

READ_S = 0.01
REDRAW_S = 0.5
VERSIONS_FILE = "versions.jsonl"

ROWS = (
    ("updates", "updates"),
    ("units", "units"),
    ("bytes of one update", "bytes"),
    ("  fewest possible", "bytes_floor"),
    ("tensors checked", "tensors_checked"),
    ("  differing", "tensors_differing"),
    ("tokens checked", "tokens_checked"),
    ("  of mixed versions", "mixed_tokens"),
    ("  with a wrong label", "mislabelled_tokens"),
    ("stall of one update, ms", "update_stall_ms"),
    ("CPU repair of one update, ms", "repair_ms"),
    ("vLLM's fixed sleep, ms", "pause_sleep_ms"),
    ("longest gap between tokens, ms", "longest_gap_ms"),
    ("  without updates, ms", "longest_gap_without_updates_ms"),
    ("gap between tokens, median, ms", "median_step_ms"),
    ("step final to live, ms", "update_to_visible_ms"),
    ("tokens per second", "tokens_per_s"),
    ("training step, ms", "train_step_ms"),
    ("loss, first", "loss_first"),
    ("loss, last", "loss_last"),
)


class Progress:
    """Follows the control log, draws a table, and writes one JSON line for each version that became live."""

    def __init__(self, job: Job, console: Console | None = None) -> None:
        self._job, self._console = job, console or Console()
        self._passes = passes_of(job.config)
        self.ledger = Ledger([one for one in self._passes if one.mode != "stock"])
        self._lines = LineLog(job.results / VERSIONS_FILE)
        self._log = RedisLog(job.control_url, job.run_id, reconnect_s=job.config.deadlines.reconnect_s)
        self._after, self._drawn, self._begin = "0", 0.0, time.monotonic()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._said: set[str] = set()
        self._handler = RichHandler(console=self._console, show_time=False, show_level=False, show_path=False)

    def __enter__(self) -> Progress:
        if not self._console.is_terminal:
            self._console.print("    0 s  the engine and the trainer ranks start")
        # Warnings go above the table, not into it; what ends the run stays the only line on standard error.
        logging.getLogger("megastream").addHandler(self._handler)
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.__exit__(kind, error, at)
        logging.getLogger("megastream").removeHandler(self._handler)
        self._lines.close()
        self._log.close()

    def update(self) -> None:
        """Takes what is new; redraws now and then. Returns at once."""
        self._read()
        if time.monotonic() - self._drawn > REDRAW_S:
            self._drawn = time.monotonic()
            self._draw()

    def catch_up(self) -> None:
        """Takes everything that the log holds; after the trainer has ended, nothing more comes."""
        while self._read():
            pass

    def _read(self) -> int:
        records = self._log.read(self._after, READ_S)
        for position, record in records:
            self._after = position
            line = self.ledger.take(record)
            if line is not None:
                self._lines.write(**line.as_json())
        return len(records)

    def report(self, summary: dict[str, Any]) -> None:
        """The table of figures of a finished run."""
        modes = [mode for mode in ("stream", "whole") if mode in summary]
        table = Table("", *modes, title="what it took")
        for words, key in ROWS:
            table.add_row(words, *(_figure(summary[mode].get(key)) for mode in modes))
        self._console.print(table)
        same = summary["same_training"]
        self._console.print(
            f"bit for bit the same training in {', '.join(same['passes'])}: losses, norms and final parameters of "
            f"{same['steps']} steps on {same['ranks']} ranks"
        )
        self._console.print(f"results: {self._job.results}")

    def _draw(self) -> None:
        losses = _losses(self._job.results)
        table = Table("pass", "steps", "version", "MiB an update", "stall ms", "loss")
        for one in self._passes:
            table.add_row(*self._row(one, losses.get(one.name, [])))
        doing = "" if losses else "the engine and the trainer ranks start; "
        elapsed = Text(f"{time.monotonic() - self._begin:.0f} s; {doing}logs and results: {self._job.results}")
        self._live.update(Group(table, elapsed), refresh=self._console.is_terminal)
        if not self._console.is_terminal:
            self._say_new_passes(losses)

    def _row(self, one: Pass, losses: list[float]) -> tuple[str, ...]:
        lines = self.ledger.of_pass(one.name)
        last = lines[-1] if lines else None
        return (
            one.name,
            f"{len(losses)} of {one.updates}",
            str(last.version) if last else "",
            f"{last.wire_bytes / 2**20:.1f}" if last else "",
            f"{last.stall_ms:.1f}" if last and last.stall_ms is not None else "",
            f"{losses[-1]:.3f}" if losses else "",
        )

    def _say_new_passes(self, losses: dict[str, list[float]]) -> None:
        """Without a terminal: one line when a pass begins to train, which says how the one before it ended."""
        for one in self._passes:
            if one.name not in losses or one.name in self._said:
                continue
            self._said.add(one.name)
            ended = [self._row(other, losses[other.name]) for other in self._passes if other.name in losses][:-1]
            before = ""
            if ended:
                name, steps, version, mib, stall, loss = ended[-1]
                streamed = f", version {version}, {mib} MiB an update, stall {stall or '-'} ms" if version else ""
                before = f" (before it {name}: {steps} steps{streamed}, loss {loss})"
            self._console.print(
                f"{time.monotonic() - self._begin:5.0f} s  pass {one.name} trains{before}", soft_wrap=True
            )


def _losses(folder: Path) -> dict[str, list[float]]:
    """Pass -> losses so far, from the first rank that has any."""
    for path in sorted(folder.glob("trainer-*.jsonl")):
        steps = [line for line in read_lines(path) if line["kind"] == "step" and line["loss"] is not None]
        if steps:
            losses: dict[str, list[float]] = {}
            for line in steps:
                losses.setdefault(line["name"], []).append(line["loss"])
            return losses
    return {}


def _figure(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if isinstance(value, float) and not value.is_integer() else f"{value:,.0f}"
