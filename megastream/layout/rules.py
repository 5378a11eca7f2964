"""The rules: how Hugging Face tensors lie inside one parameter of one rank.

A rule knows nothing of names, sides or buffers. It takes what a parameter fuses and how the mesh cuts it, and says
which box of which tensor lies where in the parameter. Nothing is gathered, added or rounded: every rule is a pure
re-arrangement, so the same regions serve both directions (trainer to engine, checkpoint to trainer).
"""

from __future__ import annotations

from collections.abc import Sequence

from megastream.layout.box import Box
from megastream.layout.placing import Cut, Fused, Placed, Region, Rule, rows
from megastream.layout.rules_attention import (
    concat_gated_qkv,
    concat_qkv,
    grouped_gated_qkv,
    grouped_qkv,
    groups,
    sections,
    ungrouped,
)
from megastream.layout.shard import TensorSpec

RULES_VERSION = 1
"""Part of every plan's digest. Raise it when a rule changes what lies where."""


def same(fused: Fused, cut: Cut) -> Placed:
    """Whole on every rank; several tensors one below the other."""
    regions: list[Region] = []
    at = 0
    for tensor in fused.tensors:
        regions.append(rows(tensor, 0, tensor.shape[0], at))
        at += tensor.shape[0]
    return Placed((at, *fused.tensors[0].shape[1:]), tuple(regions))


def column(fused: Fused, cut: Cut) -> Placed:
    """One tensor, rows (dim 0) cut evenly: Megatron's and vLLM's column-parallel linear."""
    (tensor,) = fused.tensors
    num = cut.divide(tensor.shape[0], f"rows of {tensor.name}")
    return Placed((num, *tensor.shape[1:]), (rows(tensor, cut.rank * num, (cut.rank + 1) * num, at=0),))


def latent(fused: Fused, cut: Cut) -> Placed:
    """Megatron's projection to a latent: rows cut evenly in its local spec, whole on all ranks in Transformer Engine's.

    `padded_rows`, the rows over all ranks, tells which; without it (0) it is whole.
    """
    (tensor,) = fused.tensors
    return column(fused, cut) if fused.padded_rows == tensor.shape[0] else same(fused, cut)


def row(fused: Fused, cut: Cut) -> Placed:
    """One matrix, columns (dim 1) cut evenly: Megatron's and vLLM's row-parallel linear."""
    (tensor,) = fused.tensors
    num_rows, num_columns = tensor.shape
    num = cut.divide(num_columns, f"columns of {tensor.name}")
    box = Box((0, cut.rank * num), (num_rows, (cut.rank + 1) * num))
    return Placed((num_rows, num), (Region(tensor, box, (0, 0), (0, 1)),))


def vocab(fused: Fused, cut: Cut) -> Placed:
    """One tensor whose rows are padded at the end and then cut. Padding belongs to no tensor: it has no region."""
    (tensor,) = fused.tensors
    num_rows = tensor.shape[0]
    total = max(fused.padded_rows, num_rows)
    num = cut.divide(total, f"padded rows of {tensor.name}")
    lo, hi = cut.rank * num, min((cut.rank + 1) * num, num_rows)
    return Placed((num, *tensor.shape[1:]), (rows(tensor, lo, hi, at=0),) if lo < hi else ())


def gated(fused: Fused, cut: Cut) -> Placed:
    """Several tensors of equal shape (gate, up), each cut by rows, and the cuts stacked per rank: [gate_r; up_r]."""
    regions: list[Region] = []
    at = 0
    for tensor in fused.tensors:
        num = cut.divide(tensor.shape[0], f"rows of {tensor.name}")
        regions.append(rows(tensor, cut.rank * num, (cut.rank + 1) * num, at))
        at += num
    return Placed((at, *fused.tensors[0].shape[1:]), tuple(regions))


def expert_stack(rule: Rule, experts: Sequence[Fused], cut: Cut) -> Placed:
    """One expert after the other along a new leading dim, each laid out by `rule`; slot j holds `experts[j]`."""
    if not experts:
        raise ValueError("an expert stack needs at least one expert")
    slots = [rule(fused, cut) for fused in experts]
    regions = tuple(
        Region(region.tensor, region.box, (slot, *region.origin), tuple(dim + 1 for dim in region.dims))
        for slot, placed in enumerate(slots)
        for region in placed.regions
    )
    return Placed((len(slots), *slots[0].shape), regions, (len(slots), *slots[0].grid))


def stack_same(fused: Fused, cut: Cut) -> Placed:
    """One expert of a tensor that holds all of them, whole on every rank."""
    (tensor,) = fused.tensors
    return _of_stack(fused, cut, None, tuple(range(len(tensor.shape))), tensor.shape[1:])


def stack_first(fused: Fused, cut: Cut) -> Placed:
    """The same, on the first rank of the cut; the others have zeros that nothing is ever written to.

    vLLM's bias behind a row-parallel sum.
    """
    placed = stack_same(fused, cut)
    return placed if cut.rank == 0 else Placed(placed.shape, ())


def stack_row(fused: Fused, cut: Cut) -> Placed:
    """One expert of a tensor [experts, in, out], transposed; its inputs are cut: a row-parallel [out, in]."""
    (tensor,) = fused.tensors
    _, num_in, num_out = tensor.shape
    num = cut.divide(num_in, f"inputs of {tensor.name}")
    return _of_stack(fused, cut, 1, (0, 2, 1), (num_out, num))


def stack_gated(fused: Fused, cut: Cut) -> Placed:
    """One expert of a tensor [experts, (in,) ffn, 2], whose last dim is gate or up: [gate_r; up_r], cut along ffn."""
    tensor, num = _halves(fused, cut)
    inputs = tensor.shape[1:-2]
    dims = (0, 3, 2, 1) if inputs else (0, 2, 1)
    return _of_stack(fused, cut, len(tensor.shape) - 2, dims, (2 * num, *inputs))


def stack_interleaved(fused: Fused, cut: Cut) -> Placed:
    """The same with rows of gate and up in turns, as the tensor has them: vLLM's for GPT-OSS."""
    tensor, num = _halves(fused, cut)
    inputs = tensor.shape[1:-2]
    dims = (0, 3, 1, 2) if inputs else (0, 1, 2)
    return _of_stack(fused, cut, len(tensor.shape) - 2, dims, (2 * num, *inputs))


def _halves(fused: Fused, cut: Cut) -> tuple[TensorSpec, int]:
    (tensor,) = fused.tensors
    return tensor, cut.divide(tensor.shape[-2], f"gate and up of {tensor.name}")


def _of_stack(fused: Fused, cut: Cut, cut_dim: int | None, dims: tuple[int, ...], shape: tuple[int, ...]) -> Placed:
    """One expert as one region: tensor dim d becomes dim `dims[d]` of the view; `cut_dim` is cut evenly."""
    (tensor,) = fused.tensors
    lo, hi = [fused.expert] + [0] * (len(dims) - 1), [fused.expert + 1, *tensor.shape[1:]]
    if cut_dim is not None:
        num = tensor.shape[cut_dim] // cut.size
        lo[cut_dim], hi[cut_dim] = cut.rank * num, (cut.rank + 1) * num
    box = Box(tuple(lo), tuple(hi))
    view = tuple(size for _, size in sorted(zip(dims, box.shape, strict=True)))
    return Placed(shape, (Region(tensor, box, (0,) * len(dims), dims),), view)


RULES: dict[str, Rule] = {
    "same": same,
    "column": column,
    "latent": latent,
    "row": row,
    "vocab": vocab,
    "gated": gated,
    "grouped_qkv": grouped_qkv,
    "concat_qkv": concat_qkv,
    "grouped_gated_qkv": grouped_gated_qkv,
    "concat_gated_qkv": concat_gated_qkv,
    "sections": sections,
    "groups": groups,
    "ungrouped": ungrouped,
    "stack_same": stack_same,
    "stack_first": stack_first,
    "stack_row": stack_row,
    "stack_gated": stack_gated,
    "stack_interleaved": stack_interleaved,
}
