"""MegatronAdapter: what the rest of megastream sees of a megatron-core trainer. One per trainer rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megastream.families.family import Family
from megastream.families.types import ModelShape
from megastream.layout.shard import BufferSpec, RankLayout
from megastream.layout.trainer import Ownership, TrainerParam, trainer_rank_layout
from megastream.trainer import compat
from megastream.trainer.buckets import BUCKET_ELEMENTS, cut
from megastream.trainer.compat_grads import late_params
from megastream.trainer.finality import make_stepper, refuse_finality
from megastream.trainer.hf_files import HuggingFaceFiles, tied_names
from megastream.trainer.policies import MAX_ABORT_RATE, Finality, is_streamed
from megastream.trainer.refusals import refuse_family, refuse_mtp, refuse_unsupported
from megastream.trainer.router_bias import BUFFER, RouterBiases
from megastream.trainer.stepper import Listener, Stepper, Trained

_LAYER = re.compile(r"(decoder|mtp)\.layers\.\d+$")
_INSIDE_LAYER = re.compile(r"((?:decoder|mtp)\.layers\.\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.*)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_CANONICAL_EXPERT = re.compile(r"(decoder\.layers\.\d+)\.mlp\.experts\.local_experts\.(\d+)\.")
_CANONICAL_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
# TransformerEngine fuses a norm into the linear behind it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class MegatronAdapter:
    """Names, buckets, layout and steps of this rank's model chunks.

    `chunks` are megatron DDP chunks, one per virtual stage, `optimizer` the chained distributed optimizer over them.
    Buckets end at `bucket_elements`; for a `finality` that streams out of the backward also where a unit ends, so that
    a unit is final as early as it can be. Both sizes are those of the run. With `ownership` "slice" each data-parallel
    rank sends what it steps, before parameters are gathered; with "replica" any of them sends, after it.
    UnsupportedTrainer names a version or a setting under which it is not known when a weight is final, also for the
    chosen `finality` alone; ValueError a parameter, or a router's bias, that the family has no rule for.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        family: Family,
        shape: ModelShape,
        *,
        bucket_elements: int = BUCKET_ELEMENTS,
        finality: Finality = "pipelined",
        experts_per_unit: int = 8,
        ownership: Ownership = "replica",
    ) -> None:
        self.library = f"megatron-core {compat.check_version()}"
        compat.install()
        refuse_family(family)
        refuse_unsupported(chunks, optimizer)
        refuse_mtp(chunks, family, shape)
        refuse_finality(finality, chunks, optimizer)
        self._chunks, self._optimizer, self.family = chunks, optimizer, family
        self._shape = replace(shape, mtp_layers=chunks[0].config.mtp_num_layers or 0)
        self._coords, self._ownership, self._finality = mesh_coords(), ownership, finality
        local_experts = shape.num_experts // self._coords["ep_size"]
        self._names: dict[torch.nn.Parameter, str] = {}
        biases: list[tuple[str, Any]] = []
        for chunk in chunks:
            canonical = _renaming(chunk, shape.num_layers, local_experts, self._coords)
            self._names |= {param: canonical(name) for name, param in chunk.named_parameters()}
            biases += [(canonical(name), router) for name, router in compat.routers_with_bias(chunk)]
        self._biases = RouterBiases(biases) if biases else None
        if is_streamed(finality):
            borders = {
                param: _unit_border(name, local_experts, experts_per_unit) for param, name in self._names.items()
            }
            late = late_params(chunks)
            self._buckets = cut(chunks, optimizer, bucket_elements, border_of=borders.__getitem__, late=late)
        else:
            self._buckets = cut(chunks, optimizer, bucket_elements)
        self._layout(ownership, mtp=True)  # a parameter without a rule ends the start, not the first attach

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Name -> flat tensor that leaves: live buckets in model dtype, in the order in which they become final.

        The last is the routers' biases, where the model has any (fp32): a copy that follows the model until a stepper
        is made, and from then on its steps. So load weights before that.
        """
        buffers = {bucket.name: bucket.data for bucket in self._buckets}
        return buffers if self._biases is None else {**buffers, BUFFER: self._biases.current()}

    def describe(self) -> RankLayout:
        """This rank's layout, in which layers of multi-token prediction are listed as unused. No communication."""
        return self._layout(self._ownership, mtp=False)

    def _layout(self, ownership: Ownership, *, mtp: bool) -> RankLayout:
        params = [
            TrainerParam(self._names[param], tuple(param.shape), bucket.name, offset)
            for bucket in self._buckets
            for param, offset in bucket.params
        ]
        owned = {bucket.name: bucket.owned for bucket in self._buckets}
        if self._biases is not None:  # equal on all ranks of a stage, so every one of them owns it
            params += [TrainerParam(name, shape, BUFFER, offset) for name, shape, offset in self._biases.places]
            owned[BUFFER] = (0, self._biases.data.numel())
        unused = [] if mtp else [param.name for param in params if self._is_mtp(param.name)]
        buffers = [
            BufferSpec(name, data.numel(), str(data.dtype).removeprefix("torch."))
            for name, data in self.buffers.items()
        ]
        return trainer_rank_layout(
            self.family,
            self._shape,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            coords=self._coords,
            params=[param for param in params if param.name not in unused],
            buffers=tuple(buffers),
            ownership=ownership,
            owned=owned,
            unused=unused,
        )

    def _is_mtp(self, name: str) -> bool:
        layer = _CANONICAL_LAYER.match(name)
        return layer is not None and int(layer[1]) >= self._shape.num_layers

    def stepper(self, finality: Finality, listener: Listener, *, max_abort_rate: float = MAX_ABORT_RATE) -> Stepper:
        """What replaces `optimizer.step()`; it tells `listener` of this rank's buckets. See `make_stepper`.

        UnsupportedTrainer when buckets of this adapter do not end where such a policy needs it.
        """
        if is_streamed(finality) and not is_streamed(self._finality):
            raise compat.UnsupportedTrainer(
                f"finality {finality!r} steps out of the backward, but the buckets of this adapter were cut for "
                f"{self._finality!r}; make it with MegatronAdapter(..., finality={finality!r})"
            )
        if self._biases is not None:
            self._biases.hold()
        slices = self._ownership == "slice"
        trained = Trained(self._chunks, self._optimizer, self._buckets, self._names.__getitem__, slices, self._biases)
        return make_stepper(finality, trained, listener, max_abort_rate=max_abort_rate)

    @torch.no_grad()
    def load_hf(self, folder: str | Path) -> None:
        """Loads this rank's part of a Hugging Face checkpoint (safetensors), and resets the fp32 masters to it.

        Every rank calls it; each reads only its own boxes, and nothing is communicated. Moments are left as they are,
        so call it before the first step. ValueError names a file that cannot be read, a tensor that is missing, stored
        twice, of another shape or quantized, a tied head that differs, or a parameter that nothing fills.
        """
        compat.install()
        buffers, layout = self.buffers, self._layout("replica", mtp=True)
        tied = tied_names(self.family, self._shape)
        with HuggingFaceFiles(Path(folder), layout.tensors, tied) as checkpoint:
            for shard in layout.shards:
                target = buffers[shard.buffer].as_strided(
                    shard.box.shape, shard.strides, buffers[shard.buffer].storage_offset() + shard.offset
                )
                target.copy_(checkpoint.read(shard))
        filled = sum(shard.box.volume for shard in layout.shards)
        needed = sum(param.numel() - self._padding(param) for bucket in self._buckets for param, _ in bucket.params)
        if self._biases is not None:
            self._biases.put()
            needed += self._biases.data.numel()
        if filled != needed:
            raise ValueError(
                f"rank {layout.rank}: {folder} fills {filled} of {needed} parameter elements; its config.json or its "
                f"family's table leaves out parameters that this model has"
            )
        # Without this the next step would write the old masters back over what was just loaded.
        self._optimizer.reload_model_params()

    def _padding(self, param: torch.nn.Parameter) -> int:
        """Elements of vocabulary rows that only fill up this rank's part; no checkpoint knows them."""
        if self._names[param] not in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return 0
        rows, hidden = param.shape
        real_rows = min(max(self._shape.vocab - self._coords["tp"] * rows, 0), rows)
        return int((rows - real_rows) * hidden)

    def save_raw(self, folder: str | Path) -> Path:
        """Writes this rank's weights as megatron holds them, under canonical names, to `rank<r>.safetensors`.

        Metadata: `rank`, `world_size` and every mesh coordinate, as text. An oracle can rebuild the model from these
        files without our layout code. Every rank calls it; nothing is communicated.
        """
        rank = dist.get_rank()
        path = Path(folder) / f"rank{rank}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {name: param.detach() for param, name in self._names.items()}
        held |= {} if self._biases is None else self._biases.live
        tensors = {name: value.cpu().contiguous().clone() for name, value in held.items()}
        metadata = {"rank": str(rank), "world_size": str(dist.get_world_size())}
        metadata |= {axis: str(value) for axis, value in self._coords.items()}
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata=metadata)
        partial.replace(path)
        return path


def mesh_coords() -> dict[str, int]:
    """This rank's place on all axes of megatron's mesh and their sizes: tp, tp_size, cp, etp, ..., edp (expert DP)."""
    from megatron.core import parallel_state as mesh

    axes = {
        "tp": (mesh.get_tensor_model_parallel_rank(), mesh.get_tensor_model_parallel_world_size()),
        "cp": (mesh.get_context_parallel_rank(), mesh.get_context_parallel_world_size()),
        "etp": (mesh.get_expert_tensor_parallel_rank(), mesh.get_expert_tensor_parallel_world_size()),
        "pp": (mesh.get_pipeline_model_parallel_rank(), mesh.get_pipeline_model_parallel_world_size()),
        "ep": (mesh.get_expert_model_parallel_rank(), mesh.get_expert_model_parallel_world_size()),
        "dp": (mesh.get_data_parallel_rank(), mesh.get_data_parallel_world_size()),
        "edp": (mesh.get_expert_data_parallel_rank(), mesh.get_expert_data_parallel_world_size()),
    }
    return {key: value for axis, (at, size) in axes.items() for key, value in ((axis, at), (f"{axis}_size", size))}


def _renaming(chunk: Any, num_layers: int, experts_per_rank: int, coords: dict[str, int]) -> Callable[[str], str]:
    """From a name in a chunk to the canonical one: no `module.` prefix, global layer and expert numbers, names of the
    local spec, and layers of multi-token prediction counted behind the decoder's."""
    first = {"decoder": -1, "mtp": num_layers - 1}
    layers = {
        match[0]: f"decoder.layers.{first[match[1]] + module.layer_number}"
        for name, module in chunk.named_modules()
        if (match := _LAYER.search(name))
    }
    first_expert = coords["ep"] * experts_per_rank

    def canonical(name: str) -> str:
        name = re.sub(r"^(module\.)+", "", name)
        local = _INSIDE_LAYER.match(name)
        return name if local is None else f"{layers[local[1]]}.{_inside_layer(local[2], first_expert)}"

    return canonical


def _inside_layer(name: str, first_expert: int) -> str:
    if match := _LOCAL_EXPERT.match(name):
        expert, linear = int(match[1]), match[2]
    elif match := _GROUPED_EXPERT.match(name):
        expert, linear = int(match[2]), match[1]
    else:
        return _FUSED_NORMS.get(name, name)
    return f"mlp.experts.local_experts.{first_expert + expert}.{linear}.weight"


def _unit_border(name: str, local_experts: int, experts_per_unit: int) -> tuple[str, int]:
    """Equal for parameters of one unit, as far as this rank holds it; the same on all expert-parallel ranks."""
    if match := _CANONICAL_EXPERT.match(name):
        return match[1], int(match[2]) % local_experts // experts_per_unit
    layer = _CANONICAL_LAYER.match(name)
    return (layer[0] if layer else name), -1
