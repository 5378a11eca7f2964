"""Throughput of one lane between two processes of this machine, against the raw way of the same bytes in the same run.

    python tools/bench_lanes.py [--transport gloo] [--seconds 2] [--host 127.0.0.1]

Each size is sent for the given time; the receiver hashes every payload, as it does in a run. The sender's hash, which
another thread makes there, is not in the time. The median of the seconds per piece counts, so that other work on the
machine disturbs little. Raw is a copy in host memory for gloo, a
copy from GPU to GPU (or within the one) for ipc, and a send of torch's own NCCL group, as it comes, for nccl.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneAddress
from megastream.transport.checksum import checksum
from megastream.transport.lanes import Receiver, connect

SIZES = {"4 KiB": 1 << 12, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
GPU_SIZES = {"1 MiB": 1 << 20, "4 MiB": 1 << 22, "16 MiB": 1 << 24, "64 MiB": 1 << 26, "256 MiB": 1 << 28}
DEADLINE_S = 30.0
RAW_REPEATS = 20


def device_of(transport: str, end: int) -> torch.device:
    """The GPU of an end; both ends share the only one."""
    return torch.device("cpu") if transport == "gloo" else torch.device("cuda", end % torch.cuda.device_count())


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def piece_header(seq: int, payload: torch.Tensor) -> PieceHeader:
    return PieceHeader(
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
        seq=seq,
        num_bytes=payload.numel(),
        checksum=checksum(payload),
    )


def time_calls(call: Callable[[], Any], seconds: float) -> float:
    """Median seconds of one call."""
    call()
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
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


def send_all(address: LaneAddress, transport: str, seconds: float, store: str, results: Any) -> None:
    """The sending process: one row for each size."""
    torch.set_num_threads(1)
    device = device_of(transport, 1)
    lane = connect(address, DEADLINE_S, device)
    rows = []
    for name, size in (SIZES if transport == "gloo" else GPU_SIZES).items():
        payload = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
        into = torch.empty_like(payload, device=device_of(transport, 0))

        header = piece_header(0, payload)

        def send(payload: torch.Tensor = payload, header: PieceHeader = header) -> None:
            lane.send(header, payload, DEADLINE_S)

        def copy(payload: torch.Tensor = payload, into: torch.Tensor = into) -> None:
            into.copy_(payload)
            settle(device)

        lane_s = time_calls(send, seconds)
        raw_s = time_calls(copy, seconds / 4)
        hash_s = time_calls(lambda payload=payload: lane.checksum(payload), seconds / 4)  # type: ignore[misc]
        rows.append((name, size, lane_s, raw_s, hash_s))
    lane.close()
    if transport == "nccl":
        raw = raw_nccl(1, transport, store)
        rows = [(name, size, lane_s, raw[name], hash_s) for name, size, lane_s, _, hash_s in rows]
    results.send(rows)
    results.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("gloo", "ipc", "nccl"), default="gloo")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each size")
    parser.add_argument("--host", default="127.0.0.1", help="local address that the receiver listens on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = device_of(options.transport, 0)
    receiver = Receiver(options.host, options.transport, device)
    results, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="megastream-lanes-") as folder:
        job = (receiver.address(0), options.transport, options.seconds, f"{folder}/store", theirs)
        process = multiprocessing.get_context("spawn").Process(target=send_all, args=job, daemon=True)
        process.start()
        theirs.close()
        lane = receiver.accept(job[0], DEADLINE_S)
        slot = torch.empty(max((*SIZES.values(), *GPU_SIZES.values())), dtype=torch.uint8, device=device)
        while (header := lane.receive_header(DEADLINE_S)) is not None:
            lane.receive_payload(header, slot, DEADLINE_S)
            lane.acknowledge(header)
        if options.transport == "nccl":
            raw_nccl(0, options.transport, f"{folder}/store")
        rows = results.recv()
        process.join(DEADLINE_S)
        lane.close()
        receiver.close()
    print(f"{options.transport}: {device_of(options.transport, 1)} to {device}")
    print(f"{'piece':>8} {'ms':>9} {'lane GB/s':>10} {'raw GB/s':>12} {'checksum GB/s':>14} {'lane/raw':>9}")
    for name, size, lane_s, raw_s, hash_s in rows:
        rates = [size / seconds / 1e9 for seconds in (lane_s, raw_s, hash_s)]
        print(f"{name:>8} {lane_s * 1e3:9.3f} {rates[0]:10.2f} {rates[1]:12.2f} {rates[2]:14.2f} {raw_s / lane_s:9.3f}")


if __name__ == "__main__":
    main()
