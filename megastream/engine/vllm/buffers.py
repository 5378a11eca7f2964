"""The live weights of one rank, one object per parameter: how it is read, prepared and made live.

A buffer's name is the live parameter's, its shape the one that vLLM's weight loader fills. What the engine multiplies
with can be something else: on CPU, linears sit packed inside a kernel and expert weights lie in another order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megastream.engine.contract import LiveModelError
from megastream.engine.vllm import compat, compat_mla

ALL = slice(None)
PROBE_ROWS = 512
"""Rows of the identity matrix that one probe multiplies; bounds the memory of a read-back."""
LARGE_BYTES = 1 << 20
"""On a GPU, tensors of this size and more are copied one by one, at the memory's speed; the launches that copy many
tensors at once reach two thirds of it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a commit does: `copies` (live, new) at fixed addresses, `kernels` (layer, new kernel) swapped."""

    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    kernels: tuple[tuple[torch.nn.Module, compat.CpuKernel], ...] = ()


class LiveBuffer(ABC):
    """One live parameter. `shape` is the loader's."""

    def __init__(self, name: str, module: torch.nn.Module, parameter: torch.nn.Parameter, shape: tuple[int, ...]):
        self.name = name
        self.shape = shape
        self.module = module
        self.parameter = parameter
        self.experts: tuple[int, ...] | None = None

    @property
    def dtype(self) -> str:
        return str(self.parameter.dtype).removeprefix("torch.")

    @abstractmethod
    def read(self) -> torch.Tensor:
        """The values that the engine computes with, as a new or a live tensor of `shape`. Worker thread only."""

    @abstractmethod
    def prepare(self, new: torch.Tensor, rows: slice = ALL) -> Prepared:
        """Everything slow, so that a commit only copies and swaps. `new` has `shape`, of which `rows` become live."""

    def write(self, new: torch.Tensor, rows: slice = ALL) -> None:
        """Makes `rows` of `new` live at once; what it needs beside them is gone when it returns."""
        apply(self.prepare(new, rows))

    def in_place(self) -> torch.Tensor | None:
        """The live values, flat; None where they are packed."""
        return None


class Plain(LiveBuffer):
    """Live in the loader's layout: all of CUDA with Triton experts; on CPU the embedding and the norms."""

    def read(self) -> torch.Tensor:
        return self.parameter.data

    def prepare(self, new: torch.Tensor, rows: slice = ALL) -> Prepared:
        """Bytes that are not staged on the GPU move there now, on a stream of their own: a commit copies within it."""
        live, new = self.parameter.data[rows], new[rows]
        if live.device == new.device:
            return Prepared(copies=((live, new),))
        stream = torch.cuda.Stream(live.device)
        with torch.cuda.stream(stream):
            on_device = new.to(live.device, non_blocking=True)
        stream.synchronize()
        return Prepared(copies=((live, on_device),))

    def write(self, new: torch.Tensor, rows: slice = ALL) -> None:
        """From page-locked memory a GPU fetches the bytes on its own, in the order of the current stream."""
        self.parameter.data[rows].copy_(new[rows], non_blocking=True)

    def in_place(self) -> torch.Tensor | None:
        return self.parameter.data.view(-1) if self.parameter.data.is_contiguous() else None


class PackedLinear(LiveBuffer):
    """A CPU linear. The kernel that holds its packed weight is replaced as a whole; nothing else refers to it.

    The head keeps its plain parameter beside the kernel; the engine multiplies with the kernel, and both are written.
    """

    def read(self) -> torch.Tensor:
        """Multiplies an identity matrix with the live kernel: every product but one is 0, so the result is exact.

        Two things a kernel does not show, as it does not compute with them either: the sign of a zero, and values
        below the smallest normal number (AMX and AVX512-BF16 flush them).
        """
        kernel = compat.packed_linear(self.module)
        assert kernel is not None
        rows, columns = self.shape
        weight = self.parameter.data
        out = torch.empty(self.shape, dtype=weight.dtype)
        for start in range(0, columns, PROBE_ROWS):
            count = min(PROBE_ROWS, columns - start)
            probe = torch.zeros(count, columns, dtype=weight.dtype)
            probe[torch.arange(count), torch.arange(start, start + count)] = 1
            out[:, start : start + count] = kernel(probe, weight, None).view(count, rows).t()
        return out

    def prepare(self, new: torch.Tensor, rows: slice = ALL) -> Prepared:
        if rows != ALL:
            raise LiveModelError(f"{self.name} is packed as a whole and cannot be written in rows {rows}")
        copies = ((self.parameter.data, new),) if self.parameter.numel() else ()
        return Prepared(copies=copies, kernels=((self.module, compat.pack_linear(new)),))


class PackedExperts(LiveBuffer):
    """Stacked CPU experts, packed in place. Packing permutes each expert's elements in the same way."""

    def __init__(self, name: str, module: torch.nn.Module, parameter: torch.nn.Parameter, shape: tuple[int, ...]):
        super().__init__(name, module, parameter, shape)
        self.isa = str(compat.cpu_moe_isa(module))
        self._unpack = _unpacking_order(shape[1:], lambda expert: compat.prepack_experts(expert[None], self.isa))

    def read(self) -> torch.Tensor:
        return self.parameter.data.reshape(self.shape[0], -1)[:, self._unpack].view(self.shape)

    def prepare(self, new: torch.Tensor, rows: slice = ALL) -> Prepared:
        """Experts are packed one by one, so some of them are what the same rows of all would be."""
        return Prepared(copies=((self.parameter.data[rows], compat.prepack_experts(new[rows], self.isa)),))


class Absorbed(LiveBuffer):
    """MLA's `kv_b_proj` where its attention, `module`, holds two matrices that are packed of it, in its place.

    Each element lies in one of them, and heads are packed in the same way. Both stay where they are.
    """

    def __init__(self, name: str, module: torch.nn.Module, parameter: torch.nn.Parameter, shape: tuple[int, ...]):
        super().__init__(name, module, parameter, shape)
        self._heads = compat_mla.packed(module)[0].shape[0]
        self._unpack = _unpacking_order((shape[0] // self._heads, shape[1]), lambda head: self._flat(self._pack(head)))

    @property
    def dtype(self) -> str:
        return str(compat_mla.packed(self.module)[0].dtype).removeprefix("torch.")

    def read(self) -> torch.Tensor:
        return self._flat(compat_mla.packed(self.module))[:, self._unpack].view(self.shape)

    def prepare(self, new: torch.Tensor, rows: slice = ALL) -> Prepared:
        if rows != ALL:
            raise LiveModelError(f"{self.name} is packed as a whole and cannot be written in rows {rows}")
        return Prepared(copies=tuple(zip(compat_mla.packed(self.module), self._pack(new), strict=True)))

    def _pack(self, weight: torch.Tensor) -> compat_mla.Pair:
        return compat_mla.pack(self.module, weight)

    @staticmethod
    def _flat(pair: compat_mla.Pair) -> torch.Tensor:
        """Both matrices of a head in one row."""
        return torch.cat([matrices.reshape(matrices.shape[0], -1) for matrices in pair], dim=1)


def _unpacking_order(shape: tuple[int, ...], pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The packed position of each loader element of an expert or a head, learnt by packing the elements' own indices.

    Kernels move 16-bit values, so the indices go through in two halves.
    """
    rows, columns = shape
    index = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    halves = [
        pack(half.to(torch.int16).view(torch.bfloat16)).view(torch.int16).int() & 0xFFFF
        for half in (index & 0xFFFF, index >> 16)
    ]
    loader_position = (halves[0] | halves[1] << 16).flatten().long()
    order = torch.empty_like(loader_position)
    order[loader_position] = torch.arange(order.numel())
    return order


def merge(parts: Iterable[Prepared]) -> Prepared:
    """One Prepared that does all of them."""
    parts = tuple(parts)
    return Prepared(
        copies=tuple(pair for part in parts for pair in part.copies),
        kernels=tuple(pair for part in parts for pair in part.kernels),
    )


def apply(prepared: Prepared) -> None:
    """Makes it live. Copies are enqueued on the current stream, which orders them behind the last step's kernels."""
    if prepared.copies:
        _copy_all(prepared.copies)
    for module, kernel in prepared.kernels:
        compat.set_packed_linear(module, kernel)


def _copy_all(copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> None:
    if copies[0][0].is_cuda:
        for _, new in copies:  # allocated on another stream, see Plain.prepare: not to be reused before it is read
            new.record_stream(torch.cuda.current_stream())
        for live, new in copies:
            if new.nbytes >= LARGE_BYTES:
                live.copy_(new, non_blocking=True)
        copies = tuple(pair for pair in copies if pair[1].nbytes < LARGE_BYTES)
    if copies:
        torch._foreach_copy_([live for live, _ in copies], [new for _, new in copies])


def collect(model: torch.nn.Module, on_cpu: bool) -> dict[str, LiveBuffer]:
    """All parameters of this rank, in the model's order. Fit for patching or not: `live.py` checks that."""
    buffers: dict[str, LiveBuffer] = {}
    seen: dict[int, str] = {}
    packing = compat_mla.packing_layers(model)
    for prefix, module in model.named_modules():
        if compat_mla.is_latent(module):
            continue  # what it has are views of a parameter of another module
        loader = compat.loader_metadata(module)
        for short, parameter in module.named_parameters(recurse=False):
            name = seen.setdefault(id(parameter), f"{prefix}.{short}" if prefix else short)
            if name in buffers and not (on_cpu and compat.is_head(module)):
                continue  # tied: one parameter, written once; on CPU the head's kernel must follow
            shape = tuple(loader[short].shape) if short in loader else tuple(parameter.shape)
            if module in packing and short == "weight":
                buffers[name] = Absorbed(name, packing[module], parameter, shape)
                continue
            kind = _kind(module, short, parameter, on_cpu)
            buffers[name] = buffer = kind(name, module, parameter, shape)
            if compat.is_experts(module):
                buffer.experts = compat.expert_slots(module)
    return buffers


def _kind(module: torch.nn.Module, short: str, parameter: torch.nn.Parameter, on_cpu: bool) -> Any:
    if not on_cpu:
        return Plain
    if compat.is_experts(module):
        return PackedExperts if compat.cpu_moe_isa(module) and short in ("w13_weight", "w2_weight") else Plain
    packed = short == "weight" and compat.packed_linear(module) is not None
    # The embedding is given a kernel too, but only the head and the linears multiply with theirs.
    return PackedLinear if packed and (parameter.numel() == 0 or compat.is_head(module)) else Plain
