"""The checksum of every payload: xxh3-64 over a CPU tensor's memory, a weighted sum of its words on a GPU.

Both ends of a lane have payloads on the same kind of device, so the two are never compared with each other.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

import torch
import xxhash

from megastream.transport.cuda_driver import Driver
from megastream.transport.wire import tries

_WORD_BYTES = 8
_PAIR_BYTES = 16
_GOLDEN = 0x9E3779B97F4A7C15
"""Odd, with bits all over: 2^64 over the golden ratio."""
_SOON_S, _CLOSE_S = 0.005, 2.0
_MASK = (1 << 64) - 1
_THREADS, _MOST_BLOCKS = 1024, 264
"""Of a block; two blocks for each of the 132 processors of an H100 or H200."""

_HALVE = """
    mov.b64 {%lo, %hi}, %acc;
    shfl.sync.down.b32 %lo, %lo, STEP, 31, 0xffffffff;
    shfl.sync.down.b32 %hi, %hi, STEP, 31, 0xffffffff;
    mov.b64 %x, {%lo, %hi};
    add.u64 %acc, %acc, %x;"""
_WEIGH = """
    mul.lo.u64 %w, %n, GOLDEN;
    shr.u64 %v, %w, 32;
    xor.b64 %w, %w, %v;
    or.b64 %w, %w, 1;
    mad.lo.u64 %acc, X, %w, %acc;"""
_REDUCE = "".join(_HALVE.replace("STEP", str(step)) for step in (16, 8, 4, 2, 1))
_PTX = f"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry weighted_sum(
    .param .u64 payload, .param .u64 num_bytes, .param .u64 total, .param .u64 here, .param .u64 serial
) {{
    .reg .pred %done;
    .reg .b32 %lo, %hi, %thread, %block, %size;
    .reg .b64 %base, %end, %total, %pairs, %k, %step, %at, %n, %x, %y, %w, %v, %acc;
    ld.param.u64 %base, [payload];
    ld.param.u64 %end, [num_bytes];
    ld.param.u64 %total, [total];
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    cvt.u64.u32 %k, %thread;
    mad.wide.u32 %k, %block, %size, %k;
    mov.u32 %block, %nctaid.x;
    mul.wide.u32 %step, %block, %size;
    shr.u64 %pairs, %end, 4;
    mov.u64 %acc, 0;
    mov.u64 %at, %k;
WHOLE:                                      // this thread's pairs of words
    setp.ge.u64 %done, %at, %pairs;
    @%done bra REST;
    shl.b64 %x, %at, 4;
    add.u64 %x, %base, %x;
    ld.global.v2.u64 {{%x, %y}}, [%x];
    shl.b64 %n, %at, 1;
    add.u64 %n, %n, 1;{_WEIGH.replace("X", "%x")}
    add.u64 %n, %n, 1;{_WEIGH.replace("X", "%y")}
    add.u64 %at, %at, %step;
    bra WHOLE;
REST:                                       // the first thread: what is left behind the pairs, byte by byte
    setp.ne.u64 %done, %k, 0;
    @%done bra ADD;
    shl.b64 %at, %pairs, 4;
BYTE:
    setp.ge.u64 %done, %at, %end;
    @%done bra ADD;
    add.u64 %x, %base, %at;
    ld.global.u8 %x, [%x];
    cvt.u32.u64 %lo, %at;
    and.b32 %lo, %lo, 7;
    shl.b32 %lo, %lo, 3;
    shl.b64 %x, %x, %lo;
    shr.u64 %n, %at, 3;
    add.u64 %n, %n, 1;{_WEIGH.replace("X", "%x")}
    add.u64 %at, %at, 1;
    bra BYTE;
ADD:                                        // over the threads of a warp, then into the total{_REDUCE}
    and.b32 %thread, %thread, 31;
    setp.ne.u32 %done, %thread, 0;
    @%done bra END;
    atom.global.add.u64 %x, [%total], %acc;
    membar.gl;
    mul.lo.u32 %lo, %block, %size;
    shr.u32 %lo, %lo, 5;
    sub.u32 %lo, %lo, 1;
    atom.global.inc.u32 %hi, [%total+8], %lo;
    setp.ne.u32 %done, %hi, %lo;
    @%done bra END;
    membar.gl;                              // the last warp: hands the sum over, and leaves zeros for the next one
    atom.global.exch.b64 %x, [%total], 0;
    ld.param.u64 %y, [here];
    ld.param.u64 %v, [serial];
    st.global.u64 [%y], %x;
    st.release.sys.global.u64 [%y+8], %v;
END:
    ret;
}}
""".replace("GOLDEN", f"{_GOLDEN:#x}U")


def checksum(payload: torch.Tensor) -> int:
    """64 bits over a contiguous uint8 tensor, as PieceHeader.checksum wants them."""
    if payload.is_cuda:
        return weighted_sum(payload)
    return xxhash.xxh3_64_intdigest(payload.numpy().data)


def weighted_sum(payload: torch.Tensor) -> int:
    """The sum of all 8-byte words, zeros behind the last byte, each times an odd weight of its position, and of the
    number of bytes, modulo 2^64. This is the definition, on any device and slow; lanes use SumKernel.

    A single changed word always shows, because an odd weight has an inverse; so do words that changed places, but for
    chance.
    """
    missing = -payload.numel() % _WORD_BYTES
    words = torch.cat([payload, payload.new_zeros(missing)]).view(torch.int64)
    weights = torch.arange(1, words.numel() + 1, device=payload.device).mul_(_GOLDEN - (1 << 64))
    weights ^= (weights >> 32) & 0xFFFFFFFF
    weights |= 1
    return (int((words * weights).sum()) + payload.numel()) & _MASK


class Sum(Protocol):
    """A checksum on its way."""

    def is_known(self) -> bool: ...

    def value(self) -> int:
        """Blocks until it is known. To be asked once."""


class Known:
    """One that is there already."""

    def __init__(self, value: int) -> None:
        self._value = value

    def is_known(self) -> bool:
        return True

    def value(self) -> int:
        return self._value


class _OnGpu:
    """Room for one sum after the other; `kept` takes it back when a sum was asked for."""

    def __init__(self, device: torch.device, kept: list[_OnGpu]) -> None:
        self._kept = kept
        self._total = torch.zeros(2, dtype=torch.int64, device=device)
        self._here = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self._seen = self._here.numpy()
        torch.cuda.current_stream(device).synchronize()  # sums come in other streams
        self._serial, self._added = 0, 0
        self._stream: torch.cuda.Stream | None = None

    def begins(self, num_bytes: int, stream: torch.cuda.Stream) -> tuple[int, int, int]:
        """What the kernel must know: where it adds up, where it leaves the sum, and the number that it says then."""
        self._serial, self._added, self._stream = self._serial + 1, num_bytes, stream
        return self._total.data_ptr(), self._here.data_ptr(), self._serial

    def is_known(self) -> bool:
        """Read out of memory that the GPU writes to, which costs less than to ask the driver."""
        return bool(self._seen[1] == self._serial)

    def value(self) -> int:
        for _ in tries(time.monotonic() + _SOON_S):
            if self.is_known():
                break
        else:
            assert self._stream is not None
            self._stream.synchronize()  # blocks, and says what is wrong with the GPU
        value = (int(self._seen[0]) + self._added) & _MASK
        self._kept.append(self)
        return value


class SumKernel:
    """`weighted_sum` on one GPU, in one pass: near the rate of its memory, and with little work for the host."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, Driver(device.index)
        self._kernel = self._driver.load(_PTX, "weighted_sum")
        self._made: list[_OnGpu] = []
        self._kept: list[_OnGpu] = []
        self._beginning = threading.Lock()

    def begin(self, payload: torch.Tensor, stream: torch.cuda.Stream) -> Sum:
        """Enqueues it. The payload must stay until the sum is known. Any thread."""
        if payload.data_ptr() % _PAIR_BYTES:
            with torch.cuda.stream(stream):
                payload = payload.clone()
        num_bytes = payload.numel()
        blocks = min(-(-num_bytes // (_PAIR_BYTES * _THREADS)), _MOST_BLOCKS)
        with self._beginning:
            sum_ = self._kept.pop() if self._kept else self._make()
            arguments = (payload.data_ptr(), num_bytes, *sum_.begins(num_bytes, stream))
            self._driver.launch(self._kernel, blocks, _THREADS, stream.cuda_stream, arguments)
        return sum_

    def _make(self) -> _OnGpu:
        self._made.append(_OnGpu(self._device, self._kept))
        return self._made[-1]

    def close(self) -> None:
        """Waits a little for sums that nobody asked for: their room must not be others' while the GPU writes there."""
        for _ in tries(time.monotonic() + _CLOSE_S):
            if all(each.is_known() for each in self._made):
                break
        self._driver.close()


class Summing:
    """Begins checksums of payloads on one device, on a GPU in a given stream."""

    def __init__(self, device: torch.device) -> None:
        self._kernel = SumKernel(device) if device.type == "cuda" else None

    def begin(self, payload: torch.Tensor, stream: torch.cuda.Stream | None) -> Sum:
        if self._kernel is None or stream is None:
            return Known(checksum(payload))
        return self._kernel.begin(payload, stream)

    def close(self) -> None:
        """Idempotent."""
        if self._kernel is not None:
            self._kernel.close()


def check_payload(payload: torch.Tensor, num_bytes: int, what: str, device: str = "cpu") -> None:
    """Refuses, by name and before any byte moves, a buffer whose raw memory is not the payload."""
    flat = payload.dim() == 1 and payload.dtype == torch.uint8
    if not flat or payload.device != torch.device(device):
        wrong = f"; this lane takes 1-D uint8 tensors on {device}"
    elif not payload.is_contiguous():
        wrong = f" is not contiguous (stride {payload.stride()}); pack it first"
    elif payload.numel() < num_bytes or num_bytes < 1:
        wrong = f" for a piece of {num_bytes} bytes; at least 1 and at most {payload.numel()} fit"
    else:
        return
    raise ValueError(f"{what}: payload of shape {tuple(payload.shape)}, {payload.dtype}, on {payload.device}{wrong}")
