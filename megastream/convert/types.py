"""What forms have in common: weights in files are layouts whose buffers lie somewhere in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megastream.layout.shard import RankLayout

Form = Literal["hf", "torch_dist", "mp_rank", "sharded_state"]
FORMS: tuple[Form, ...] = ("hf", "torch_dist", "mp_rank", "sharded_state")
Dtype = Literal["bfloat16", "fp8-block128"]
"""What weights can be rounded to: all of them but those that are fp32 by their family's table, or the linears."""
DTYPES: tuple[Dtype, ...] = ("bfloat16", "fp8-block128")


class ConvertError(ValueError):
    """Weights that cannot be read, written or compared. One line: the file, the tensor, the numbers, the remedy."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a buffer lies: its elements, row-major and of its own dtype, from byte `start` of `file` on.

    `file` is relative to the folder of the form.
    """

    file: str
    start: int


@dataclass(frozen=True)
class Holding:
    """Weights in files: one layout for each rank (or other holder) of the form, and the place of every buffer.

    `extents` is keyed by (rank, buffer); a buffer that is written in fp8 has its scales beside it, under `scale_name`.
    `left_out` names what lies in the files and is no weight of the model. `grouped` of the stored tensors have all
    experts of a rank each: Megatron's GroupedMLP saved them.
    """

    form: Form
    folder: Path
    layouts: tuple[RankLayout, ...]
    extents: Mapping[tuple[int, str], Extent] = field(repr=False)
    left_out: tuple[str, ...] = ()
    grouped: int = 0

    def where(self, rank: int, buffer: str) -> str:
        """How messages name a buffer: its file, its own name, its rank."""
        of_rank = f" of rank {rank}" if self.form in ("mp_rank", "sharded_state") else ""
        return f"{buffer}{of_rank} in {self.folder / self.extents[rank, buffer].file}"


@dataclass(frozen=True)
class NewFile:
    """A file to be written: its size, and the bytes that are known before any weight, as (offset, bytes)."""

    name: str
    num_bytes: int
    fixed: tuple[tuple[int, bytes], ...] = field(repr=False)


@dataclass(frozen=True)
class Target:
    """What is to be written: where every weight goes, the files, and small files that are written last, in order."""

    holding: Holding
    files: tuple[NewFile, ...]
    last: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
