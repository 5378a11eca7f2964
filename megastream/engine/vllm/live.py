"""One vLLM rank's live weights behind the engine contract: described, read back, patched in place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch

from megastream.engine.contract import NO_RANGES, LiveModelError, WholeLoad
from megastream.engine.parts import Ranges
from megastream.engine.vllm import buffers as live_buffers
from megastream.engine.vllm import compat, cpu_repairs
from megastream.engine.vllm.buffers import LiveBuffer, Prepared
from megastream.engine.vllm.expert_use import ExpertUse
from megastream.engine.vllm.refusals import (
    refuse_buffer,
    refuse_config,
    refuse_counting,
    refuse_derived,
    refuse_modules,
)
from megastream.families import Family, ModelShape, family_of, load_shape
from megastream.layout.engine import EngineParam, engine_rank_layout, whole_rank_layout
from megastream.layout.shard import RankLayout


class VllmLiveModel:
    """Implements engine.contract.LiveModel. Construct in the worker, after the model is loaded.

    An engine that cannot be patched in place still serves: only describing it raises LiveModelError, which names what
    is in the way and the remedy.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any):
        self._model = model
        self._config = vllm_config
        self._use: ExpertUse | None = None
        self._coords = _coordinates(vllm_config.parallel_config)
        self.rank = torch.distributed.get_rank() % int(vllm_config.parallel_config.world_size)
        """Rank in the engine core's world (TP x PP); torch's goes over all data-parallel cores."""
        self._where: dict[str, Any] = {
            "rank": self.rank,
            "world_size": int(vllm_config.parallel_config.world_size),
            "coords": self._coords,
        }

    @cached_property
    def buffers(self) -> dict[str, LiveBuffer]:
        """All parameters of this rank, checked to be patchable and to be all that there is of the weights."""
        refuse_config(self._config)
        refuse_modules(self._model)
        refuse_derived(self._model, self.rank)
        found = live_buffers.collect(self._model, compat.is_cpu())
        for buffer in found.values():
            refuse_buffer(buffer, self.rank)
        return found

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Copies of embedding, norm and head that many models keep on pipeline stages that never read them."""
        stage, num_stages = self._coords["pp"], self._coords["pp_size"]
        first, last = stage == 0, stage == num_stages - 1
        outer = self._family.outer_names("engine", self._shape)
        idle = {name for kind, name in outer.items() if not (first if kind == "embed" else last)}
        return tuple(name for name in self.buffers if name in idle)

    @property
    def names(self) -> tuple[str, ...]:
        """All buffers that the engine computes with."""
        return tuple(name for name in self.buffers if name not in self.unused)

    def inventory(self) -> list[dict[str, Any]]:
        """Every live parameter as vLLM's own modules have it: name, elements, bytes of one, padding, used or not.

        Nothing of it comes from a layout or a plan, so that their bytes can be measured against it.
        """
        return [
            {
                "name": buffer.name,
                "elements": prod(buffer.shape),
                "item_bytes": buffer.parameter.itemsize,
                "padding": compat.padded_rows(buffer.module) * prod(buffer.shape[1:]),
                "used": buffer.name not in self.unused,
            }
            for buffer in self.buffers.values()
        ]

    def describe(self) -> RankLayout:
        params = [
            EngineParam(name=b.name, shape=b.shape, dtype=b.dtype, experts=b.experts) for b in self.buffers.values()
        ]
        try:
            return engine_rank_layout(self._family, self._shape, params=params, unused=self.unused, **self._where)
        except ValueError as error:
            raise LiveModelError(f"this engine cannot be patched in place: {error}") from error

    def describe_whole(self) -> RankLayout:
        names = sorted({shard.tensor for shard in self.describe().shards})
        return whole_rank_layout(self._family, self._shape, names=names, **self._where)

    def read_live(self, buffer: str) -> torch.Tensor:
        return self._buffer(buffer).read()

    def prepare(self, staging: Mapping[str, torch.Tensor], ranges: Mapping[str, Ranges] = NO_RANGES) -> Prepared:
        return live_buffers.merge(buffer.prepare(new, rows) for buffer, new, rows in self._in_rows(staging, ranges))

    def commit(self, *prepared: Prepared) -> None:
        live_buffers.apply(live_buffers.merge(prepared))

    def write_live(self, staging: Mapping[str, torch.Tensor], ranges: Mapping[str, Ranges] = NO_RANGES) -> None:
        for buffer, new, rows in self._in_rows(staging, ranges):
            buffer.write(new, rows)

    def in_place(self, buffer: str) -> torch.Tensor | None:
        return self._buffer(buffer).in_place()

    def _in_rows(
        self, staging: Mapping[str, torch.Tensor], ranges: Mapping[str, Ranges]
    ) -> Iterator[tuple[LiveBuffer, torch.Tensor, slice]]:
        """Each buffer with its new values in its shape, and the rows that become live."""
        for name, flat in staging.items():
            buffer = self._buffer(name)
            new = flat.view(buffer.shape)
            for rows in [_rows(buffer, *extent) for extent in ranges[name]] if name in ranges else [live_buffers.ALL]:
                yield buffer, new, rows

    def count_experts(self, device: torch.device) -> None:
        """Counts how often experts are chosen from here on; before graphs are captured. LiveModelError says why not."""
        refuse_counting(self._config)
        self._use = ExpertUse(self._model, device)

    def expert_use(self) -> Mapping[int, Sequence[float]]:
        if self._use is None:
            raise LiveModelError(
                'this engine does not count how experts are used; start it with {"megastream": {"expert_use": true}}'
            )
        return self._use.read()

    def load_whole(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> WholeLoad:
        as_stored = ((name, full.view(self._family.file_shape(name, self._shape))) for name, full in tensors)
        begun = time.perf_counter()
        cpu_repairs.room_for_latent(self._model)
        started = time.perf_counter()
        try:
            compat.reload_checkpoint(self._model, self._config.model_config, as_stored)
        finally:
            loaded = time.perf_counter()
            cpu_repairs.repack_experts(self._model)
        repair_s = started - begun + time.perf_counter() - loaded
        return WholeLoad(load_s=loaded - started, repair_s=repair_s)

    def _buffer(self, name: str) -> LiveBuffer:
        if name not in self.buffers:
            raise LiveModelError(f"engine rank {self.rank} has no parameter {name}; its plan is for another layout")
        return self.buffers[name]

    @cached_property
    def _shape(self) -> ModelShape:
        try:
            return load_shape(_hf_config(self._config))
        except ValueError as error:
            raise LiveModelError(f"this engine cannot be patched in place: {error}") from error

    @property
    def _family(self) -> Family:
        return family_of(self._shape)


def _rows(buffer: LiveBuffer, start: int, stop: int) -> slice:
    """Elements [start, stop) of a buffer as rows of its first dim."""
    row = prod(buffer.shape[1:])
    if start % row or stop % row:
        raise LiveModelError(f"elements {start} to {stop} of {buffer.name} are no whole rows of {row} elements")
    return slice(start // row, stop // row)


def _coordinates(parallel: Any) -> dict[str, int]:
    from vllm.distributed import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    ep_size = tp.world_size if parallel.enable_expert_parallel else 1
    return {
        "tp": tp.rank_in_group,
        "tp_size": tp.world_size,
        "pp": pp.rank_in_group,
        "pp_size": pp.world_size,
        "ep": tp.rank_in_group if ep_size > 1 else 0,
        "ep_size": ep_size,
    }


def _hf_config(vllm_config: Any) -> dict[str, Any]:
    """The checkpoint's config.json as it was written."""
    from transformers import PretrainedConfig

    model = vllm_config.model_config
    config, _ = PretrainedConfig.get_config_dict(model.model, revision=model.revision)
    return dict(config)
