"""Real megatron, real lanes: what leaves during a pipelined step is the model after that step, bucket by bucket."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megastream.families import family_of, load_shape
from megastream.layout.engine import whole_rank_layout
from megastream.layout.shard import RankLayout
from megastream.plan import build_plan
from megastream.plan.types import Piece, Plan
from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneAddress, ReceiveLane
from megastream.rl import oracle
from megastream.trainer import model
from megastream.trainer.adapter import MegatronAdapter, mesh_coords
from megastream.trainer.config import TrainerConfig
from megastream.trainer.emit import Emitter
from megastream.trainer.outgoing import EmitReport
from megastream.trainer.stepper import Listener
from megastream.transport.gloo import GlooReceiver, connect
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import (
    BATCH,
    MICROBATCHES,
    SEQUENCE,
    batches,
    gathered,
    hf_config,
    hf_dtype,
    hf_shapes,
    tiny_config,
    tiny_glm4,
)

TARGETS, VERSIONS, DEADLINE_S = 2, (1, 2), 30.0


def _leave(path: Path, value: Any) -> None:
    partial_path = path.with_suffix(".partial")
    partial_path.write_bytes(pickle.dumps(value))
    partial_path.rename(path)


def _await(path: Path) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.02)
    return pickle.loads(path.read_bytes())


def _taken(config: TrainerConfig) -> dict[str, tuple[int, ...]]:
    """What engines have: no layers of multi-token prediction."""
    return hf_shapes(replace(config, mtp_layers=0))


def _plan(trainers: list[RankLayout], config: TrainerConfig) -> Plan:
    """Each of two engine ranks takes every second tensor, whole."""
    shape = load_shape(hf_config(config))
    family, names = family_of(shape), list(_taken(config))
    engines = [
        whole_rank_layout(family, shape, rank=t, world_size=TARGETS, coords={"tp": 0}, names=names[t::TARGETS])
        for t in range(TARGETS)
    ]
    return build_plan(
        trainers, engines, family, kind="whole", piece_bytes=4096, experts_per_unit=4, finality="pipelined"
    )


@dataclass(frozen=True)
class Way:
    """When a bucket is final, and which rank sends it."""

    finality: Any = "pipelined"
    ownership: Any = "replica"


def _trainer(
    rank: int, trainers: int, init_method: str, config: TrainerConfig, folder: Path, way: Way
) -> list[EmitReport]:
    model.start_process_group(config, rank=rank, world_size=trainers, init_method=init_method, deadline_s=60)
    chunks, optimizer = model.build(config)
    shape = load_shape(hf_config(config))
    adapter = MegatronAdapter(
        chunks,
        optimizer,
        family_of(shape),
        shape,
        bucket_elements=4000,
        finality=way.finality,
        experts_per_unit=4,
        ownership=way.ownership,
    )
    layouts: list[Any] = [None] * trainers
    dist.all_gather_object(layouts, adapter.describe())
    if rank == 0:
        _leave(folder / "layouts", layouts)
    plan, addresses = _plan(layouts, config), _await(folder / "addresses")
    targets = {piece.target for piece in plan.by_source.get(rank, ())}
    lanes = {target: connect(addresses[target, rank], DEADLINE_S) for target in targets}
    emitter = Emitter(
        plan, rank, adapter.buffers, lanes, partial(_header, plan), slots_per_target=2, deadline_s=DEADLINE_S
    )
    versions = iter(VERSIONS)

    def opens() -> None:
        assert emitter.is_packed_within(DEADLINE_S)
        emitter.begin(next(versions), 0)

    stepper, reports = adapter.stepper(way.finality, Listener(emitter.final, opens)), []
    for version in VERSIONS:
        model.train_step(
            chunks,
            batches(config, version, mesh_coords()["dp"]),
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
        )
        assert stepper.step().ok
        # The lease is what keeps the next step from changing bytes that are not packed yet.
        reports.append(emitter.drain())
        adapter.save_raw(folder / f"raw{version}")
    stepper.close()
    emitter.close()
    return reports


def _header(plan: Plan, piece: Piece, version: int, attempt: int, checksum: int) -> PieceHeader:
    return PieceHeader(
        kind="piece",
        run_id="run",
        incarnation=1,
        attachment="i1",
        version=version,
        attempt=attempt,
        unit=piece.unit,
        plan_digest=plan.digest,
        source=piece.source,
        target=piece.target,
        seq=piece.seq,
        num_bytes=piece.num_bytes,
        checksum=checksum,
    )


def _engine(config: TrainerConfig, folder: Path) -> None:
    plan = _plan(_await(folder / "layouts"), config)
    live = {name: torch.full(shape, torch.nan, dtype=hf_dtype(config, name)) for name, shape in _taken(config).items()}
    receivers = [GlooReceiver("127.0.0.1") for _ in range(TARGETS)]
    pairs = sorted({(piece.target, piece.source) for piece in plan.pieces})
    addresses = {(t, s): receivers[t].address(s) for t, s in pairs}
    _leave(folder / "addresses", addresses)
    versions = iter(VERSIONS)
    together = threading.Barrier(len(pairs), lambda: save_file(live, folder / f"live{next(versions)}.safetensors"))
    threads = [
        threading.Thread(target=_receive, args=(receivers[t].accept, addresses[t, s], plan, t, s, live, together))
        for t, s in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for receiver in receivers:
        receiver.close()


def _receive(
    accept: Callable[[LaneAddress, float], ReceiveLane],
    address: LaneAddress,
    plan: Plan,
    target: int,
    source: int,
    live: dict[str, torch.Tensor],
    together: threading.Barrier,
) -> None:
    lane = accept(address, DEADLINE_S)
    pieces = {piece.seq: piece for piece in plan.by_source[source] if piece.target == target}
    for _ in VERSIONS:
        for _ in pieces:
            header = lane.receive_header(DEADLINE_S)
            assert header is not None
            payload = torch.empty(header.num_bytes, dtype=torch.uint8)
            lane.begin_payload(header, payload, DEADLINE_S)
            lane.finish_payload(header, DEADLINE_S)
            piece = pieces[header.seq]
            _scatter(piece, payload.view(getattr(torch, piece.dtype)), live)
            lane.acknowledge(header)
        together.wait(DEADLINE_S)
    lane.close()


def _scatter(piece: Piece, payload: torch.Tensor, live: dict[str, torch.Tensor]) -> None:
    at = 0
    for copy in piece.copies:
        size = torch.Size(copy.shape).numel()
        into = live[copy.target_buffer].as_strided(copy.shape, copy.target_strides, copy.target_offset)
        into.copy_(payload[at : at + size].view(copy.shape))
        at += size


def _body(rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: str, way: Way) -> Any:
    trainers = world_size - 1
    if rank < trainers:
        return _trainer(rank, trainers, init_method, config, Path(folder), way)
    _engine(config, Path(folder))
    return None


def test_two_pipelined_steps_arrive_as_they_are(tmp_path: Path) -> None:
    check_arrivals(tiny_config(pp=2, ep=2, clip=0.3, lr=0.05), 4, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ownership", ["replica", "slice"])
@pytest.mark.parametrize("finality", ["whole", "pipelined", "speculative", "early"])
def test_every_policy_and_both_owners_send_what_the_step_made(finality: str, ownership: str, tmp_path: Path) -> None:
    """Two replicas: a shard that is read before it is final would be an old one beside a new one."""
    config = tiny_config(pp=2, layers=2, clip=0.0, lr=0.05)
    check_arrivals(config, 4, tmp_path, Way(finality, ownership))


@pytest.mark.full
def test_each_of_four_replicas_sends_its_new_slice(tmp_path: Path) -> None:
    """Before any parameter is gathered, out of the backward: not one old element arrives."""
    reports = check_arrivals(tiny_config(ep=2, layers=2, clip=0.0, lr=0.05), 4, tmp_path, Way("early", "slice"))
    assert all(report.elements > 0 for report in reports)


@pytest.mark.full
@pytest.mark.parametrize("ownership", ["replica", "slice"])
@pytest.mark.parametrize("finality", ["whole", "pipelined", "speculative", "early"])
def test_routers_biases_arrive_as_finalize_has_left_them(finality: str, ownership: str, tmp_path: Path) -> None:
    """In fp32 among weights in bf16, and of a stage whose other replicas have the same."""
    config = tiny_glm4(pp=2, ep=2, layers=2, clip=0.0, lr=0.05, router_bias_rate=0.3)
    check_arrivals(config, 4, tmp_path, Way(finality, ownership))


def check_arrivals(config: TrainerConfig, trainers: int, tmp_path: Path, way: Way = Way()) -> list[EmitReport]:
    """One process is both engine ranks; what it holds after each step must be what the trainer holds."""
    results = run_ranks(_body, trainers + 1, config=config, folder=str(tmp_path), way=way, timeout_s=90)
    sizes = {name: torch.Size(shape).numel() for name, shape in _taken(config).items()}
    num_bytes = sum(size * hf_dtype(config, name).itemsize for name, size in sizes.items())
    for index, version in enumerate(VERSIONS):
        dumps = [oracle.read_dump(tmp_path / f"raw{version}/rank{rank}.safetensors") for rank in range(trainers)]
        expected = gathered(dumps, config)
        live = load_file(tmp_path / f"live{version}.safetensors")
        assert live.keys() == _taken(config).keys() and expected.keys() == hf_shapes(config).keys()
        assert [name for name in live if not torch.equal(live[name], expected[name])] == []
        reports = [result[index] for result in results[:trainers]]
        assert sum(report.elements for report in reports) == sum(sizes.values())
        assert sum(report.payload_bytes for report in reports) == num_bytes
        assert all(report.wire_bytes > report.payload_bytes > 0 for report in reports)
    first, last = (load_file(tmp_path / f"live{version}.safetensors") for version in VERSIONS)
    assert [name for name in first if torch.equal(first[name], last[name])] == []
    return reports
