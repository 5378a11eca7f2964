"""The type of every tensor in a target: as stored or as asked for, but for the few that one side keeps in fp32."""

from __future__ import annotations

from collections import Counter

from megastream.convert.model import Model
from megastream.convert.types import ConvertError, Dtype, Form, Holding
from megastream.families.types import Holder

_SIDES: dict[Form, Holder] = {"hf": "file", "torch_dist": "trainer", "mp_rank": "trainer", "sharded_state": "engine"}


def target_dtypes(holding: Holding, model: Model, to: Form, asked: Dtype | None) -> dict[str, str]:
    """By tensor. What the family's table gives to some side in fp32 is fp32 where the form's side is one of them, and
    the type of most other elements where it is not; all else stays what it is, or is bf16 if that is asked for.

    ConvertError names a tensor that the source stores in several types.
    """
    stored, volumes = _stored(holding)
    if asked == "bfloat16":
        stored = {name: "bfloat16" for name in stored}
    kept = _kept_in_fp32(model)
    usual: Counter[str] = Counter()
    for name, dtype in stored.items():
        if name not in kept:
            usual[dtype] += volumes[name]
    most = usual.most_common(1)[0][0]
    return {
        name: ("float32" if _SIDES[to] in kept[name] else most) if name in kept else dtype
        for name, dtype in stored.items()
    }


def _stored(holding: Holding) -> tuple[dict[str, str], dict[str, int]]:
    found: dict[str, str] = {}
    volumes: dict[str, int] = {}
    for layout in holding.layouts:
        dtypes = {spec.name: spec.dtype for spec in layout.buffers}
        for shard in layout.shards:
            dtype = dtypes[shard.buffer]
            volumes[shard.tensor] = volumes.get(shard.tensor, 0) + shard.box.volume
            if found.setdefault(shard.tensor, dtype) != dtype:
                raise ConvertError(
                    f"{shard.tensor} is {dtype} in {holding.where(layout.rank, shard.buffer)} and "
                    f"{found[shard.tensor]} elsewhere; take the files of one save"
                )
    return found, volumes


def _kept_in_fp32(model: Model) -> dict[str, tuple[Holder, ...]]:
    """Tensors that some side keeps in fp32, with these sides. No expert's are among them."""
    return {
        source.name.format(layer=layer): row.fp32
        for row in model.family.rows
        if row.fp32
        for source in row.sources
        for layer in range(model.shape.num_layers + model.shape.mtp_layers)
    }
