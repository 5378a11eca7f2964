"""ControlLog on redis streams: one stream per run, read by remembered ids.

The server must know streams and Lua; tested with Valkey 9.1.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from megastream.control.login import login_arguments, split_login
from megastream.control.scripts import APPEND, KEEP, SEEN
from megastream.control.standing import Standing, seen_name
from megastream.protocol.bounds import MOST_NUMBER
from megastream.protocol.control import ControlError
from megastream.protocol.records import Record, WeightsReady

KEEP_S = 24 * 3600
"""The server forgets a run this many seconds after the last of its processes went."""
KEEP_RECORDS = 65536  # about so many, then the oldest are forgotten
_KEEP_EVERY_S = 1.0
_BLOCK_SLICE_S = 0.5  # the longest the server is asked to block, so that close() is noticed
_SOCKET_TIMEOUT_S = 5.0  # a server that does not answer for so long counts as away
_BATCH = 512
_ID = re.compile(r"\d+(-\d+)?")
_NUMBER_DIGITS = 19  # a longer one is no number of ours
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")

logger = logging.getLogger(__name__)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one stream entry holds, as JSON. Nothing that a peer sends is ever unpickled or evaluated."""

    run_id: str
    record: Record


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Message)


class RedisLog:
    """One connection to the control plane of one run; see protocol.control.ControlLog. Threads may share it.

    Raises ControlError at once when the server cannot be reached now. Later every call reconnects with growing pauses
    for `reconnect_s` seconds, counted from the first failure, then raises ControlError; `read` gives the turn back
    after its own `block_s` also while the server is away.

    A server that lost its data (restart, FLUSHALL) keeps the order of incarnations and versions: every open log
    restores the highest ones it has seen, and its own blobs and standing records (protocol.records.STANDING). Lost
    records are reported in the log of the process.
    About `keep_records` records are kept, the oldest forgotten; standing ones are written again before that.
    """

    def __init__(self, url: str, run_id: str, *, reconnect_s: float, keep_records: int = KEEP_RECORDS) -> None:
        if not _RUN_ID.fullmatch(run_id):
            raise ValueError(f"run id {run_id!r}: use 1 to 100 letters, digits, dots, dashes and underscores")
        if not 0 <= reconnect_s < float("inf"):
            raise ValueError(f"reconnect_s must be at least 0 and finite, got {reconnect_s}")
        self.run_id = run_id
        self.url = split_login(url)[0]
        self._reconnect_s, self._keep_records = reconnect_s, keep_records
        self._client: Any = _client(url, self.url)
        prefix = f"megastream:{run_id}"
        self._keys = [f"{prefix}:log", f"{prefix}:state", f"{prefix}:blobs"]
        self._append, self._keep = self._client.register_script(APPEND), self._client.register_script(KEEP)
        self._seen = self._client.register_script(SEEN)
        self._standing, self._is_kept = Standing(), False
        self._writer, self._turn, self._append_lock = secrets.token_hex(8), 0, threading.Lock()
        self._away_since: float | None = None
        self._kept = 0.0
        self._floor = {"incarnation": 0, "version": -1}
        self._read_up_to: dict[str, tuple[str, int]] = {"0": ("0", 0)}
        self._closed = threading.Event()
        try:
            self._client.ping()
        except redis.RedisError as error:
            self.close()
            raise ControlError(
                f"control plane at {self.url}: cannot connect ({error}); start the server or correct the URL"
            ) from error

    def append(self, record: Record) -> str:
        """Adds a record exactly once, also when a reply is lost on the way; returns its id."""
        message = _encoder.encode(_Message(self.run_id, record))
        with self._append_lock:
            self._turn += 1
            arguments: list[Any] = [self._writer, self._turn, message, KEEP_S, self._keep_records]
            entry, number = self._call("append", lambda: self._append(self._keys, arguments))
        self._standing.note_record(record, int(number))
        return str(entry.decode())

    def read(self, after: str, block_s: float) -> list[tuple[str, Record]]:
        """Records behind id `after`, waiting at most `block_s` seconds for the first one; foreign ones left out."""
        if not _ID.fullmatch(after):
            raise ValueError(f"read after {after!r}: give the id of a record, or 0 for the beginning; never $")
        until = time.monotonic() + block_s
        behind, number = self._read_up_to.get(after, (after, -1))
        while True:
            entries = self._next(behind, until)
            records = []
            for entry, fields in entries:
                number = self._check_number(fields, number, entry)
                record = self._decode(entry, fields)
                if record is not None:
                    records.append((entry, record))
            if entries:
                # What was refused is not read again: the next call comes with the id of the last good record.
                behind = entries[-1][0]
                if records and after != "0":
                    self._read_up_to.pop(after, None)
                self._read_up_to[records[-1][0] if records else after] = (behind, number)
            if records or time.monotonic() >= until:
                return records

    def put_blob(self, name: str, data: bytes) -> None:
        self._call(f"put blob {name}", lambda: self._client.hset(self._keys[2], name, data))
        self._standing.note_blob(name, data)
        self._keep_alive(now=True)

    def get_blob(self, name: str) -> bytes | None:
        data: bytes | None = self._call(f"get blob {name}", lambda: self._client.hget(self._keys[2], name))
        self._keep_alive()
        return data

    def next_incarnation(self) -> int:
        number = int(self._call("next incarnation", lambda: self._client.hincrby(self._keys[1], "incarnation", 1)))
        self._learn("incarnation", number)
        self._keep_alive(now=True)
        return number

    def highest_version(self) -> int:
        found = self._call("highest version", lambda: self._client.hget(self._keys[1], "version"))
        self._learn("version", -1 if found is None else int(found))
        return self._floor["version"]

    def raise_version(self, version: int) -> None:
        self._learn("version", version)
        self._keep_alive(now=True)

    def silent_s(self, engine: str, rank: int) -> float | None:
        seconds = int(self._call("look for an engine", lambda: self._seen(self._keys, [seen_name(engine, rank)])))
        return None if seconds < 0 else float(seconds)

    @property
    def away_s(self) -> float:
        """Seconds since the server was last reached when it is away, 0.0 when it answers."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Ends waiting calls of other threads with ControlError within a second. Idempotent."""
        self._closed.set()
        self._client.connection_pool.disconnect(inuse_connections=False)

    def _call(self, doing: str, operation: Callable[[], Any], until: float | None = None) -> Any:
        """Runs `operation`, reconnecting. None when `until` (time.monotonic) came first."""
        pause = 0.05
        while not self._closed.is_set():
            try:
                result = operation()
                if self._away_since is not None:
                    logger.warning("control plane at %s is back after %.1f s", self.url, self.away_s)
                    self._away_since, self._kept = None, 0.0  # it may have come back empty: look at once
                return result
            except (redis.ConnectionError, redis.TimeoutError) as error:
                self._note_failure(doing, error)
                if until is not None and time.monotonic() + pause >= until:
                    self._closed.wait(max(until - time.monotonic(), 0.0))
                    return None
                self._closed.wait(pause)
                pause = min(2 * pause, 1.0)
            except redis.RedisError as error:
                raise ControlError(f"control plane at {self.url}: {doing} failed: {error}") from error
        self._client.connection_pool.disconnect(inuse_connections=False)
        raise ControlError(f"control plane at {self.url}: {doing}: this connection was closed")

    def _note_failure(self, doing: str, error: redis.RedisError) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            logger.warning("control plane at %s is away (%s); reconnecting", self.url, error)
        elif self.away_s >= self._reconnect_s:
            raise ControlError(
                f"control plane at {self.url}: {doing}: away for {self.away_s:.1f} s, "
                f"the limit is {self._reconnect_s:.1f} s ({error})"
            ) from error

    def _next(self, behind: str, until: float) -> list[tuple[str, dict[bytes, bytes]]]:
        """Entries behind an id, as soon as there are some; empty after `until`."""
        while True:
            reply = self._call(
                "read", lambda: self._client.xread({self._keys[0]: behind}, _BATCH, _block_ms(until)), until
            )
            self._keep_alive(until=until)
            if reply:
                return [(entry.decode(), fields or {}) for entry, fields in reply[0][1]]
            if time.monotonic() >= until:
                return []

    def _decode(self, entry: str, fields: dict[bytes, bytes]) -> Record | None:
        """The record, or None, with a line in the log, for whatever is not a record of this run."""
        try:
            message = _decoder.decode(fields[b"message"])
        except KeyError:
            logger.warning("control plane at %s: entry %s has no message, refused", self.url, entry)
            return None
        except (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError) as error:
            logger.warning("control plane at %s: entry %s is no record, refused: %s", self.url, entry, error)
            return None
        if message.run_id != self.run_id:
            logger.warning(
                "control plane at %s: entry %s is of run %s, refused by run %s",
                self.url, entry, message.run_id, self.run_id,
            )  # fmt: skip
            return None
        if isinstance(message.record, WeightsReady):
            self._learn("version", message.record.version)
        self._learn("incarnation", getattr(message.record, "incarnation", 0))
        return message.record

    def _check_number(self, fields: dict[bytes, bytes], last: int, entry: str) -> int:
        """The entry's number; gaps are reported. An entry without one was not written by us."""
        text = fields.get(b"number", b"")
        if not text.isdigit() or len(text) > _NUMBER_DIGITS:
            return last
        number = int(text)
        if last >= 0 and number > last + 1:
            logger.warning(
                "control plane at %s: records %d to %d of run %s were trimmed before they were read",
                self.url, last + 1, number - 1, self.run_id,
            )  # fmt: skip
        elif 0 < number <= last:
            logger.warning("control plane at %s lost its data; entry %s is record %d again", self.url, entry, number)
        return number

    def _learn(self, name: str, value: int) -> None:
        if value <= MOST_NUMBER:  # a number that nobody can count on from there is nobody's
            self._floor[name] = max(self._floor[name], value)

    def _keep_alive(self, *, now: bool = False, until: float | None = None) -> None:
        """About once a second: keeps the run's keys from expiring and restores what a server may have lost."""
        if not now and time.monotonic() - self._kept < _KEEP_EVERY_S:
            return
        self._kept = time.monotonic()
        floors = [part for pair in self._floor.items() for part in pair]
        arguments = [KEEP_S, *floors, self._writer, self._standing.name]
        answer = self._call("keep alive", lambda: self._keep(self._keys, arguments), until)
        if answer is not None and answer[0] == 0:
            self._restore(until)
        elif answer is not None:  # what the server will soon forget
            for record in self._standing.records_before(int(answer[1]) - self._keep_records // 2):
                self.append(record)

    def _restore(self, until: float | None) -> None:
        """Puts back what this connection has published when it was there before and is not any more."""
        records, blobs = (self._standing.records, self._standing.blobs) if self._is_kept else ([], {})
        if blobs and self._call("restore", lambda: self._client.hset(self._keys[2], mapping=blobs), until) is None:
            return
        for record in records:
            self.append(record)
        if self._call("restore", lambda: self._client.hset(self._keys[1], f"kept:{self._writer}", 1), until) is None:
            return
        if records or blobs:
            logger.warning(
                "control plane at %s lost its data; put back %d blobs and %d standing records of this process",
                self.url, len(blobs), len(records),
            )  # fmt: skip
        self._is_kept = True


def _block_ms(until: float) -> int | None:
    """How long the server may block this time. None is not at all; 0 would be for ever."""
    slice_ms = int(1000 * min(_BLOCK_SLICE_S, until - time.monotonic()))
    return slice_ms if slice_ms > 0 else None


def _client(url: str, shown: str) -> redis.Redis:
    try:
        return redis.Redis.from_url(
            url,
            **login_arguments(),
            protocol=2,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ControlError(f"control plane at {shown}: not a usable URL ({error}); use redis:// or unix://") from error
