"""NCCL's own two-rank communicators, without torch.distributed and its watchdogs: everything here has a deadline.

Communicators are made non-blocking, so no call waits for the peer; `NcclComm` asks NCCL how far it is. The library is
the one that torch has loaded. From nccl.h; the config is the one of 2.18, which later versions take and fill up.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p

import torch

from megastream.transport.wire import Check, tries

ID_BYTES = 128
MAX_CTAS = 8
"""Thread blocks of one transfer: few, because decode and training want the others."""

_SUCCESS, _IN_PROGRESS, _UINT8 = 0, 7, 1
_UNSET, _MAGIC, _CONFIG_VERSION = -(2**31), 0xCAFEBEEF, 21800


class NcclError(RuntimeError):
    """NCCL failed, or was aborted. The message says in what."""


class NcclTimeout(NcclError):
    """NCCL was not done at the deadline."""


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * ID_BYTES)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    ]


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise NcclError(f"no NCCL library: {error}") from error
    library.ncclCommInitRankConfig.argtypes = (POINTER(c_void_p), c_int, _Id, c_int, POINTER(_Config))
    for name in ("ncclSend", "ncclRecv"):
        getattr(library, name).argtypes = (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
    library.ncclCommGetAsyncError.argtypes = (c_void_p, POINTER(c_int))
    library.ncclCommAbort.argtypes = (c_void_p,)
    library.ncclGetErrorString.restype = c_char_p
    return library


def version() -> int:
    """As NCCL counts: 22809 for 2.28.9; 0 where there is no NCCL."""
    try:
        library = _load()
    except NcclError:
        return 0
    found = c_int()
    library.ncclGetVersion(byref(found))
    return found.value


def unique_id() -> bytes:
    """A fresh identity for one communicator; its rank 0 listens for the other one from now on."""
    library, made = _load(), _Id()
    _check(library, library.ncclGetUniqueId(byref(made)), "ncclGetUniqueId")
    return bytes(made)


class NcclComm:
    """One end of a communicator of two. Construction blocks until both are there, or until `until` (monotonic s)."""

    def __init__(self, identity: bytes, rank: int, device: torch.device, until: float) -> None:
        self._library, self._comm, self._peer = _load(), c_void_p(), 1 - rank
        self._stream = torch.cuda.Stream(device)
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0, _UNSET, 1, MAX_CTAS, None, _UNSET)
        with torch.cuda.device(device):
            result = self._library.ncclCommInitRankConfig(
                byref(self._comm), 2, _Id.from_buffer_copy(identity), rank, byref(config)
            )
        try:
            self._settle(result, "ncclCommInitRankConfig", _nothing, until)
        except NcclError:
            self.close()
            raise

    def send(self, payload: torch.Tensor, check: Check, until: float) -> torch.cuda.Event:
        """Enqueues the send of a CUDA tensor on a stream of its own; the event is behind it.

        All that waits here calls `check` again and again, and ends with what it raises.
        """
        return self._post("ncclSend", payload, check, until)

    def receive(self, into: torch.Tensor, check: Check, until: float) -> torch.cuda.Event:
        """Enqueues the receive into a CUDA tensor; the event is behind it."""
        return self._post("ncclRecv", into, check, until)

    def finish(self, done: torch.cuda.Event, check: Check, until: float) -> None:
        """Blocks until what the event stands for is done. NcclError, NcclTimeout, and what `check` raises."""
        for _ in tries(until):
            if done.query():
                return
            check()
            self.look()
        raise NcclTimeout("the transfer was not done at its deadline")

    def look(self) -> None:
        """NcclError when a transfer has failed."""
        self._state("a transfer")

    def close(self) -> None:
        """Ends what is under way, also against a peer that is gone. Idempotent."""
        comm, self._comm = self._comm, c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def _post(self, name: str, tensor: torch.Tensor, check: Check, until: float) -> torch.cuda.Event:
        with torch.cuda.device(tensor.device):
            result = getattr(self._library, name)(
                tensor.data_ptr(), tensor.numel(), _UINT8, self._peer, self._open(name), self._stream.cuda_stream
            )
        self._settle(result, name, check, until)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _settle(self, result: int, what: str, check: Check, until: float) -> None:
        """Waits until a call is no longer in progress."""
        if result != _IN_PROGRESS:
            _check(self._library, result, what)
        for _ in tries(until):
            if self._state(what) == _SUCCESS:
                return
            check()
        raise NcclTimeout(f"{what} was not done at its deadline")

    def _state(self, what: str) -> int:
        state = c_int(_SUCCESS)
        _check(self._library, self._library.ncclCommGetAsyncError(self._open(what), byref(state)), what)
        if state.value != _IN_PROGRESS:
            _check(self._library, state.value, what)
        return state.value

    def _open(self, what: str) -> c_void_p:
        if not self._comm:
            raise NcclError(f"{what}: the communicator is closed")
        return self._comm


def _nothing() -> None:
    """No check but the deadline."""


def _check(library: ctypes.CDLL, result: int, what: str) -> None:
    if result != _SUCCESS:
        text = library.ncclGetErrorString(result) or b"error"
        raise NcclError(f"{what}: {text.decode()} ({result}); NCCL_DEBUG=WARN says more")
