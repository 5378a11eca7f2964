"""Newest wins, whatever arrives in whatever order; and machines that are broken on purpose are found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from megastream.protocol.part_records import UnitsSealed
from megastream.protocol.staging import Key
from tests.helpers.newest_wins import NewestWins
from tests.helpers.plans import PARTS

TestNewestWins = NewestWins.TestCase
TestNewestWins.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)


class Backwards(NewestWins):
    """Broken: a version that was overtaken is still committed."""

    def begin(self, terms: Any) -> None:
        super().begin(terms)
        self.table.next_commit = lambda: self.oldest_ready()  # type: ignore[method-assign]

    def oldest_ready(self) -> Key | None:
        ready = [n for n in range(self.version + 1) if self.table.is_ready(n)]
        return self.table._key(min(ready)) if ready and self.table.in_flight is None else None


class Early(NewestWins):
    """Broken: a unit counts as sealed everywhere when the first rank says so."""

    def tell(self, record: Any) -> None:
        super().tell(record)
        if isinstance(record, UnitsSealed):
            for unit in record.units:
                for rank in PARTS[unit]:
                    super().tell(msgspec.structs.replace(record, rank=rank, units=(unit,)))


class Leaking(NewestWins):
    """Broken: what was overtaken stays in staging."""

    def begin(self, terms: Any) -> None:
        super().begin(terms)
        for rank in self.ranks:
            rank.staging._drop = lambda key: None  # type: ignore[method-assign]


class Forgetful(NewestWins):
    """Broken: the last commit of an open version writes only the units that are missing, also when a part failed."""

    def begin_commit(self, key: Key, part: tuple[str, ...]) -> None:
        ahead = self.table.mix.ahead if self.table.mix else ()
        super().begin_commit(key, part)
        if not part:
            self.units_to_write = tuple(unit for unit in PARTS if unit not in ahead)


class Hasty(NewestWins):
    """Broken: ranks forget what the trainer took back as soon as it says so, and not behind a commit of a part."""

    def withdraw(self, manifest: Any) -> None:
        super().withdraw(manifest)
        for rank in self.ranks:
            rank.staging.withdrawn(manifest.version, manifest.attempt)


class Splitting(NewestWins):
    """Broken: units become live apart that a rank has prepared together, because its gate was another one."""

    def begin(self, terms: Any) -> None:
        super().begin(terms)
        self.table._splits = lambda key, units: False  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "broken",
    [
        Leaking,
        *(pytest.param(machine, marks=pytest.mark.full) for machine in (Backwards, Early, Forgetful, Hasty, Splitting)),
    ],
)
def test_the_machine_finds_what_is_broken(broken: type[NewestWins]) -> None:
    search = settings(
        max_examples=2000,
        stateful_step_count=60,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        derandomize=True,  # a search at random missed one of them once
    )
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_state_machine_as_test(broken, settings=search)
