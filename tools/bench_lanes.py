"""Throughput of one lane between two processes of this machine, against the raw way of the same bytes in the same run.

    python tools/bench_lanes.py [--transport gloo] [--seconds 2] [--host 127.0.0.1]

`lane`: packed pieces, the lane's window kept full; the engine's own receiving threads check every payload, as they do
in a run, and throw it away. `packed`: the same from a trainer's buckets into an engine's staging: the emitter gathers
each piece out of a bf16 bucket and sums it, the engine scatters it. Rates are medians, over stretches of several
pieces, or over versions of all buckets. `raw` is a copy in host memory for gloo, copies from GPU to GPU (or within the
one) one behind the other for ipc, and sends of torch's own NCCL group, as it comes, for nccl. `checksum` is what that
of one piece takes on one end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megastream.engine.receiving import Receiving
from megastream.engine.scatter import finish_on_gpu, scatter, target_regions
from megastream.engine.settings import EngineSettings
from megastream.plan.types import Copy, Listed, Piece, Plan
from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneAddress, SendLane
from megastream.trainer.emit import Emitter
from megastream.transport.lanes import Receiver, connect

SIZES = {"4 KiB": 1 << 12, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
GPU_SIZES = {"1 MiB": 1 << 20, "4 MiB": 1 << 22, "16 MiB": 1 << 24, "64 MiB": 1 << 26, "256 MiB": 1 << 28}
DEADLINE_S = 60.0
RAW_REPEATS = 20
STRETCH = 16
"""Pieces that are timed together."""
ROW, BLOCK_ROWS = 2048, 1024
"""Elements of a row, and rows of a block that lies in one place on both sides: 4 MiB in bf16, as an expert's matrix."""
NUM_BUCKETS = {"cpu": 4, "cuda": 32}
BLANK = PieceHeader(
    kind="piece",
    run_id="bench",
    incarnation=1,
    attachment="bench",
    version=1,
    attempt=0,
    unit="s0.l0.dense",
    plan_digest="",
    source=0,
    target=0,
    seq=0,
    num_bytes=0,
    checksum=0,
)
Row = dict[str, float]


def sizes_of(transport: str) -> dict[str, int]:
    return SIZES if transport == "gloo" else GPU_SIZES


def device_of(transport: str, end: int) -> torch.device:
    """The GPU of an end; both ends share the only one."""
    return torch.device("cpu") if transport == "gloo" else torch.device("cuda", end % torch.cuda.device_count())


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bucket_bytes(piece_bytes: int, device: torch.device) -> int:
    """Of small pieces a bucket has 64; none is larger than the largest piece."""
    return min(64 * piece_bytes, max((SIZES if device.type == "cpu" else GPU_SIZES).values()))


def bench_plan(piece_bytes: int, device: torch.device) -> Plan:
    """Buckets cut into pieces, each of blocks of rows that lie elsewhere on the other side (in reversed order)."""
    block = min(piece_bytes // 2, ROW * BLOCK_ROWS)
    row = min(ROW, block)
    num_blocks = bucket_bytes(piece_bytes, device) // 2 // block
    in_piece, last = piece_bytes // 2 // block, num_blocks - 1
    pieces = []
    for bucket in range(NUM_BUCKETS[device.type]):
        for first in range(0, num_blocks, in_piece):
            copies = tuple(
                Copy("t", (block // row, row), at * block, (row, 1), str(bucket), (last - at) * block, (row, 1))
                for at in range(first, first + in_piece)
            )
            elements = piece_bytes // 2
            seq = len(pieces)
            pieces.append(
                Piece(seq, 0, 0, str(bucket), "s0.l0.dense", "bfloat16", "none", elements, piece_bytes, copies)
            )
    return Plan("", "stream", 1, 1, Listed(pieces), ("s0.l0.dense",), {}, {}, {})


def buckets(device: torch.device) -> dict[str, torch.Tensor]:
    elements = bucket_bytes(1 << 30, device) // 2
    return {str(i): torch.zeros(elements, dtype=torch.bfloat16, device=device) for i in range(NUM_BUCKETS[device.type])}


class BenchSink:
    """Scatters the pieces of version 2 as their size's plan says, and throws away those of version 1."""

    def __init__(self, device: torch.device) -> None:
        self._staging = buckets(device)
        self._plans: dict[int, Plan] = {}
        self._regions: dict[tuple[int, int], list[torch.Tensor]] = {}

    def admit(self, header: PieceHeader, source: int) -> bool:
        if header.version == 2 and header.num_bytes not in self._plans:
            self._plans[header.num_bytes] = bench_plan(header.num_bytes, self._staging["0"].device)
        return True

    def write(self, header: PieceHeader, payload: torch.Tensor) -> None:
        if header.version == 2:
            piece = self._plans[header.num_bytes].pieces[header.seq]
            key = (header.num_bytes, header.seq)
            if key not in self._regions:
                self._regions[key] = target_regions(piece, self._staging.__getitem__)
            scatter(piece, payload, self._regions[key])
            finish_on_gpu(payload)

    def lost(self, header: PieceHeader) -> None: ...

    def settle(self, header: PieceHeader) -> None: ...


def stretches(lane: SendLane, payloads: list[torch.Tensor], seconds: float) -> Iterator[float]:
    """Seconds of one piece, over stretches of pieces, as many under way as there are payloads."""
    headers = [
        msgspec.structs.replace(BLANK, num_bytes=each.numel(), checksum=lane.checksum(each)()) for each in payloads
    ]
    count = len(payloads)
    for at in range(count):
        lane.post(headers[at], payloads[at], DEADLINE_S)
    until, at = time.monotonic() + seconds, 0
    began = time.perf_counter()
    while time.monotonic() < until or at < 2 * STRETCH:
        lane.acknowledged(DEADLINE_S)
        lane.post(headers[at % count], payloads[at % count], DEADLINE_S)
        at += 1
        if at % STRETCH == 0:
            now = time.perf_counter()
            yield (now - began) / STRETCH
            began = now
    for _ in range(count):
        lane.acknowledged(DEADLINE_S)


def time_versions(emitter: Emitter, sources: dict[str, torch.Tensor], seconds: float) -> float:
    """Median seconds from the first bucket's end of stepping to the last acknowledgement."""
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times) < 4:
        emitter.begin(2, 0)
        began = time.perf_counter()
        for bucket in sources:
            emitter.final(bucket)
        emitter.drain()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def time_calls(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Median seconds of one call, out of several one behind the other."""
    call()
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        settle(device)
        began = time.perf_counter()
        for _ in range(STRETCH):
            call()
        settle(device)
        times.append((time.perf_counter() - began) / STRETCH)
    return statistics.median(times)


def raw_nccl(rank: int, transport: str, store: str) -> dict[str, float]:
    """Seconds of one send of each size over torch's own group. Both processes call it."""
    device = device_of(transport, rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    seconds = {}
    for name, size in GPU_SIZES.items():
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        for repeat in range(RAW_REPEATS + 3):
            if repeat == 3:
                settle(device)
                began = time.perf_counter()
            if rank:
                dist.send(payload, 0)
            else:
                dist.recv(payload, 1)
        settle(device)
        seconds[name] = (time.perf_counter() - began) / RAW_REPEATS
    dist.destroy_process_group()
    return seconds


def measure(lane: SendLane, transport: str, size: int, seconds: float, slots: int) -> Row:
    """Seconds of one piece: over the lane alone, the raw way, its checksum."""
    device = device_of(transport, 1)
    under_way = min(lane.window, slots)
    payloads = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for _ in range(under_way)]
    into = torch.empty_like(payloads[0], device=device_of(transport, 0))
    return {
        "lane": statistics.median(list(stretches(lane, payloads, seconds))),
        "raw": time_calls(lambda: into.copy_(payloads[0]), device, seconds / 4),
        "checksum": time_calls(lambda: lane.checksum(payloads[0])(), device, seconds / 4),
    }


def send_all(
    addresses: list[LaneAddress], transport: str, seconds: float, slots: int, store: str, results: Any
) -> None:
    """The sending process: one row for each size. The first lane is for pieces alone, each other one for an emitter."""
    torch.set_num_threads(1)
    device = device_of(transport, 1)
    rows: dict[str, Row] = {}
    lane = connect(addresses[0], DEADLINE_S, device)
    for name, size in sizes_of(transport).items():
        rows[name] = measure(lane, transport, size, seconds, slots)
    lane.close()
    sources = buckets(device)
    for address, (name, size) in zip(addresses[1:], sizes_of(transport).items(), strict=True):
        lanes = {0: connect(address, DEADLINE_S, device)}
        plan = bench_plan(size, device)

        def header(piece: Piece, version: int, attempt: int, checksum: int) -> PieceHeader:
            size = piece.num_bytes
            return msgspec.structs.replace(BLANK, version=version, seq=piece.seq, num_bytes=size, checksum=checksum)

        emitter = Emitter(plan, 0, sources, lanes, header, slots_per_target=slots, deadline_s=DEADLINE_S)
        rows[name]["packed"] = time_versions(emitter, sources, seconds) / len(plan.pieces)
        emitter.close()
    if transport == "nccl":
        for name, raw_s in raw_nccl(1, transport, store).items():
            rows[name]["raw"] = raw_s
    results.send(rows)
    results.close()


def receive_all(receiver: Receiver, addresses: list[LaneAddress], device: torch.device) -> None:
    """One lane after the other, until its sender closes it."""
    sink = BenchSink(device)
    settings = EngineSettings(staging_device=str(device))
    most = bucket_bytes(1 << 30, device)
    for address in addresses:
        lane = receiver.accept(address, DEADLINE_S)
        Receiving(lane, 0, most, sink, settings).run()
        lane.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("gloo", "ipc", "nccl"), default="gloo")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each size and way")
    parser.add_argument("--slots", type=int, default=4, help="slots of the emitter, and most pieces under way")
    parser.add_argument("--host", default="127.0.0.1", help="local address that the receiver listens on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport, device = options.transport, device_of(options.transport, 0)
    receiver = Receiver(options.host, transport, device)
    context = multiprocessing.get_context("spawn")
    results, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="megastream-lanes-") as folder:
        addresses = [receiver.address(source) for source in range(1 + len(sizes_of(transport)))]
        job = (addresses, transport, options.seconds, options.slots, f"{folder}/store", theirs)
        process = context.Process(target=send_all, args=job, daemon=True)
        process.start()
        theirs.close()
        threading.current_thread().name = "receive"
        receive_all(receiver, addresses, device)
        if transport == "nccl":
            raw_nccl(0, transport, f"{folder}/store")
        rows = results.recv()
        process.join(DEADLINE_S)
        receiver.close()
    print(f"{transport}: {device_of(transport, 1)} to {device}; GB/s")
    print(f"{'piece':>8} {'lane':>8} {'packed':>8} {'raw':>8} {'checksum':>9} {'lane/raw':>9} {'packed/raw':>11}")
    for name, size in sizes_of(transport).items():
        row = rows[name]
        lane, packed, raw, checksum = (size / row[way] / 1e9 for way in ("lane", "packed", "raw", "checksum"))
        print(f"{name:>8} {lane:8.2f} {packed:8.2f} {raw:8.1f} {checksum:9.1f} {lane / raw:9.3f} {packed / raw:11.3f}")


if __name__ == "__main__":
    main()
