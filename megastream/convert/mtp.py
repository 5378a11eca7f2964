"""Layers of multi-token prediction: how Megatron's files name them, and whether the files at hand have them.

Our names count them behind the decoder's layers, as Hugging Face's do, Megatron's from 0 on. Inside one, the decoder
layer is `transformer_layer` in keys of `torch_dist` and in megatron-core 0.16, later `mtp_model_layer`: both are read,
the first is written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from megastream.convert.model import Model
from megastream.convert.types import ConvertError, Form, Holding
from megastream.layout.only import only

_MEGATRON = re.compile(r"mtp\.layers\.(\d+)\.(?:(?:transformer_layer|mtp_model_layer)\.)?(.+)")
_CANONICAL = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_BESIDE = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")
"""What such a layer has beside its decoder layer."""


def canonical_name(name: str, model: Model) -> str:
    """Our name of a parameter of Megatron's; all that is not of these layers stays. ConvertError for layers that the
    model does not have."""
    match = _MEGATRON.fullmatch(name)
    if match is None:
        return name
    shape = model.shape
    if not model.family.has_mtp:
        raise ConvertError(
            f"{name}: the table of family {model.family.name} has no rows for multi-token prediction; save it without"
        )
    if int(match[1]) >= shape.mtp_layers:
        raise ConvertError(
            f"{name}: config.json says num_nextn_predict_layers is {shape.mtp_layers}; give it the number of trained "
            "ones, or name another with --config"
        )
    return f"decoder.layers.{shape.num_layers + int(match[1])}.{match[2]}"


def megatron_name(name: str, model: Model) -> str:
    """The inverse of `canonical_name`."""
    match = _CANONICAL.fullmatch(name)
    if match is None or (layer := int(match[1]) - model.shape.num_layers) < 0:
        return name
    inside = match[2] if match[2].startswith(_BESIDE) else f"transformer_layer.{match[2]}"
    return f"mtp.layers.{layer}.{inside}"


def as_held(
    model: Model, holdings: Sequence[Holding], forms: Collection[Form]
) -> tuple[Model, tuple[Holding, ...], tuple[str, ...]]:
    """The model as files have it that were read as config.json declares it: with these layers if one of them holds any.

    Where one of the `forms` (of all that is read and written) has no place for them, they are taken out of model and
    holdings, and their tensors are returned by name. ConvertError for a tied head in Megatron's forms: its last stage
    then has a second one, which is never trained.
    """
    if not model.shape.mtp_layers:
        return model, tuple(holdings), ()
    names = {spec.name for holding in holdings for layout in holding.layouts for spec in layout.tensors}
    gone = sorted(name for name in names if _is_mtp(model, name))
    if gone and "sharded_state" not in forms:
        if model.shape.tied and {"torch_dist", "mp_rank"} & set(forms):
            raise ConvertError(
                f"{holdings[0].folder}: layers of multi-token prediction with a tied head are converted from hf to hf "
                f"only; Megatron has a head of its own there. They begin with {gone[0]}"
            )
        return model, tuple(holdings), ()
    without = replace(model, shape=replace(model.shape, mtp_layers=0))
    kept = names.difference(gone)
    held = (replace(each, layouts=tuple(only(layout, kept) for layout in each.layouts)) for each in holdings)
    return without, tuple(held if gone else holdings), tuple(gone)


def _is_mtp(model: Model, name: str) -> bool:
    layer, _, _ = name.removeprefix("model.layers.").partition(".")
    return layer.isdecimal() and int(layer) >= model.shape.num_layers
