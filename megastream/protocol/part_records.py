"""The records of gates that commit in parts, and what all records share. `records.py` says who writes which."""

from __future__ import annotations

import msgspec

from megastream.protocol.mix import Gate


class TaggedRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record"):
    """Every record names its kind."""


class RankCommit(msgspec.Struct, frozen=True):
    """One rank's part of a commit. `stall_s`: the worker's time in the call, which on a GPU only enqueues copies."""

    rank: int
    ok: bool
    stall_s: float
    step: int
    error: str = ""


class UnitsSealed(TaggedRecord, frozen=True, kw_only=True, tag="units_sealed"):
    """`units` are complete and prepared on this rank. Said once for each, in whatever order they arrive."""

    attachment: str
    incarnation: int
    version: int
    attempt: int
    rank: int
    plan_digest: str
    units: tuple[str, ...]


class PartCommitted(TaggedRecord, frozen=True, kw_only=True, tag="part_committed"):
    """`label` stamps tokens from here on. Units of earlier parts of `version` are ahead too, see protocol/mix.py."""

    attachment: str
    incarnation: int
    version: int
    units: tuple[str, ...]
    label: str
    ranks: tuple[RankCommit, ...]
    visible_unix_s: float


class Mixed(TaggedRecord, frozen=True, kw_only=True, tag="mixed"):
    """The engine serves `label`, and nothing but a whole version is committed next. Said once for a version."""

    attachment: str
    version: int
    label: str
    reason: str


class Pull(TaggedRecord, frozen=True, kw_only=True, tag="pull"):
    """Asks for the units of (version, attempt) that its ranks do not stage: their commit is about to take them."""

    attachment: str
    incarnation: int
    version: int
    attempt: int


class SetGate(TaggedRecord, frozen=True, kw_only=True, tag="set_gate"):
    engine: str
    gate: str
    request: str
    """Names this request; its answer repeats it."""


class GateSet(TaggedRecord, frozen=True, kw_only=True, tag="gate_set"):
    engine: str
    request: str
    gate: Gate
    """The gate that holds now."""
    error: str = ""
