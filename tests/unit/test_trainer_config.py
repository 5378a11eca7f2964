"""Layouts that do not divide, and versions that are not supported, in one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastream.trainer import compat
from megastream.trainer.config import check_layout
from tests.helpers.tiny import tiny_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        (dict(pp=3), 3, "layers=4 by pp=3"),
        (dict(pp=2, vpp=3), 2, "layers=4 by pp*vpp=6"),
        (dict(tp=3), 3, "heads=8 by tp=3"),
        (dict(tp=8), 8, "kv_groups=4 by tp=8"),
        (dict(ep=3), 3, "experts=8 by ep=3"),
        (dict(pp=2, ep=4), 4, "ranks=4 by etp*ep*pp=8"),
        (dict(tp=2, pp=2), 6, "ranks=6 by tp*pp=4"),
        (dict(tp=2, vocab=101), 2, "vocab=101 by tp=2"),
        (dict(tp=2, etp=4, expert_ffn=18), 4, "expert_ffn=18 by etp=4"),
        (dict(tp=0), 1, "tp*pp=0"),
    ],
)
def test_what_does_not_divide_is_named(settings: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match="layout does not divide") as caught:
        check_layout(tiny_config(**settings), world_size)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_virtual_stages_need_stages() -> None:
    with pytest.raises(ValueError, match="vpp=2 needs pipeline stages"):
        check_layout(tiny_config(vpp=2), 1)


@pytest.mark.parametrize("good", [dict(), dict(pp=2, ep=2), dict(tp=4, ep=2, etp=1, vocab=104), dict(pp=2, vpp=2)])
def test_what_divides_passes(good: dict[str, Any]) -> None:
    check_layout(tiny_config(**good), 4)


def test_the_range_is_the_one_of_versions_env() -> None:
    lines = (ROOT / "versions.env").read_text().splitlines()
    pinned = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert pinned["MEGATRON_CORE_MIN"] == compat.MEGATRON_CORE_MIN
    assert pinned["MEGATRON_CORE_BELOW"] == compat.MEGATRON_CORE_BELOW
    assert compat.check_version() == pinned["MEGATRON_CORE"]


@pytest.mark.parametrize("version", ["0.16.1", "0.17.0", "0.19.2", "0.19.2rc1+cu13"])
def test_versions_in_the_range_pass(version: str) -> None:
    assert compat.check_version(version) == version


@pytest.mark.parametrize("version", ["0.16.0", "0.15.3", "0.20.0", "0.20rc0", "1.0"])
def test_versions_outside_the_range_are_refused_with_it(version: str) -> None:
    with pytest.raises(compat.UnsupportedTrainer, match=rf"{version} is not supported; .*>= 0.16.1 and < 0.20"):
        compat.check_version(version)
