"""Rules for what attention and gated delta nets fuse: heads, and groups of them, in each side's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megastream.layout.placing import Cut, Fused, Placed, Region, rows
from megastream.layout.shard import TensorSpec

Run = tuple[TensorSpec, int, int]
"""(tensor, first row, number of rows)."""


def grouped_qkv(fused: Fused, cut: Cut) -> Placed:
    """Megatron's fused attention input: per key/value head its query heads, then k, then v; the rows are then cut.

    The cut ignores group borders, so with fewer groups than ranks a rank holds a part of a group.
    """
    return _cut_runs(fused, cut, _groups_of_heads(fused, 1))


def grouped_gated_qkv(fused: Fused, cut: Cut) -> Placed:
    """The same where q has a gate behind each head: per key/value head its query heads, the gates of these, k and v."""
    return _cut_runs(fused, cut, _groups_of_heads(fused, 2))


def _groups_of_heads(fused: Fused, width: int) -> Iterator[Run]:
    """`width`: how many q has for each head, one behind the other; a group has all its heads' first ones first."""
    q, k, v = fused.tensors
    dim = fused.head_dim
    num_groups = k.shape[0] // dim
    if q.shape[0] % (num_groups * width):
        raise ValueError(f"rows of {q.name}: {q.shape[0]} do not divide by {num_groups} key/value heads")
    size = q.shape[0] // num_groups
    for group in range(num_groups):
        if width == 1:
            yield q, group * size, size
        else:
            firsts = range(group * size, (group + 1) * size, width * dim)
            yield from ((q, first + index * dim, dim) for index in range(width) for first in firsts)
        yield k, group * dim, dim
        yield v, group * dim, dim


def _cut_runs(fused: Fused, cut: Cut, runs: Iterable[Run]) -> Placed:
    """All rows of the tensors in the order of `runs`, cut evenly."""
    first = fused.tensors[0]
    num = cut.divide(sum(tensor.shape[0] for tensor in fused.tensors), f"fused rows of {first.name}")
    regions: list[Region] = []
    at = -cut.rank * num
    for tensor, start, size in runs:
        lo, hi = max(at, 0), min(at + size, num)
        if lo < hi:
            regions.append(rows(tensor, start + lo - at, start + hi - at, at=lo))
        at += size
    return Placed((num, *first.shape[1:]), tuple(regions))


def concat_qkv(fused: Fused, cut: Cut) -> Placed:
    """vLLM's fused attention input: this rank's q heads, then its k heads, then its v heads.

    With more ranks than key/value heads each rank holds one of them, `size / heads` neighbours the same one.
    """
    return _concat(fused, cut, fused.head_dim)


def concat_gated_qkv(fused: Fused, cut: Cut) -> Placed:
    """The same where q has a gate behind each of its heads, which stays there."""
    return _concat(fused, cut, 2 * fused.head_dim)


def _concat(fused: Fused, cut: Cut, q_head: int) -> Placed:
    """`q_head`: rows that q has for each query head."""
    q, k, v = fused.tensors
    num_kv_heads = k.shape[0] // fused.head_dim
    num_q = cut.divide(q.shape[0] // q_head, f"query heads of {q.name}") * q_head
    if cut.size >= num_kv_heads:
        if cut.size % num_kv_heads:
            raise ValueError(f"{k.name}: {cut.axis}={cut.size} is not a multiple of {num_kv_heads} key/value heads")
        num_kv, first = fused.head_dim, cut.rank // (cut.size // num_kv_heads) * fused.head_dim
    else:
        num_kv = cut.divide(num_kv_heads, f"key/value heads of {k.name}") * fused.head_dim
        first = cut.rank * num_kv
    regions = (
        rows(q, cut.rank * num_q, (cut.rank + 1) * num_q, at=0),
        rows(k, first, first + num_kv, at=num_q),
        rows(v, first, first + num_kv, at=num_q + num_kv),
    )
    return Placed((num_q + 2 * num_kv, *q.shape[1:]), regions)


def sections(fused: Fused, cut: Cut) -> Placed:
    """One tensor of a single group: each of its parts cut evenly, this rank's cuts one below the other.

    The convolution of a gated delta net, on both sides.
    """
    (tensor,), (parts,) = fused.tensors, fused.parts
    regions: list[Region] = []
    at = start = 0
    for size in parts:
        num = cut.divide(size, f"a part of {tensor.name}")
        regions.append(rows(tensor, start + cut.rank * num, start + (cut.rank + 1) * num, at))
        at, start = at + num, start + size
    return Placed((at, *tensor.shape[1:]), tuple(regions))


def groups(fused: Fused, cut: Cut) -> Placed:
    """One tensor in groups, whole ones on each rank, as the tensor has them: vLLM's input of interleaved delta nets."""
    (tensor,), (parts,) = fused.tensors, fused.parts
    num = cut.divide(tensor.shape[0] // sum(parts), f"groups of {tensor.name}") * sum(parts)
    return Placed((num, *tensor.shape[1:]), (rows(tensor, cut.rank * num, (cut.rank + 1) * num, at=0),))


def ungrouped(fused: Fused, cut: Cut) -> Placed:
    """Tensors in groups, taken apart: of this rank's groups all first parts, then all second ones, tensor by tensor.

    Megatron's input of a gated delta net: q, k, v, z, b, a.
    """
    regions: list[Region] = []
    at = 0
    for tensor, parts in zip(fused.tensors, fused.parts, strict=True):
        whole = sum(parts)
        num = cut.divide(tensor.shape[0] // whole, f"groups of {tensor.name}")
        start = cut.rank * num * whole
        for size in parts:
            for group in range(num):
                first = start + group * whole
                regions.append(rows(tensor, first, first + size, at))
                at += size
            start += size
    return Placed((at, *fused.tensors[0].shape[1:]), tuple(regions))
