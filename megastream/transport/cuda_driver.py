"""The few calls of the CUDA driver that torch does not offer: memory shared between processes, and programs in PTX.

`libcuda.so.1` comes with the driver, so its calls are the same whatever CUDA version torch was built with.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


_ARGUMENTS = {
    "cuInit": (c_uint,),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p),
}


class DriverError(RuntimeError):
    """A call of the driver failed. The message is the driver's."""


class Driver:
    """The driver, with one GPU's context current in whichever thread calls. `index` is torch's number of the GPU."""

    def __init__(self, index: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._enqueuing = ctypes.PyDLL("libcuda.so.1")  # short calls; to pass the GIL round costs more than they do
        except OSError as error:
            raise DriverError(f"no CUDA driver: {error}") from error
        for name, arguments in _ARGUMENTS.items():
            for library in (self._library, self._enqueuing):
                getattr(library, name).argtypes = arguments
        self._index: int | None = index
        self._context = c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), index)

    def close(self) -> None:
        """Gives the context back. Idempotent."""
        index, self._index = self._index, None
        if index is not None:
            self._library.cuDevicePrimaryCtxRelease_v2(index)

    def export(self, pointer: int) -> tuple[bytes, int]:
        """(handle of the allocation that `pointer` lies in, offset in it). DriverError for memory of another kind."""
        self._enter()
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), pointer)
        self._call("cuIpcGetMemHandle", byref(handle), base.value)
        return bytes(handle), pointer - base.value

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation, with peer access when it is another GPU's; its address here."""
        self._enter()
        pointer = c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return pointer.value

    def forget(self, pointer: int) -> None:
        """Undoes an `open`. Never raises: the process that owned the memory may be gone."""
        self._library.cuCtxSetCurrent(self._context)
        self._library.cuIpcCloseMemHandle(pointer)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueues a copy between device addresses on a CUDA stream."""
        self._enqueue("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)

    def load(self, ptx: str, name: str) -> c_void_p:
        """Translates a program for this GPU; its kernel of that name. It stays with the process: it may be running."""
        self._enter()
        module, kernel = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), ptx.encode())
        self._call("cuModuleGetFunction", byref(kernel), module, name.encode())
        return kernel

    def launch(self, kernel: c_void_p, blocks: int, threads: int, stream: int, arguments: tuple[int, ...]) -> None:
        """Enqueues a kernel whose arguments are 64-bit numbers."""
        values = (c_uint64 * len(arguments))(*arguments)
        places = (c_void_p * len(arguments))(*(ctypes.addressof(values) + 8 * i for i in range(len(arguments))))
        self._enqueue("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, places, None)

    def _enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _enqueue(self, name: str, *arguments: object) -> None:
        self._check("cuCtxSetCurrent", self._enqueuing.cuCtxSetCurrent(self._context))
        self._check(name, getattr(self._enqueuing, name)(*arguments))

    def _check(self, name: str, result: int) -> None:
        if result:
            text = c_char_p()
            self._library.cuGetErrorString(result, byref(text))
            raise DriverError(f"{name}: {(text.value or b'error').decode()} ({result})")
