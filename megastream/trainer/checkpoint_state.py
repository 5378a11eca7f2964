"""What a trainer checkpoint holds, as megatron's sharded tensors: weights, fp32 masters, Adam's moments.

Weights are described by megatron's own `sharded_state_dict`. Of masters and moments a rank holds flat ranges of
parameters; a flat range is a handful of boxes (`layout.pack.flat_boxes`), and each box is saved as one shard of the
tensor that megatron would save, under megatron's key (`optimizer.state.exp_avg.<weight's key>`). Nothing is gathered, a
rank writes what it owns, and any other layout reads the boxes it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megastream.layout.pack import flat_boxes
from megastream.trainer import compat_checkpoint
from megastream.trainer.checkpoint_folder import CheckpointError
from megastream.trainer.compat_checkpoint import OptimizerShard


def describe(chunks: Sequence[Any], optimizer: Any | None) -> dict[str, Any]:
    """The live tensors of this rank: `model<n>` for each chunk and, unless it is None, those of the optimizer."""
    models = compat_checkpoint.sharded_models(chunks)
    state: dict[str, Any] = {f"model{number}": model for number, model in enumerate(models)}
    if optimizer is not None:
        entries = {entry.data: entry for model in models for entry in model.values() if torch.is_tensor(entry.data)}
        boxes = (box for s in compat_checkpoint.optimizer_shards(optimizer) for box in _boxes(s, entries[s.param]))
        state["optimizer"] = {str(number): box for number, box in enumerate(boxes)}
    return state


def tensor_names(state: dict[str, Any]) -> set[str]:
    """The keys under which megatron saves the tensors of `describe`, also of those that another rank writes."""
    entries = (entry for part in state.values() for entry in part.values() if torch.is_tensor(entry.data))
    return {leaf.key for entry in entries for leaf in _leaves(entry)}


def snapshot(state: dict[str, Any]) -> None:
    """Replaces every tensor that this rank will write by a copy on the CPU, in place.

    Blocks for as long as copying takes. What another rank writes for this one (a replica) is not copied.
    """
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    for part in state.values():
        for entry in part.values():
            if torch.is_tensor(entry.data) and is_main_replica(entry.replica_id):
                entry.data = entry.data.detach().to("cpu", copy=True)


def _boxes(shard: OptimizerShard, entry: Any) -> Iterator[Any]:
    """One sharded tensor for each box that the shard covers, of master and moments."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for leaf in _leaves(entry):
        first = _offset_in(shard.param, leaf)
        low, high = max(shard.start, first), min(shard.end, first + leaf.data.numel())
        if low >= high:
            continue
        at = low
        for box in flat_boxes(tuple(leaf.data.shape), low - first, high - first):
            ahead = leaf.prepend_axis_num
            shape = (1,) * ahead + box.shape
            offset = tuple(a + b for a, b in zip(leaf.global_offset, (0,) * ahead + box.lo, strict=True))
            for name, flat in shard.tensors.items():
                yield ShardedTensor(
                    key=f"optimizer.state.{name}.{leaf.key}",
                    data=flat[at - shard.start : at - shard.start + box.volume].view(shape),
                    dtype=flat.dtype,
                    local_shape=shape,
                    global_shape=leaf.global_shape,
                    global_offset=offset,
                    axis_fragmentations=None,  # not a grid: any box may be a shard
                    replica_id=(*leaf.replica_id[:2], 0),  # data parallel ranks hold different elements
                )
            at += box.volume


def _leaves(entry: Any) -> list[Any]:
    """The sharded tensors behind an entry: one, or those that megatron cuts a fused parameter into."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    leaves = [entry] if isinstance(entry, ShardedTensor) else entry.build()
    return list(leaves.values()) if isinstance(leaves, dict) else list(leaves)


def _offset_in(param: torch.Tensor, leaf: Any) -> int:
    """Where the leaf's elements begin in the flat parameter; it must be one run of them."""
    same = leaf.data.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
    if not same or not leaf.data.is_contiguous():
        raise CheckpointError(
            f"{leaf.key}: megatron saves it in an order other than its memory's, so that its optimizer state cannot be "
            f"cut like it; switch the setting off that reorders it"
        )
    return int(leaf.data.storage_offset() - param.storage_offset())
