"""Records of the control plane. Tagged msgspec structs, JSON on the wire; `run_id` is added by the log itself.

Who writes what, in the order of a run:

    engine rank     EngineReady       "I am up, my layouts lie under this blob"
    trainer rank    TrainerReady      "my layout lies under this blob"
    trainer rank 0  Attach            "attachment A binds incarnation I to engine E, these are the terms"
    everybody       Bound             "I built the plan of A; its digest; (engine ranks) my lane addresses"
    trainer rank 0  LanesOpen         "all digests are equal: open the lanes"
    trainer rank    Connected         "my lanes of A are open" (engines that come late: training goes on meanwhile)
    engine rank     Compared          "version `base` arrived; so many of my tensors differ from what is live"
    engine core     Attached          "A is live" or why not
    trainer rank    Waiting           "I am about to change my weights for V, and nobody has said who takes it"
    trainer rank 0  Opened            "these attachments take V; those join, and get the version before it first"; or:
                                      "every rank has taken (V, attempt) back, and these take the next attempt"
    trainer rank    TakenBack         "(V, attempt) does not count; these attachments still have some of it on a lane"
    trainer rank    UnderWay          "the engine still acknowledges pieces of (V, attempt)": so long nobody gives it up
    trainer rank    Emitted           "my pieces of (V, attempt) are all out", or as many as will come
    trainer rank 0  Accepted          "(V, attempt) is decided: the step counts"
    trainer rank 0  WeightsReady      the manifest of V
    trainer rank 0  Withdrawn         in its place: "some rank took V back, it never becomes whole here"
    engine rank     UnitsSealed       "these units of (V, attempt) are, the others not yet" (gates that commit in parts)
    engine rank     Sealed            "all planned elements of (V, attempt) are in and checked"
    engine rank     Loaded            "my whole-model load of V took so long" (gate `pause` only)
    engine core     Pull              "the commit of (V, attempt) begins: send what is not staged"
    engine core     Committed         "V is live on every rank" (gate `pause`: written by the host that paused)
    engine core     PartCommitted     "these units of V are live on every rank, others are not yet"
    engine core     Mixed             "part of V is live, and the rest does not follow"
    engine core     Poisoned          "some rank could not commit V", and what follows
    trainer rank 0  TrainingFinished  ends the attachment; consumers stop at this and nothing else
    engine core     Detached          answers TrainingFinished or Failed: no commit of the attachment is under way
    anyone          Failed            "I cannot go on", with the reason; all waits on this attachment end

    a host          SetGate           "commit by this gate from now on"; belongs to no attachment
    engine core     GateSet           the answer, with the reason when the engine stays at the gate it had
"""

from __future__ import annotations

from typing import Literal

from megastream.protocol.header import Encoding
from megastream.protocol.lane import LaneAddress
from megastream.protocol.part_records import GateSet, Mixed, PartCommitted, Pull, SetGate, UnitsSealed
from megastream.protocol.part_records import RankCommit as RankCommit
from megastream.protocol.part_records import TaggedRecord as _Record
from megastream.protocol.step_records import Connected, Opened, TakenBack, UnderWay, Waiting, Withdrawn

PlanKind = Literal["stream", "whole"]
"""`stream`: engine buffers in the loader layout, written in place. `whole`: full tensors for vLLM's own loader."""

PROTOCOL = 1
"""One higher whenever records, headers or plans come to mean something else. Both sides must have the same."""

Who = Literal["trainer", "engine", "core"]


class EngineReady(_Record, frozen=True, kw_only=True, tag="engine_ready"):
    """`engine` names one engine start (a restart is a new name). Blobs: `engine/<engine>/<rank>/<plan kind>`."""

    engine: str
    rank: int
    world_size: int
    library: str
    protocol: int = PROTOCOL


class TrainerReady(_Record, frozen=True, kw_only=True, tag="trainer_ready"):
    """Blob: `trainer/<incarnation>/<rank>`."""

    incarnation: int
    rank: int
    world_size: int
    library: str
    protocol: int = PROTOCOL


class Attach(_Record, frozen=True, kw_only=True, tag="attach"):
    attachment: str
    incarnation: int
    engine: str
    kind: PlanKind
    family: str
    """Name of the model family's table, e.g. "qwen3_moe"."""
    base_version: int
    """The first version; a late joiner's is this or the first newer one that is whole on it."""
    trainer_world_size: int
    finality: str
    piece_bytes: int
    experts_per_unit: int
    train_step: int
    late_joiner: bool = False
    """The engine comes while training goes on: the base version is one that others may have taken already."""
    over: int = -1
    """Overlays: this attachment's versions have the tensors that the trainer's layouts name, and all else stays as it
    is in this version, which is live. -1: they have every tensor."""
    protocol: int = PROTOCOL
    # Refused by name when they differ from these defaults (protocol/terms.py): reserved for later.
    membership_epoch: int = 0
    namespace: str = "base"
    encoding: Encoding = "dense"
    transfer: Literal["push", "pull"] = "push"
    replicas: tuple[str, ...] = ()
    """Further engines that take the same pieces from the same lanes."""
    commit_step: int = -1
    """Engine step at which several cores commit together."""


class Bound(_Record, frozen=True, kw_only=True, tag="bound"):
    """Blob of engine rank 0: `units/<attachment>`, see bind.EngineUnits."""

    attachment: str
    side: Who
    rank: int
    digest: str
    addresses: dict[int, LaneAddress] = {}
    """Engine ranks only: one address per trainer rank that sends to this rank."""
    units: tuple[str, ...] = ()
    """Engine ranks only: the plan's units of which this rank holds a part."""
    pulled: tuple[str, ...] = ()
    """Engine ranks only: those of them that this rank does not stage. They are sent when its commit asks for them."""


class LanesOpen(_Record, frozen=True, kw_only=True, tag="lanes_open"):
    attachment: str
    digest: str


class Compared(_Record, frozen=True, kw_only=True, tag="compared"):
    attachment: str
    rank: int
    tensors: int
    differing: int
    first: str = ""


class Attached(_Record, frozen=True, kw_only=True, tag="attached"):
    attachment: str
    engine: str
    version: int
    replaced: bool
    """True when the live weights differed and `version` was put over them (a later incarnation, or kind whole)."""


class Emitted(_Record, frozen=True, kw_only=True, tag="emitted"):
    attachment: str
    incarnation: int
    version: int
    attempt: int
    rank: int
    pieces: int
    payload_bytes: int
    wire_bytes: int
    elements: int
    wait_s: float
    withdrawn: bool = False
    """This rank took the version back before all of its pieces were packed."""


class Accepted(_Record, frozen=True, kw_only=True, tag="accepted"):
    attachment: str
    incarnation: int
    version: int
    attempt: int
    train_step: int


class WeightsReady(_Record, frozen=True, kw_only=True, tag="weights_ready"):
    """The manifest: version V is complete for the plan. Assembled from every source rank's Emitted."""

    attachment: str
    incarnation: int
    version: int
    attempt: int
    train_step: int
    plan_digest: str
    units: tuple[str, ...]
    elements: int


class Sealed(_Record, frozen=True, kw_only=True, tag="sealed"):
    attachment: str
    incarnation: int
    version: int
    attempt: int
    rank: int
    plan_digest: str
    elements: int
    prepare_s: float


class Committed(_Record, frozen=True, kw_only=True, tag="committed"):
    attachment: str
    incarnation: int
    version: int
    ranks: tuple[RankCommit, ...]
    visible_unix_s: float
    stall_s: float | None = None
    """How long the engine stood for a paused whole update; None where the ranks' own commits say it."""


class Poisoned(_Record, frozen=True, kw_only=True, tag="poisoned"):
    engine: str
    version: int
    reason: str
    part: bool = False
    """Only a part of the version was to become live: the version itself, whole, still heals the engine."""


class TrainingFinished(_Record, frozen=True, kw_only=True, tag="training_finished"):
    attachment: str
    incarnation: int
    version: int
    reason: str


class Loaded(_Record, frozen=True, kw_only=True, tag="loaded"):
    attachment: str
    version: int
    rank: int
    load_s: float
    """Receiving and vLLM's own reload, without `repair_s`."""
    repair_s: float
    """What only this platform's reload needs afterwards."""


class Detached(_Record, frozen=True, kw_only=True, tag="detached"):
    attachment: str
    engine: str


class Failed(_Record, frozen=True, kw_only=True, tag="failed"):
    attachment: str
    side: Who
    rank: int
    reason: str
    incarnation: int = 0
    """Of a trainer that ends as a whole, with all its attachments; 0 where only this attachment does."""


STANDING = (EngineReady, TrainerReady, Detached)
"""What holds for as long as its writer lives. A log whose server lost its data writes the newest of each again, so a
reader may meet them twice."""

Record = (
    EngineReady
    | TrainerReady
    | Attach
    | Bound
    | LanesOpen
    | Connected
    | Compared
    | Attached
    | Waiting
    | Opened
    | TakenBack
    | UnderWay
    | Emitted
    | Accepted
    | WeightsReady
    | Withdrawn
    | UnitsSealed
    | Sealed
    | Loaded
    | Pull
    | PartCommitted
    | Committed
    | Mixed
    | Poisoned
    | TrainingFinished
    | Detached
    | Failed
    | SetGate
    | GateSet
)
