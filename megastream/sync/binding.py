"""How a trainer rank comes from nothing to open lanes: announce, attach, agree on the plan, connect."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch

from megastream.families.family import Family
from megastream.layout.shard import RankLayout
from megastream.plan.types import Piece, Plan
from megastream.protocol.bind import PlanShelf, plan_of, put_layout, trainer_blob
from megastream.protocol.book import TrainerBook
from megastream.protocol.bounds import MOST_NUMBER
from megastream.protocol.control import ControlError, ControlLog
from megastream.protocol.header import PieceHeader
from megastream.protocol.journal import Journal, SyncError
from megastream.protocol.lane import SendLane
from megastream.protocol.records import Attach, Bound, LanesOpen, PlanKind, TrainerReady
from megastream.protocol.terms import ProtocolError
from megastream.sync.feed import Feed
from megastream.sync.reading import is_here
from megastream.trainer.emit import Emitter
from megastream.trainer.outgoing import MakeHeader
from megastream.trainer.pulled import PullEmitter
from megastream.trainer.settings import TrainerSettings
from megastream.transport.lanes import connect

_POLL_S = 0.05
GRACE_S = 2.0
"""How much longer the other ranks wait for rank 0 than it waits itself: its word at its deadline says more."""
_SILENT_S = 5.0
"""An engine rank stands on the control plane about once a second; after so long without, it is called away."""


class TrainerModel(Protocol):
    """What TrainerSync needs of a trainer rank; `trainer.adapter.MegatronAdapter` is one."""

    library: str
    family: Family

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Live flat tensors by bucket name, in the order in which they become final."""

    def describe(self) -> RankLayout:
        """This rank's layout over those buffers."""


class Binder:
    """The steps of one rank, in this order. Each blocks until it is done or its deadline has passed.

    `feed` may run in several threads, for different attachments.
    """

    def __init__(
        self, log: ControlLog, trainer: TrainerModel, settings: TrainerSettings, *, rank: int, world_size: int
    ) -> None:
        self._log, self._trainer, self._settings = log, trainer, settings
        self._rank, self.world_size = rank, world_size
        self._plans = PlanShelf()

    def announce(self) -> Journal:
        """Publishes this rank's layout; returns the journal that follows this incarnation."""
        incarnation = self._incarnation()
        put_layout(self._log, trainer_blob(incarnation, self._rank), self._trainer.describe())
        strict = not self._settings.late_joiners
        journal = Journal(self._log, f"trainer rank {self._rank}", incarnation, strict=strict)
        journal.start()
        self._log.append(
            TrainerReady(
                incarnation=incarnation, rank=self._rank, world_size=self.world_size, library=self._trainer.library
            )
        )
        return journal

    def post_attaches(
        self, journal: Journal, kind: PlanKind, base_version: int | None, train_step: int, over: int
    ) -> None:
        """Rank 0: waits until engines and all trainer ranks are up, then says what is to be attached."""
        settings = self._settings
        journal.wait(
            lambda: not journal.missing_trainers(self.world_size),
            settings.ready_s,
            lambda: f"{', '.join(journal.missing_trainers(self.world_size))} to come up",
        )
        some = "an engine" if settings.engines == 1 else f"{settings.engines} engines"
        engines = journal.wait(
            lambda: journal.ready_engines(settings.engine, settings.engines),
            settings.ready_s,
            lambda: f"all ranks of {'engine ' + settings.engine if settings.engine else some} to come up",
        )
        highest = self._log.highest_version()
        base = max(highest, over) + 1 if base_version is None else base_version
        if not 0 <= base <= MOST_NUMBER:
            raise ValueError(f"base version must be 0 to {MOST_NUMBER}, got {base}; leave base_version out")
        if journal.incarnation > 1 and base <= highest:
            raise ValueError(
                f"base version {base} of incarnation {journal.incarnation}: versions up to {highest} were published "
                f"before, and none is used twice; leave base_version out"
            )
        for number, engine in enumerate(engines):
            self._log.append(self.attach_record(journal, number, engine, base, train_step, kind=kind, over=over))

    def attach_record(
        self,
        journal: Journal,
        number: int,
        engine: str,
        base: int,
        train_step: int,
        *,
        kind: PlanKind = "stream",
        late: bool = False,
        over: int = -1,
    ) -> Attach:
        """The terms of attachment `number` of this incarnation."""
        settings = self._settings
        return Attach(
            attachment=journal.name(number),
            incarnation=journal.incarnation,
            engine=engine,
            kind=kind,
            family=self._trainer.family.name,
            base_version=base,
            trainer_world_size=self.world_size,
            finality=settings.finality,
            piece_bytes=settings.piece_bytes,
            experts_per_unit=settings.experts_per_unit,
            train_step=train_step,
            late_joiner=late,
            over=over,
        )

    def feed(self, journal: Journal, attach: Attach) -> Feed:
        """Agrees on the plan with all ranks of both sides and connects to every engine rank that this rank sends to.

        Blocks. Raises what `bind`, a lane or the emitter raises; nothing is left open then.
        """
        book = journal.books[attach.attachment]
        plan = self.bind(journal, attach, book)
        emitter, pulled = self.open_lanes(attach, plan, book)
        return Feed(self._log, journal, attach, plan, emitter, self._settings, self._rank, pulled)

    def bind(self, journal: Journal, attach: Attach, book: TrainerBook) -> Plan:
        """Builds the plan and waits until every rank of both sides has built the same one."""
        journal.check_alike(attach.engine)
        world_size = journal.engine_world_size(attach.engine)
        plan = plan_of(self._log, attach, world_size, ("trainer", self._rank), self._plans)
        self._log.append(Bound(attachment=attach.attachment, side="trainer", rank=self._rank, digest=plan.digest))
        if self._rank == 0:
            journal.wait(
                lambda: not book.not_bound(),
                self._settings.bind_s,
                lambda: f"{', '.join(book.not_bound())} to build the plan{self._who_is_away(book)}",
                book,
            )
            self._log.append(LanesOpen(attachment=attach.attachment, digest=book.agreed_digest()))
        deadline_s = self._settings.bind_s + GRACE_S
        opened = journal.wait(lambda: book.lanes_open, deadline_s, lambda: "trainer rank 0 to open the lanes", book)
        if opened.digest != plan.digest:
            raise ProtocolError(f"trainer rank {self._rank} built plan {plan.digest}, agreed was {opened.digest}")
        return plan

    def open_lanes(self, attach: Attach, plan: Plan, book: TrainerBook) -> tuple[Emitter, PullEmitter | None]:
        """Connects to every engine rank that this rank sends to. What these pull of it has an emitter of its own."""
        lanes: dict[int, SendLane] = {}
        device = next((bucket.device for bucket in self._trainer.buffers.values()), torch.device("cpu"))
        with ExitStack() as opened:
            for target in sorted({piece.target for piece in plan.by_source.get(self._rank, ())}):
                address = book.bound["engine", target].addresses[self._rank]
                lanes[target] = connect(address, self._settings.bind_s, device)
                opened.callback(lanes[target].close)
            common: dict[str, Any] = {
                "make_header": header_maker(self._log.run_id, attach, plan.digest),
                "slots_per_target": self._settings.slots_per_target,
                "deadline_s": self._settings.transfer_s,
            }
            ours, asked = self._rank, book.pulled
            mine = plan.by_source.get(ours, ())
            away = [piece for piece in mine if piece.unit in asked.get(piece.target, ())]
            pushed = [piece for piece in mine if piece.unit not in asked.get(piece.target, ())]
            emitter = Emitter(plan, ours, self._trainer.buffers, lanes, pieces=pushed, **common)
            opened.callback(emitter.close)
            pulled = PullEmitter(plan, ours, self._trainer.buffers, lanes, pieces=away, **common) if away else None
            opened.pop_all()
        return emitter, pulled

    def is_here(self, journal: Journal, engine: str) -> bool:
        """Every rank of an engine was on the control plane a moment ago: what the log says of it still holds."""
        return is_here(self._log, engine, journal.engine_world_size(engine))

    def _who_is_away(self, book: TrainerBook) -> str:
        """Engine ranks that have not bound because they are not there, as far as the control plane knows."""
        away = []
        with suppress(ControlError):
            for rank in range(book.num_ranks["engine"]):
                silent_s = self._log.silent_s(book.engine, rank)
                if ("engine", rank) not in book.bound and (silent_s is None or silent_s > _SILENT_S):
                    seen = "not there any more" if silent_s is None else f"last seen there {silent_s:.0f} s ago"
                    away.append(f"rank {rank} was {seen}")
        if not away:
            return ""
        return (
            f"; engine {book.engine} is away from the control plane ({', '.join(away)}): it has ended, or cannot reach "
            f"{self._log.url}"
        )

    def _incarnation(self) -> int:
        """Rank 0 draws the number of this start; the others read what it drew."""
        blob = f"launch/{self._settings.launch}"
        if self._rank == 0:
            incarnation = self._log.next_incarnation()
            self._log.put_blob(blob, str(incarnation).encode())
            return incarnation
        deadline = time.monotonic() + self._settings.ready_s
        while (drawn := self._log.get_blob(blob)) is None:
            if time.monotonic() > deadline:
                raise SyncError(
                    f"trainer rank {self._rank} waited {self._settings.ready_s:g} s for trainer rank 0 of launch "
                    f"{self._settings.launch} to come up"
                )
            time.sleep(_POLL_S)
        return int(drawn)


def header_maker(run_id: str, attach: Attach, digest: str) -> MakeHeader:
    def make_header(piece: Piece, version: int, attempt: int, checksum: int) -> PieceHeader:
        return PieceHeader(
            kind="piece",
            run_id=run_id,
            incarnation=attach.incarnation,
            attachment=attach.attachment,
            version=version,
            attempt=attempt,
            unit=piece.unit,
            plan_digest=digest,
            source=piece.source,
            target=piece.target,
            seq=piece.seq,
            num_bytes=piece.num_bytes,
            checksum=checksum,
        )

    return make_header
