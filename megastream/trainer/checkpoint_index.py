"""Does the index of a torch_dist checkpoint agree with the files beside it? Looks at files, not at what ranks said."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

DATA_SUFFIX = ".distcp"


def index_faults(folder: Path, sizes: Mapping[str, int]) -> Iterator[str]:
    """One line for each tensor that is not covered exactly, or whose bytes do not lie in a file of `sizes`.

    The boxes of a tensor must add up to its volume and be different ones; that they do not overlap is what torch
    checks when it plans the save.
    """
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError) as error:
        yield f"the index cannot be read ({type(error).__name__}: {error})"
        return
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
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            held = sum(prod(chunk.sizes) for chunk in entry.chunks)
            offsets = {tuple(chunk.offsets) for chunk in entry.chunks}
            if held != prod(entry.size) or len(offsets) != len(entry.chunks):
                yield f"the index holds {held} elements of {name}, which has {prod(entry.size)}"
