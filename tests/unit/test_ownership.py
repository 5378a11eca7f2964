"""Which replica sends what: the measured choice, what is said of it, and what it is made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from megastream.rl import config as configs
from megastream.rl import streaming
from megastream.rl.train_config import parse_train_config
from megastream.trainer import ownership
from megastream.trainer.ownership import ANY_TRANSPORT, better_ownership, choose_ownership, described
from megastream.trainer.policies import Finality
from megastream.transport.choice import WANTED
from tests.helpers.train_job import job

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these alone had been measured."""
    rows = {("gloo", "pipelined"): ("slice", "sooner"), ("nccl", "pipelined"): ("replica", "dearer")}
    monkeypatch.setattr(ownership, "_MEASURED", {**rows, ("ipc", "pipelined"): ("slice", "free")})


@pytest.mark.parametrize(
    ("wanted", "finality", "replicas", "transports", "chosen", "why"),
    [
        ("auto", "pipelined", 2, ["gloo"], "slice", "gloo: slice, sooner"),
        ("auto", "pipelined", 2, ["nccl"], "replica", "nccl: replica, dearer"),
        ("auto", "pipelined", 2, ["gloo", "ipc"], "slice", "gloo: slice, sooner; ipc: slice, free"),
        ("auto", "pipelined", 2, ["gloo", "nccl"], "replica", "gloo: slice, sooner; nccl: replica, dearer"),
        ("auto", "early", 2, ["gloo"], "replica", "gloo: replica, not measured"),
        ("auto", "whole", 2, ["gloo"], "replica", "gloo: replica, nothing leaves before the gather"),
        ("auto", "pipelined", 1, ["gloo"], "replica", "one replica of everything, so both are the same"),
        ("slice", "pipelined", 1, ["gloo"], "slice", "as configured"),
        ("replica", "pipelined", 2, ["gloo"], "replica", "as configured"),
    ],
)
def test_the_better_one_is_taken_and_what_was_not_measured_stays_whole(
    measured: None, wanted: Any, finality: Any, replicas: int, transports: list[str], chosen: str, why: str
) -> None:
    assert choose_ownership(wanted, finality, replicas, transports) == (chosen, why)


def test_the_table_has_rows_of_real_transports_and_policies_with_a_reason() -> None:
    assert set(ANY_TRANSPORT) == set(WANTED) - {"auto"}
    for (transport, finality), (choice, reason) in ownership._MEASURED.items():
        assert transport in ANY_TRANSPORT and finality in get_args(Finality) and finality != "whole"
        assert better_ownership(transport, finality) == (choice, reason) and len(reason) > 10


def test_the_start_says_who_sends_and_why() -> None:
    assert described("slice", "gloo: sooner") == (
        "ownership slice: each replica sends what it steps, before parameters are gathered (gloo: sooner)"
    )
    assert described("replica", "as configured").startswith(
        "ownership replica: of several replicas one sends a bucket,"
    )


@pytest.mark.parametrize(
    ("layout", "ranks", "replicas"),
    [
        ({"pp": 2, "ep": 2}, 4, 2),
        ({"pp": 2}, 2, 1),
        ({"pp": 2, "cp": 2}, 4, 2),
        ({"tp": 2}, 2, 1),
        ({"tp": 2, "etp": 1}, 2, 2),
        ({"tp": 2, "ep": 2, "etp": 1}, 2, 1),
    ],
)
def test_replicas_are_those_of_the_weight_that_most_ranks_hold(
    tmp_path: Path, layout: dict[str, int], ranks: int, replicas: int
) -> None:
    """Experts have other ones than the rest; the optimizer shards over context parallelism, too."""
    assert parse_train_config(job(tmp_path, layout=layout, rendezvous__ranks_per_node=ranks)).replicas == replicas


def test_engines_may_come_with_any_transport_unless_weights_are_on_a_cpu(
    tmp_path: Path, measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_train_config(job(tmp_path))
    assert config.ownership == "auto"
    for on_gpu, chosen in ((False, "slice"), (True, "replica")):
        monkeypatch.setattr(streaming.torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        choice, why = streaming.ownership_of(config)
        assert choice == chosen and ("nccl" in why) == on_gpu


def test_a_quickstart_asks_for_the_transport_that_its_engine_is_told(measured: None) -> None:
    config = configs.load(ROOT / "configs/quickstart.yaml")
    assert config.stream.ownership == "auto" and config.ownership == ("slice", "gloo: slice, sooner")
    ipc = configs.load(ROOT / "configs/gpu2.yaml")
    assert ipc.ownership[1].startswith("ipc: " if ipc.data_parallel > 1 else "one replica")
