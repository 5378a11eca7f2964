"""Who takes the next version: trainer rank 0 decides it from the log, for all ranks. No threads, clocks or bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megastream.protocol.book import TrainerBook
from megastream.protocol.step_records import Opened


class Roster:
    """`books` are those of the incarnation's attachments by name, kept by the journal; they are only read here."""

    def __init__(self, incarnation: int, books: Mapping[str, TrainerBook]) -> None:
        self._incarnation, self._books = incarnation, books
        self._sent: dict[str, tuple[int, int]] = {}
        """The (version, attempt) whose pieces went towards each attachment last, accepted or not."""
        self._accepted: dict[str, int] = {}
        """The newest version that was accepted for each."""
        self._lagging: set[str] = set()
        """Those that were waited for in vain: nobody waits for them again before they have settled."""

    def note_sent(self, name: str, version: int, attempt: int) -> None:
        """The pieces of a version that counts are leaving for this attachment."""
        self._sent[name], self._accepted[name] = (version, attempt), version

    def unsettled(self) -> list[str]:
        """Attachments that still have pieces of the version that they were sent last on their lanes."""
        return [name for name, book in self._alive() if not self._is_settled(name, book)]

    def worth_waiting_for(self) -> list[str]:
        """Unsettled ones whose time is not yet up."""
        return [name for name in self.unsettled() if name not in self._lagging]

    def open(self, version: int) -> Opened:
        """What settled takes the version, what does not skips it; who is connected and has nothing whole joins."""
        self._lagging = set(self.unsettled())
        settled = [(name, book) for name, book in self._alive() if name not in self._lagging]
        return Opened(
            incarnation=self._incarnation,
            version=version,
            takes=tuple(name for name, book in settled if book.attached is not None),
            joins=tuple(name for name, book in settled if book.is_connected and book.whole_version < 0),
        )

    def reopen(self, before: Opened, lagging: Collection[str]) -> Opened:
        """Every rank has taken `before` back: who still has some of it on a lane skips the version, the others go on.

        Nobody waits again for the former until they have settled.
        """
        alive = dict(self._alive())
        for name in lagging:
            self._sent[name] = before.version, before.attempt
        self._lagging |= set(lagging)
        return Opened(
            incarnation=self._incarnation,
            version=before.version,
            attempt=before.attempt + 1,
            takes=tuple(name for name in before.takes if name in alive and name not in lagging),
        )

    def last(self, version: int) -> Opened:
        """`version` was the last: who skipped it, or came late, gets it now. What was withdrawn is not sent twice."""
        behind = [
            name
            for name, book in self._alive()
            if (book.attached is not None or book.is_connected) and self._accepted.get(name, -1) < version
        ]
        return Opened(incarnation=self._incarnation, version=version + 1, joins=tuple(behind), last=True)

    def engines(self) -> list[str]:
        """Engines that are attached."""
        return [book.engine for _, book in self._alive() if book.attached is not None]

    def _alive(self) -> list[tuple[str, TrainerBook]]:
        return [(name, book) for name, book in self._books.items() if not book.is_over]

    def _is_settled(self, name: str, book: TrainerBook) -> bool:
        return book.settled >= self._sent.get(name, (-1, -1))
