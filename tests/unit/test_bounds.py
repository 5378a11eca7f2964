"""Settings and terms are refused where they are made, by name, and at their limits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from megastream.engine.settings import EngineSettings
from megastream.protocol.bounds import MOST_PIECE_BYTES, MOST_S
from megastream.protocol.records import PROTOCOL, EngineReady
from megastream.protocol.terms import ProtocolError, check_alike, check_terms
from megastream.sync import EngineSyncSettings, TrainerSettings
from tests.helpers.plans import attach_record

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("piece_bytes", 10**30, f"must be at most {MOST_PIECE_BYTES}, got 10{{30}}"),
        ("piece_bytes", MOST_PIECE_BYTES + 1, "must be at most"),
        ("piece_bytes", NAN, r"must be a number \(int\), got nan"),
        ("piece_bytes", 0, "must be above 0 and finite, got 0"),
        ("piece_bytes", True, "must be a number"),
        ("slots_per_target", -1, "must be above 0"),
        ("experts_per_unit", 10**9, "must be at most"),
        ("ready_s", NAN, "must be above 0 and finite, got nan"),
        ("bind_s", INF, "must be above 0 and finite, got inf"),
        ("transfer_s", 10**400, "must be at most"),
        ("attach_s", 1e12, f"must be at most {MOST_S:.0f}, got 10{{12}}.0"),
        ("detach_s", "5", "must be a number"),
    ],
)
def test_trainer_settings(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"trainer setting {name} ({words})"):
        TrainerSettings(launch="a", **{name: value})


def test_the_limits_themselves_are_taken() -> None:
    assert TrainerSettings(launch="a", piece_bytes=MOST_PIECE_BYTES, ready_s=MOST_S).ready_s == MOST_S


def test_engine_settings() -> None:
    with pytest.raises(ValueError, match="engine setting liveness_s must be at most"):
        EngineSettings(liveness_s=1e300)
    with pytest.raises(ValueError, match="engine setting staging_sets must be at most"):
        EngineSettings(staging_sets=10**9)
    with pytest.raises(ValueError, match="engine sync setting load_s must be above 0 and finite"):
        EngineSyncSettings(load_s=NAN)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("piece_bytes", 10**30),
        ("piece_bytes", 0),
        ("experts_per_unit", -1),
        ("trainer_world_size", 10**12),
        ("trainer_world_size", 0),
        ("base_version", -1),
        ("base_version", 2**63),
        ("incarnation", 10**30),
    ],
)
def test_terms(field: str, value: int) -> None:
    attach = attach_record(1)
    check_terms(attach)
    with pytest.raises(ProtocolError, match=rf"attachment i1: {field} must be \d+ to \d+, got {value}"):
        check_terms(msgspec.structs.replace(attach, **{field: value}))


def test_another_protocol_is_refused_by_name() -> None:
    attach = msgspec.structs.replace(attach_record(1), protocol=PROTOCOL + 1)
    words = f"attachment i1: the trainer speaks protocol {PROTOCOL + 1}, engine e {PROTOCOL}; use equal releases"
    with pytest.raises(ProtocolError, match=words):
        check_terms(attach)


def test_ranks_of_one_side_have_one_release() -> None:
    def ready(rank: int, library: str = "vllm 0.32.0", **changes: int) -> EngineReady:
        return EngineReady(engine="e", rank=rank, world_size=2, library=library, **changes)

    check_alike("engine e", [ready(1), ready(0)])
    words = r"engine e: rank 1 has vllm 0\.31\.2, rank 0 has vllm 0\.32\.0; all ranks"
    with pytest.raises(ProtocolError, match=words):
        check_alike("engine e", [ready(1, "vllm 0.31.2"), ready(0)])
    words = rf"engine e, rank 1 \(vllm 0\.32\.0\) speaks protocol {PROTOCOL + 1}, this trainer {PROTOCOL}; use equal"
    with pytest.raises(ProtocolError, match=words):
        check_alike("engine e", [ready(0), ready(1, protocol=PROTOCOL + 1)])
