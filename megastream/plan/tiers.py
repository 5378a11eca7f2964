"""Where the units of one engine rank wait for their commit: on the device, in host memory, or at the trainer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MOST_BUDGET_BYTES = 1 << 50
"""No budget is larger: a number above it is a mistake."""


@dataclass(frozen=True, slots=True)
class StagingBudget:
    """Bytes that the staging of one engine rank may take, all its sets together. None: as many as it needs.

    What waits on the device is prepared before its commit, which then copies within one memory. What waits in host
    memory (page-locked for a GPU) is brought to the device inside the commit. What fits in neither is pulled: it stays
    with the trainer until the commit asks for it.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("device_bytes", self.device_bytes), ("host_bytes", self.host_bytes)):
            if value is None:
                continue
            if type(value) is not int or not 0 <= value <= MOST_BUDGET_BYTES:
                raise ValueError(
                    f"staging.{name} must be a whole number of bytes, 0 to {MOST_BUDGET_BYTES}, got {value!r}"
                )

    @property
    def is_given(self) -> bool:
        return self.device_bytes is not None or self.host_bytes is not None


@dataclass(frozen=True, slots=True)
class Bundle:
    """Units that share buffers, and so wait in one place: the experts of a layer, or its dense part."""

    units: tuple[str, ...]
    buffers: tuple[str, ...]
    num_bytes: int
    """Of its buffers, whole, in one set."""

    @property
    def bytes_of_a_buffer(self) -> float:
        return self.num_bytes / len(self.buffers)


@dataclass(frozen=True, slots=True)
class Placement:
    """Each bundle of a rank is in one of the three. What fits in neither budget is `pulled`."""

    device: tuple[Bundle, ...]
    host: tuple[Bundle, ...]
    pulled: tuple[Bundle, ...]
    num_sets: int
    budget: StagingBudget

    @property
    def device_bytes(self) -> int:
        """Of all sets, as are the others."""
        return self.num_sets * _bytes(self.device)

    @property
    def host_bytes(self) -> int:
        return self.num_sets * _bytes(self.host)

    @property
    def pulled_bytes(self) -> int:
        """Of one version: nothing of it lies in any set."""
        return _bytes(self.pulled)

    @property
    def pulled_units(self) -> tuple[str, ...]:
        return tuple(unit for bundle in self.pulled for unit in bundle.units)

    @property
    def short_bytes(self) -> int:
        """By so much the host's budget is too small; 0 when everything fits."""
        if not self.pulled:
            return 0
        return self.host_bytes + self.num_sets * _bytes(self.pulled) - (self.budget.host_bytes or 0)

    @property
    def shortage(self) -> str:
        """Why not everything is staged, with numbers and remedy; empty when it is."""
        units = self.pulled_units
        if not units:
            return ""
        more = f" and {len(units) - 3} more" if len(units) > 3 else ""
        return (
            f"staging is {self.short_bytes} bytes short: {self.num_sets} sets take {self.device_bytes} bytes of "
            f"staging.device_bytes={_said(self.budget.device_bytes)} and {self.host_bytes} of "
            f"staging.host_bytes={_said(self.budget.host_bytes)}, and {', '.join(units[:3])}{more} fit in neither; "
            f"raise staging.host_bytes by {self.short_bytes}, or set staging_sets lower"
        )


def bundles_of(pairs: Iterable[tuple[str, str]], num_bytes: Mapping[str, int]) -> tuple[Bundle, ...]:
    """Units with the buffers they lie in, in plan order, as what cannot be told apart; `num_bytes` by buffer."""
    buffers_of: dict[str, dict[str, None]] = {}
    units_of: dict[str, dict[str, None]] = {}
    for unit, buffer in pairs:
        buffers_of.setdefault(unit, {})[buffer] = None
        units_of.setdefault(buffer, {})[unit] = None
    seen: set[str] = set()
    bundles = []
    for unit in buffers_of:
        if unit in seen:
            continue
        units, buffers = _reached(unit, buffers_of, units_of)
        seen.update(units)
        bundles.append(Bundle(units, buffers, sum(num_bytes[buffer] for buffer in buffers)))
    return tuple(bundles)


def place(bundles: Iterable[Bundle], budget: StagingBudget, num_sets: int) -> Placement:
    """What is most worth it is placed first: on the device, else on the host, else pulled. Ties are in given order.

    A byte costs the same in every bundle: it is copied once within the device's memory, or once more over the link
    from the host. What differs is the cost of each copy by itself, so of two bundles the one with the smaller buffers
    gains more per byte. One that does not fit is passed over, and smaller ones behind it may still fit: what is left of
    a budget is less than any bundle that did not get into it.
    """
    device, rest = _fill(sorted(bundles, key=lambda bundle: bundle.bytes_of_a_buffer), budget.device_bytes, num_sets)
    host, pulled = _fill(rest, budget.host_bytes, num_sets)
    return Placement(device, host, pulled, num_sets, budget)


def _fill(
    bundles: Iterable[Bundle], budget_bytes: int | None, num_sets: int
) -> tuple[tuple[Bundle, ...], tuple[Bundle, ...]]:
    """(those that fit one behind the other, the others)."""
    taken, left, used = [], [], 0
    for bundle in bundles:
        total = used + num_sets * bundle.num_bytes
        if budget_bytes is None or total <= budget_bytes:
            taken.append(bundle)
            used = total
        else:
            left.append(bundle)
    return tuple(taken), tuple(left)


def _reached(
    unit: str, buffers_of: Mapping[str, Iterable[str]], units_of: Mapping[str, Iterable[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All units and buffers that hang together with this unit."""
    units: dict[str, None] = {unit: None}
    buffers: dict[str, None] = {}
    todo = [unit]
    while todo:
        for buffer in buffers_of[todo.pop()]:
            if buffer in buffers:
                continue
            buffers[buffer] = None
            todo += [other for other in units_of[buffer] if other not in units]
            units.update(dict.fromkeys(units_of[buffer]))
    return tuple(units), tuple(buffers)


def _bytes(bundles: Iterable[Bundle]) -> int:
    return sum(bundle.num_bytes for bundle in bundles)


def _said(budget_bytes: int | None) -> str:
    return "all it needs" if budget_bytes is None else str(budget_bytes)
