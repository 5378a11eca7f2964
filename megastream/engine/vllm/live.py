"""One vLLM rank's live weights behind the engine contract: described, read back, patched in place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megastream.engine.contract import LiveModelError, WholeLoad
from megastream.engine.vllm import buffers as live_buffers
from megastream.engine.vllm import compat, cpu_repairs
from megastream.engine.vllm.buffers import LiveBuffer, Prepared
from megastream.families import family_of, load_shape
from megastream.layout.engine import EngineParam, engine_rank_layout, whole_rank_layout
from megastream.layout.shard import RankLayout

PATCHABLE_MOE = ("TRITON", "BATCHED_TRITON", "CPU")
"""MoE backends whose live experts keep the loader's layout, or (CPU) a permutation of it that can be undone."""


class VllmLiveModel:
    """Implements engine.contract.LiveModel. Construct in the worker, after the model is loaded and before it serves.

    Raises LiveModelError when the model cannot be patched in place; the message names what and the remedy.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any):
        self._model = model
        self._config = vllm_config
        parallel = vllm_config.parallel_config
        self._coords = _coordinates(parallel)
        self._rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self._world_size = int(parallel.world_size)
        _check_config(vllm_config)
        _check_modules(model)
        self._buffers = live_buffers.collect(model, compat.is_cpu())
        for buffer in self._buffers.values():
            _check_buffer(buffer, self._rank)
        self._unused = self._find_unused()
        self._shape = load_shape(_hf_config(vllm_config))

    @property
    def rank(self) -> int:
        """Rank in the engine's world (TP x PP)."""
        return self._rank

    @property
    def names(self) -> tuple[str, ...]:
        """All buffers that the engine computes with."""
        return tuple(name for name in self._buffers if name not in self._unused)

    def describe(self) -> RankLayout:
        params = [
            EngineParam(name=b.name, shape=b.shape, dtype=b.dtype, experts=b.experts) for b in self._buffers.values()
        ]
        return engine_rank_layout(
            family_of(self._shape),
            self._shape,
            rank=self._rank,
            world_size=self._world_size,
            coords=self._coords,
            params=params,
            unused=self._unused,
        )

    def describe_whole(self) -> RankLayout:
        names = sorted({shard.tensor for shard in self.describe().shards})
        return whole_rank_layout(
            family_of(self._shape),
            self._shape,
            rank=self._rank,
            world_size=self._world_size,
            coords=self._coords,
            names=names,
        )

    def read_live(self, buffer: str) -> torch.Tensor:
        return self._buffer(buffer).read()

    def prepare(self, staging: Mapping[str, torch.Tensor]) -> Prepared:
        parts = []
        for name, flat in staging.items():
            buffer = self._buffer(name)
            parts.append(buffer.prepare(flat.view(buffer.shape)))
        return live_buffers.merge(parts)

    def commit(self, prepared: Prepared) -> None:
        live_buffers.apply(prepared)

    def load_whole(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> WholeLoad:
        started = time.perf_counter()
        try:
            compat.reload_checkpoint(self._model, self._config.model_config, tensors)
        finally:
            loaded = time.perf_counter()
            cpu_repairs.repack_experts(self._model)
        return WholeLoad(load_s=loaded - started, repair_s=time.perf_counter() - loaded)

    def _buffer(self, name: str) -> LiveBuffer:
        if name not in self._buffers:
            raise LiveModelError(f"engine rank {self._rank} has no parameter {name}; its plan is for another layout")
        return self._buffers[name]

    def _find_unused(self) -> tuple[str, ...]:
        """Copies that Qwen3-MoE keeps on a pipeline stage that never reads them."""
        stage, num_stages = self._coords["pp"], self._coords["pp_size"]
        first, last = stage == 0, stage == num_stages - 1
        read_here = {"model.embed_tokens.weight": first, "model.norm.weight": last, "lm_head.weight": last}
        return tuple(name for name in self._buffers if not read_here.get(name, True))


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


def _check_config(vllm_config: Any) -> None:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    tied = bool(model.hf_config.tie_word_embeddings)
    refusals = (
        (model.quantization, f"weights are quantized ({model.quantization})", "serve an unquantized checkpoint"),
        (vllm_config.lora_config, "LoRA is enabled", "leave out --enable-lora"),
        (parallel.enable_eplb, "experts are rebalanced while serving (EPLB)", "leave out --enable-eplb"),
        (vllm_config.speculative_config, "a draft model is in use", "leave out --speculative-config"),
        (compat.in_data_parallel(vllm_config), "several engine cores share the model", "use --data-parallel-size 1"),
        (
            tied and parallel.pipeline_parallel_size > 1,
            "embedding and head are tied across pipeline stages",
            "use --pipeline-parallel-size 1",
        ),
        (model.enable_sleep_mode, "sleep mode drops weights", "leave out --enable-sleep-mode"),
    )
    for refused, what, remedy in refusals:
        if refused:
            raise LiveModelError(f"this engine cannot be patched in place: {what}; {remedy}")


def _check_modules(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if compat.is_adapted(module):
            raise LiveModelError(f"{name} is wrapped by LoRA and cannot be patched in place; leave out --enable-lora")
        if not compat.is_experts(module):
            continue
        backend = compat.moe_backend(module)
        if backend not in PATCHABLE_MOE:
            raise LiveModelError(
                f"{name} uses the MoE backend {backend}, whose weights have a private layout; "
                f"patchable are {', '.join(PATCHABLE_MOE)}: serve with --moe-backend triton"
            )


def _check_buffer(buffer: LiveBuffer, rank: int) -> None:
    live = buffer.parameter
    if live.numel() == 0 and isinstance(buffer, live_buffers.PackedLinear):
        return
    if tuple(live.shape) != buffer.shape or not live.is_contiguous():
        raise LiveModelError(
            f"{buffer.name} on engine rank {rank} is live as {tuple(live.shape)}, but the loader fills {buffer.shape}: "
            "padded or repacked weights cannot be patched in place; choose a TP size that needs no padding, or EP"
        )
