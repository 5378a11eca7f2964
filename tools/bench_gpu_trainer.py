"""The trainer of tools/bench_gpu.py: Megatron's parameter buffers of one rank on a GPU, without a model around them.

It runs in a process of its own and does what it is told over a pipe: an order is (name, arguments), the answer what the
method of that name returns, or the error's text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megastream.control.redis_log import RedisLog
from megastream.engine.digest import tensor_digest
from megastream.families import family_of, load_shape
from megastream.layout.mesh import parse_trainer_mesh
from megastream.layout.shard import RankLayout, Shard
from megastream.layout.synthetic import trainer_layouts
from megastream.sync import TrainerSettings, TrainerSync

DEADLINE_S = 200.0
RAW_BYTES = 4 << 30
RAW_REPEATS = 5


class ParameterBuffers:
    """What TrainerSync needs of a trainer. `layout` is what Megatron's buckets have, in one piece per bucket."""

    library = "parameter buffers alone"

    def __init__(self, model: Path, device: torch.device, bucket_elements: int) -> None:
        shape = load_shape(model)
        self.family = family_of(shape)
        mesh = parse_trainer_mesh("tp1 pp1 ep1 dp1")
        self.layout: RankLayout = trainer_layouts(self.family, shape, mesh, bucket_elements=bucket_elements)[0]
        self.buffers = {
            spec.name: torch.empty(spec.num_elements, dtype=getattr(torch, spec.dtype), device=device)
            for spec in self.layout.buffers
        }

    def describe(self) -> RankLayout:
        return self.layout

    def fill(self, seed: int) -> None:
        """New weights; the same for the same seed."""
        generator = torch.Generator(next(iter(self.buffers.values())).device).manual_seed(seed)
        for buffer in self.buffers.values():
            buffer.normal_(0, 0.02, generator=generator)


class Checkpoint:
    """The buffers' tensors under their names in a checkpoint: views where a tensor lies in one piece, else copies."""

    def __init__(self, trainer: ParameterBuffers) -> None:
        self._trainer = trainer
        self._shards: dict[str, list[Shard]] = {}
        for shard in trainer.layout.shards:
            self._shards.setdefault(shard.tensor, []).append(shard)
        self._specs = {spec.name: spec for spec in trainer.layout.tensors if spec.name in self._shards}
        self._copies: dict[str, torch.Tensor] = {}

    def names(self) -> list[str]:
        return sorted(self._specs)

    def describe(self) -> dict[str, list[Any]]:
        """As vLLM's update wants it."""
        specs = [self._specs[name] for name in self.names()]
        return {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
        }

    def refresh(self) -> None:
        """What is copied follows the buffers; views need nothing."""
        for name, shards in self._shards.items():
            if len(shards) == 1 and self._region(shards[0]).is_contiguous():
                continue
            spec = self._specs[name]
            target = self._copies.setdefault(
                name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._region(shards[0]).device)
            )
            for shard in shards:
                target[tuple(slice(low, high) for low, high in zip(shard.box.lo, shard.box.hi, strict=True))].copy_(
                    self._region(shard)
                )

    def tensor(self, name: str) -> torch.Tensor:
        return self._copies[name] if name in self._copies else self._region(self._shards[name][0])

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.tensor(name)) for name in self.names())

    def _region(self, shard: Shard) -> torch.Tensor:
        buffer = self._trainer.buffers[shard.buffer]
        return buffer.as_strided(shard.box.shape, shard.strides, buffer.storage_offset() + shard.offset)


class Trainer:
    """The orders. Every method may be called by the other process; all return plain data."""

    def __init__(self, model: Path, bucket_elements: int) -> None:
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        self._buffers = ParameterBuffers(model, self._device, bucket_elements)
        self._checkpoint = Checkpoint(self._buffers)
        self._log: RedisLog | None = None
        self._sync: TrainerSync | None = None
        self._group: Any = None
        self.fill(1)

    def about(self) -> dict[str, Any]:
        sizes = [buffer.nbytes for buffer in self._buffers.buffers.values()]
        tensors = self._checkpoint.names()
        return {"buffers": len(sizes), "bytes": sum(sizes), "tensors": len(tensors), **self._checkpoint.describe()}

    def fill(self, seed: int) -> None:
        self._buffers.fill(seed)
        self._checkpoint.refresh()
        torch.cuda.synchronize(self._device)

    def digests(self, params: dict[str, list[list[str]]]) -> dict[str, str]:
        """Of the engine's parameters, each made of a checkpoint's tensors: joined in a group, and groups stacked."""
        found = {}
        for param, groups in params.items():
            joined = [torch.cat([self._checkpoint.tensor(name) for name in group]) for group in groups]
            found[param] = tensor_digest(torch.stack(joined) if len(joined) > 1 else joined[0])
        return found

    # ---- ours

    def attach(self, url: str, piece_bytes: int, slots: int, experts_per_unit: int) -> float:
        """Seconds until the base version was live."""
        begin = time.monotonic()
        self._log = RedisLog(url, "bench", reconnect_s=DEADLINE_S)
        settings = TrainerSettings(
            launch="bench", piece_bytes=piece_bytes, slots_per_target=slots, experts_per_unit=experts_per_unit
        )
        self._sync = TrainerSync(self._log, rank=0, world_size=1, trainer=self._buffers, settings=settings)
        self._sync.attach("stream", base_version=1)  # not what the engine began with, so it becomes live
        return time.monotonic() - begin

    def update(self) -> dict[str, Any]:
        """One version of what the buffers hold, from final to live."""
        sync = self._sync
        assert sync is not None
        version, before = sync.next_version, len(sync.reports)
        sync.begin(version, version)
        begin = time.monotonic()
        for name in self._buffers.buffers:
            sync.final(name)
        sync.accept()
        sync.finish()
        while len(sync.reports) == before:
            time.sleep(0.0005)
            if time.monotonic() - begin > DEADLINE_S:
                raise TimeoutError(f"version {version} was not sent within {DEADLINE_S:g} s")
        sent_s = time.monotonic() - begin
        sync.wait_committed(version, DEADLINE_S)
        live_s = time.monotonic() - begin
        return {"version": version, "bytes": sync.reports[-1].payload_bytes, "sent_s": sent_s, "live_s": live_s}

    def detach(self) -> None:
        assert self._sync is not None and self._log is not None
        self._sync.finished("the benchmark is done")
        self._sync.close()
        self._log.close()
        self._sync = self._log = None

    # ---- stock

    def join_stock(self, port: int) -> None:
        """vLLM's own group for updates; blocks until the engine's worker is in it, too."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._group = NCCLWeightTransferEngine.trainer_init(
            {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        )

    def send_stock(self, packed: bool) -> None:
        """All tensors over vLLM's own sender. Returns when they are out."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        NCCLWeightTransferEngine.trainer_send_weights(
            self._checkpoint.items(), {"group": self._group, "packed": packed}
        )
        torch.cuda.synchronize(self._device)

    # ---- raw

    def raw(self, other_index: int) -> dict[str, float]:
        """Bytes per second of a copy within this GPU (each byte read and written), and to the other one."""
        source = torch.zeros(RAW_BYTES, dtype=torch.uint8, device=self._device)
        rates = {"device_copy": _copy_rate(torch.empty_like(source), source)}
        if other_index != self._device.index:
            rates["peer_copy"] = _copy_rate(torch.empty_like(source, device=f"cuda:{other_index}"), source)
        torch.cuda.empty_cache()
        return rates


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    rates = []
    for _ in range(RAW_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(1e3 * source.nbytes / begin.elapsed_time(end))
    return statistics.median(rates)


def serve(pipe: Connection, model: str, bucket_elements: int) -> None:
    """The process: orders until None comes, or the other end is gone."""
    trainer = Trainer(Path(model), bucket_elements)
    pipe.send((True, None))
    while (order := pipe.recv()) is not None:
        name, arguments = order
        try:
            pipe.send((True, getattr(trainer, name)(*arguments)))
        except (RuntimeError, ValueError, TimeoutError, OSError) as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
