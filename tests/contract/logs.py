"""What the tests of the control log share."""

from __future__ import annotations

from typing import Any

from megastream.protocol.records import WeightsReady

RUN = "run-1"


def ready(version: int, incarnation: int = 1) -> WeightsReady:
    return WeightsReady(
        attachment="a1",
        incarnation=incarnation,
        version=version,
        attempt=0,
        train_step=version,
        plan_digest="d",
        units=("s0.embed", "s1.l17.e32:40"),
        elements=10,
    )


def versions(entries: list[tuple[str, Any]]) -> list[int]:
    return [record.version for _, record in entries]
