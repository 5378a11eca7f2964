"""Throughput of one lane between two processes of this machine, against a plain memory copy in the same run.

    python tools/bench_lanes.py [--seconds 2] [--host 127.0.0.1]

Each size is sent for the given time; both ends hash every payload, as they do in a run. The median of the
seconds per piece counts, so that other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneAddress
from megastream.transport.checksum import checksum
from megastream.transport.gloo import GlooReceiver, connect

SIZES = {"4 KiB": 1 << 12, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
DEADLINE_S = 30.0


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


def send_all(address: LaneAddress, seconds: float, results: Any) -> None:
    """The sending process: one row for each size."""
    torch.set_num_threads(1)
    lane = connect(address, DEADLINE_S)
    for name, size in SIZES.items():
        payload = torch.randint(0, 256, (size,), dtype=torch.uint8)
        into = torch.empty_like(payload)
        lane_s = time_calls(
            lambda payload=payload: lane.send(piece_header(0, payload), payload, DEADLINE_S),  # type: ignore[misc]
            seconds,
        )
        copy_s = time_calls(lambda payload=payload, into=into: into.copy_(payload), seconds / 4)  # type: ignore[misc]
        hash_s = time_calls(lambda payload=payload: checksum(payload), seconds / 4)  # type: ignore[misc]
        results.send((name, size, lane_s, copy_s, hash_s))
    lane.close()
    results.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each size")
    parser.add_argument("--host", default="127.0.0.1", help="local address that the receiver listens on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    receiver = GlooReceiver(options.host)
    address = receiver.address(0)
    results, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=send_all, args=(address, options.seconds, theirs), daemon=True
    )
    process.start()
    theirs.close()
    lane = receiver.accept(address, DEADLINE_S)
    slot = torch.empty(max(SIZES.values()), dtype=torch.uint8)
    while (header := lane.receive_header(DEADLINE_S)) is not None:
        lane.receive_payload(header, slot, DEADLINE_S)
        lane.acknowledge(header)
    process.join(DEADLINE_S)
    lane.close()
    receiver.close()
    print(f"{'piece':>8} {'ms':>9} {'lane GB/s':>10} {'memcpy GB/s':>12} {'xxh3 GB/s':>10} {'lane/memcpy':>12}")
    while results.poll():
        try:
            name, size, lane_s, copy_s, hash_s = results.recv()
        except EOFError:
            break
        rates = [size / seconds / 1e9 for seconds in (lane_s, copy_s, hash_s)]
        print(
            f"{name:>8} {lane_s * 1e3:9.3f} {rates[0]:10.2f} {rates[1]:12.2f} {rates[2]:10.2f} {copy_s / lane_s:12.3f}"
        )


if __name__ == "__main__":
    main()
