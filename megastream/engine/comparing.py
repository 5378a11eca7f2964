"""The comparison of a base version with the live weights, as the coordinator has it done by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megastream.engine.bond import Bond
from megastream.engine.commits import Commits
from megastream.engine.contract import CorePort
from megastream.engine.gates import Locked, Replies
from megastream.protocol.staging import Key


class Comparing:
    """One per coordinator, under whose lock `start` is called. `failed(bond, why)` when a rank could not compare; each
    that could says so in a Compared record.

    What is pulled comes once. Where it must not be written over other bytes it is compared, when all ranks are through
    with what is staged, so that they take it in the same call; else it is left to the commit.
    """

    def __init__(
        self, core: CorePort, commits: Commits, *, locked: Locked, failed: Callable[[Bond, str], None]
    ) -> None:
        self._core, self._commits, self._locked, self._failed = core, commits, locked, failed

    def start(self, bond: Bond, key: Key) -> None:
        pulls = bond.pulls and not self._commits.is_newer(key.incarnation, key.version)
        bond.is_compared = pulls or not bond.pulls
        self._slice(bond, key, pulls)

    def _slice(self, bond: Bond, key: Key, pulls: bool) -> None:
        def answered(replies: Replies) -> None:
            if not all(reply["done"] for reply in replies):
                self._slice(bond, key, pulls)
            elif pulls:
                self._commits.ask(bond, key)
                self._call(bond, "compare_pulled", {**key._asdict()}, lambda replies: None)

        self._call(bond, "compare", {**key._asdict(), "pulls": pulls}, answered)

    def _call(self, bond: Bond, op: str, payload: dict[str, Any], answered: Callable[[Replies], None]) -> None:
        def under_lock(replies: Replies) -> None:
            errors = [reply["error"] for reply in replies if reply["error"]]
            if bond.failed:
                return
            if errors:
                self._failed(bond, "; ".join(errors))
            else:
                answered(replies)

        named = {"attachment": bond.name, **payload}
        self._core.call_ranks(op, named, lambda replies: self._locked(lambda: under_lock(replies)))
