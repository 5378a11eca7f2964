"""What `megastream plan` refuses before it plans: layouts that cannot be, and plans that would take too long."""

from __future__ import annotations

from megastream.families import ModelShape
from megastream.layout.mesh import Mesh

MAX_PIECE_BYTES = 1 << 30
MAX_EXPERTS_PER_UNIT = 4096
MAX_RANK_TENSORS = 400_000
"""Tensors of a rank, summed over all ranks."""
MAX_PIECES = 1_000_000
"""Messages of one version."""


def check_plan(
    shape: ModelShape, trainer: Mesh, engine: Mesh, num_slots: int, piece_bytes: int, experts_per_unit: int
) -> None:
    """`num_slots`: experts of a layer on all engine ranks that share them, each as often as it is there. ValueError
    names the numbers that do not fit, or what would be too much and what to change.
    """
    if piece_bytes > MAX_PIECE_BYTES:
        raise ValueError(f"--piece-bytes is {piece_bytes}; one message has at most {MAX_PIECE_BYTES}")
    if experts_per_unit > MAX_EXPERTS_PER_UNIT:
        raise ValueError(f"--experts-per-unit is {experts_per_unit}; it is at most {MAX_EXPERTS_PER_UNIT}")
    for side, mesh in (("trainer", trainer), ("engine", engine)):
        if shape.num_heads % mesh.tp:
            raise ValueError(f"{side} layout {mesh}: {shape.num_heads} attention heads do not divide by tp={mesh.tp}")
        if mesh.stages is None and mesh.pp * mesh.vpp > shape.num_layers:
            raise ValueError(
                f"{side} layout {mesh}: {mesh.pp * mesh.vpp} stages for {shape.num_layers} layers; each needs one"
            )
    if shape.num_kv_heads % trainer.tp and trainer.tp % shape.num_kv_heads:
        raise ValueError(
            f"trainer layout {trainer}: tp={trainer.tp} is neither a multiple nor a divisor of {shape.num_kv_heads} "
            "key/value heads"
        )
    _check_size(shape, trainer, engine, num_slots, piece_bytes)


def _check_size(shape: ModelShape, trainer: Mesh, engine: Mesh, num_slots: int, piece_bytes: int) -> None:
    # About 8 tensors of a layer besides its experts; a rank holds the experts of its stage and expert group.
    per_layer = shape.num_layers * 8
    tensors = sum(
        mesh.world_size * (per_layer + 2 * shape.num_layers * experts // mesh.ep) // mesh.pp
        for mesh, experts in ((trainer, shape.num_experts), (engine, num_slots))
    )
    if tensors > MAX_RANK_TENSORS:
        raise ValueError(
            f"{trainer.world_size} trainer ranks hold about {tensors} tensors in all, and a plan is made for at most "
            f"{MAX_RANK_TENSORS}; plan with a smaller dp, which changes little but the number of ranks"
        )
    elements = (
        shape.num_layers
        * shape.hidden
        * (3 * num_slots * shape.expert_ffn + 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim)
        + 2 * shape.vocab * shape.hidden
    )
    if (pieces := 2 * elements // piece_bytes) > MAX_PIECES:
        raise ValueError(
            f"a version of {2 * elements} bytes would need about {pieces} messages of --piece-bytes {piece_bytes}, and "
            f"a plan has at most {MAX_PIECES}; take larger messages"
        )
