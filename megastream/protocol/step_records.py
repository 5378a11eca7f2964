"""Records by which the ranks of a trainer agree who takes a version. `protocol/records.py` says who writes them."""

from __future__ import annotations

from megastream.protocol.part_records import TaggedRecord


class Connected(TaggedRecord, frozen=True, kw_only=True, tag="connected"):
    attachment: str
    rank: int


class Waiting(TaggedRecord, frozen=True, kw_only=True, tag="waiting"):
    incarnation: int
    version: int
    rank: int


class TakenBack(TaggedRecord, frozen=True, kw_only=True, tag="taken_back"):
    """Nothing of (version, attempt) follows from this rank; `lagging` attachments still have some of it on a lane."""

    incarnation: int
    version: int
    attempt: int
    rank: int
    lagging: tuple[str, ...] = ()


class UnderWay(TaggedRecord, frozen=True, kw_only=True, tag="under_way"):
    """Whoever waits for something that comes behind (version, attempt) begins to wait anew."""

    attachment: str
    incarnation: int
    version: int
    attempt: int
    rank: int


class Opened(TaggedRecord, frozen=True, kw_only=True, tag="opened"):
    """Who takes `version`, decided once for all trainer ranks. The names are those of attachments.

    `joins` get the version before it, whole, as a new attempt, before any weight changes. An `attempt` above 0 follows
    one that every rank has taken back. With `last` no version is opened: training is at its end, and `joins` are those
    that do not have its last version.
    """

    incarnation: int
    version: int
    attempt: int = 0
    takes: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    last: bool = False


class Withdrawn(TaggedRecord, frozen=True, kw_only=True, tag="withdrawn"):
    """Also of a version that was accepted. Engine ranks forget what arrived of it once the core tells them to: the
    commit of a part of it may be under way."""

    attachment: str
    incarnation: int
    version: int
    attempt: int
