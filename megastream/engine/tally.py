"""What the log says about one engine, counted: for whoever watches it. Every number comes from a record of the run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from megastream.protocol.part_records import PartCommitted, RankCommit
from megastream.protocol.records import (
    Attach,
    Attached,
    Committed,
    Detached,
    Failed,
    Record,
    Sealed,
    WeightsReady,
)


@dataclass(slots=True)
class RankTally:
    """One engine rank, since its engine started."""

    staged_version: int = -1
    """The newest version that arrived whole and was checked; -1 before the first."""
    commits: int = 0
    commit_stall_s: float = 0.0
    """Time that its worker spent in commits. On a GPU that only enqueues the copies."""


@dataclass(slots=True)
class EngineTally:
    """`take` every record of the log, in order. Records of other engines change nothing."""

    engine: str
    num_ranks: int
    ranks: dict[int, RankTally] = field(init=False)
    attached: bool = False
    overtaken: int = 0
    """Complete versions that never became live, because a newer one was ready first."""
    refused: int = 0
    """Attachments that ended before they were live: terms, weights or a layout that cannot be."""
    failed: int = 0
    """Attachments that were live and broke."""
    _live: dict[str, bool] = field(default_factory=dict)
    """Whether each attachment of this engine that is not detached is live: a commit of one that has failed may still
    end."""
    _over: set[str] = field(default_factory=set)
    """Those of them that have failed."""
    _complete: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.ranks = {rank: RankTally() for rank in range(self.num_ranks)}

    def take(self, record: Record) -> bool:
        """True when a number may have changed."""
        if isinstance(record, Attach) and record.engine == self.engine:
            self._live[record.attachment] = False
        elif getattr(record, "attachment", None) not in self._live:
            return False
        else:
            self._take_own(record)
        return True

    def _take_own(self, record: Record) -> None:
        match record:
            case Attached() if record.attachment not in self._over:
                self._live[record.attachment] = self.attached = True
                self._goes_live(record)
            case Sealed() if record.rank in self.ranks:
                rank = self.ranks[record.rank]
                rank.staged_version = max(rank.staged_version, record.version)
            case WeightsReady():
                self._complete[record.attachment].add(record.version)
            case Committed():
                self._committed(record)
            case PartCommitted():
                self._stalled(record.ranks)
            case Failed() if record.attachment not in self._over:
                self._failed(record.attachment)
            case Detached():
                self._detached(record.attachment)

    def _committed(self, record: Committed) -> None:
        self._stalled(record.ranks)
        if record.stall_s is not None:  # a paused whole update: all ranks stood
            self._stalled(tuple(RankCommit(rank, True, record.stall_s, -1) for rank in self.ranks))
        self._goes_live(record)

    def _goes_live(self, record: Attached | Committed) -> None:
        """Also without a commit, where the base version is what the engine serves."""
        complete = self._complete[record.attachment]
        self.overtaken += sum(version < record.version for version in complete)
        self._complete[record.attachment] = {version for version in complete if version > record.version}

    def _stalled(self, replies: tuple[RankCommit, ...]) -> None:
        for reply in replies:
            if (rank := self.ranks.get(reply.rank)) is not None:
                rank.commits += 1
                rank.commit_stall_s += reply.stall_s

    def _failed(self, attachment: str) -> None:
        """Several may say so: counted once."""
        was_live = self._live[attachment]
        self._over.add(attachment)
        self._live[attachment] = False
        self.attached = any(self._live.values())
        self.failed += was_live
        self.refused += not was_live

    def _detached(self, attachment: str) -> None:
        del self._live[attachment]
        self._over.discard(attachment)
        self._complete.pop(attachment, None)
        self.attached = any(self._live.values())
