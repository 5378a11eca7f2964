"""Does the index of a torch_dist checkpoint agree with the files beside it, and with what all ranks meant to save?

The names of all tensors lie in a file of their own, written before the index is: what that says of itself would not
show that it left a tensor out whose bytes lie in a file with others.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megastream.trainer.checkpoint_folder import write_synced

DATA_SUFFIX = ".distcp"
NAMES = "tensors.txt"
"""One name a line; checkpoints that earlier versions saved have no such file."""
_UNREADABLE = (
    OSError,
    EOFError,
    UnicodeDecodeError,
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    IndexError,
)


def write_names(folder: Path, names: Iterable[str]) -> None:
    """What the index will have to hold, synced to the disk when it returns."""
    write_synced(folder / NAMES, "".join(f"{name}\n" for name in sorted(names)))


def index_faults(folder: Path, sizes: Mapping[str, int]) -> Iterator[str]:
    """One line for each tensor that is missing or not covered exactly, or whose bytes do not lie in a file of `sizes`.

    The boxes of a tensor must add up to its volume and be different ones; that they do not overlap is what torch
    checks when it plans the save.
    """
    try:
        metadata = FileSystemReader(folder).read_metadata()
        names = (folder / NAMES).read_text().splitlines() if NAMES in sizes else []
    except _UNREADABLE as error:
        yield f"the index cannot be read ({type(error).__name__}: {error})"
        return
    yield from _places(metadata, sizes)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            held = sum(prod(chunk.sizes) for chunk in entry.chunks)
            offsets = {tuple(chunk.offsets) for chunk in entry.chunks}
            if held != prod(entry.size) or len(offsets) != len(entry.chunks):
                yield f"the index holds {held} elements of {name}, which has {prod(entry.size)}"
    for name in names:
        if not isinstance(metadata.state_dict_metadata.get(name), TensorStorageMetadata):
            yield f"the index does not hold {name}, which was to be saved"


def _places(metadata: Metadata, sizes: Mapping[str, int]) -> Iterator[str]:
    named = set()
    for key, place in (metadata.storage_data or {}).items():
        named.add(place.relative_path)
        size = sizes.get(place.relative_path)
        if size is None:
            yield f"the index places {key.fqn} in {place.relative_path}, which is not there"
        elif place.offset + place.length > size:
            end = place.offset + place.length
            yield f"the index places {key.fqn} up to byte {end} of {place.relative_path}, which has {size}"
    for name in sorted(name for name in sizes if name.endswith(DATA_SUFFIX) and name not in named):
        yield f"file {name} is not in the index"
