"""One trainer process of bench_finality.py: models and their steps."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from bench_finality_figures import ABORTING
from bench_finality_lanes import DEADLINE_S, PIECE_BYTES, Addresses, open_lanes

from megastream.families import family_of, load_shape
from megastream.layout.mesh import parse_engine_mesh
from megastream.layout.synthetic import engine_layouts
from megastream.plan import build_plan
from megastream.plan.types import Piece, Plan
from megastream.protocol.header import PieceHeader
from megastream.trainer import compat, model
from megastream.trainer.adapter import MegatronAdapter, mesh_coords
from megastream.trainer.config import TrainerConfig
from megastream.trainer.early import EarlyStepper
from megastream.trainer.emit import Emitter
from megastream.trainer.model import TokenBatch
from megastream.trainer.stepper import Listener, Stepper

SEQUENCE, BATCH, BLOCK_STEPS, VOCAB, EXPERTS = 128, 2, 2, 2048, 8


@dataclass
class Model:
    """One model with its policy, on one rank. Times are those of a clock that all processes of a machine share."""

    config: TrainerConfig
    chunks: list[Any]
    optimizer: Any
    stepper: Stepper | None = None
    emitter: Emitter | None = None
    plan: Plan | None = None
    bucket_elements: int = 0
    lanes: dict[int, Any] = field(default_factory=dict)
    version: int = 0
    attempt: int = 0
    aborts: int = 0
    backward_end: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)

    def opens(self) -> None:
        assert self.emitter is not None
        if not self.emitter.is_packed_within(DEADLINE_S):
            raise RuntimeError(f"the version before was not packed within {DEADLINE_S:g} s")
        if self.version:
            self.steps[-1]["slot_wait_s"] = self.emitter.drain().wait_s
        self.version, self.attempt = self.version + 1, 0
        self.emitter.begin(self.version, 0)

    def withdrawn(self) -> None:
        assert self.emitter is not None
        self.emitter.revoke()
        self.emitter.drain()
        self.attempt, self.aborts = self.attempt + 1, self.aborts + 1
        self.emitter.begin(self.version, self.attempt)


class Rank:
    """Builds and steps the models of one process; every rank makes the same calls."""

    def __init__(self, rank: int, options: argparse.Namespace, init_method: str, addresses: Addresses) -> None:
        self.rank, self.options, self._addresses = rank, options, addresses
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        world = options.pp * options.dp
        model.start_process_group(
            self._config(0.0), rank=rank, world_size=world, init_method=init_method, deadline_s=DEADLINE_S
        )

    def build(self, name: str) -> Model:
        # Clipping is switched on and never needed, always needed, or off.
        policy, _, ownership = name.partition("+")
        chunks, optimizer = model.build(config := self._config({"early": 0.0, ABORTING: 1e-3}.get(policy, 1e6)))
        built = Model(config, chunks, optimizer)
        finalize = chunks[0].config.finalize_model_grads_func

        def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
            built.backward_end = time.perf_counter()
            return finalize(*args, **kwargs)

        chunks[0].config.finalize_model_grads_func = finalize_model_grads
        if not name.startswith("stock"):
            self._attach(built, name, "speculative" if policy == ABORTING else policy, ownership or "replica")
        return built

    def block(self, built: Model, index: int, microbatches: int | None = None) -> float:
        """Seconds of a block of steps on this rank, until all that they emit has left."""
        dist.barrier()
        begin = time.perf_counter()
        for step in range(BLOCK_STEPS):
            self._step(built, index * BLOCK_STEPS + step, microbatches or self.options.microbatches)
        if built.emitter is not None:
            built.steps[-1]["slot_wait_s"] = built.emitter.drain().wait_s
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def memory(self, built: Model) -> dict[str, float]:
        """Peak of what one step allocates, what is kept for undoing, and the largest bucket, in fp32 copies of this
        rank's shard."""
        shard_bytes = 4 * sum(shard.main.numel() for shard in compat.main_shards(built.optimizer))
        stepper = built.stepper
        undo = stepper.undo if isinstance(stepper, EarlyStepper) else None
        dist.barrier()
        peak = self._peak_bytes(built)
        return {
            "peak_bytes": peak,
            "shard_bytes": shard_bytes,
            "bucket": 4 * built.bucket_elements / shard_bytes,
            "kept": (undo.num_bytes if undo is not None else 0) / shard_bytes,
        }

    def close(self, built: Model) -> None:
        """Ends threads and lanes, so that who receives ends, too."""
        if built.emitter is not None:
            built.emitter.close()

    def seen(self, built: Model) -> dict[str, Any]:
        """What this rank saw of all steps behind the warm-up."""
        if built.plan is None:
            return {}
        units: dict[str, int] = {}
        for piece in built.plan.pieces:
            units[piece.unit] = units.get(piece.unit, 0) + piece.num_bytes
        sent: dict[tuple[int, int], list[tuple[float, str, int]]] = {}
        for lane in built.lanes.values():
            for version, attempt, at, unit, size in lane.sent:
                sent.setdefault((version, attempt), []).append((at, unit, size))
        steps = [{**step, "sent": sent.get((step["version"], step["attempt"]), [])} for step in built.steps]
        return {
            "steps": steps[8:],
            "plan_bytes": built.plan.payload_bytes,
            "plan_pieces": len(built.plan.pieces),
            "unit_bytes": units,
            "aborts": built.aborts,
        }

    # ---- inside

    def _config(self, clip: float) -> TrainerConfig:
        options = self.options
        return TrainerConfig(
            layers=options.layers,
            hidden=options.hidden,
            heads=options.hidden // 32,
            kv_groups=2,
            head_dim=32,
            experts=EXPERTS,
            top_k=2,
            expert_ffn=options.hidden,
            vocab=VOCAB,
            max_sequence=SEQUENCE,
            pp=options.pp,
            ep=options.ep,
            clip=clip,
            lr=1e-4,
        )

    def _attach(self, built: Model, name: str, finality: Any, ownership: Any) -> None:
        shape = load_shape(_hf_config(built.config))
        family, options = family_of(shape), self.options
        adapter = MegatronAdapter(
            built.chunks,
            built.optimizer,
            family,
            shape,
            bucket_elements=options.bucket,
            finality=finality,
            ownership=ownership,
        )
        built.bucket_elements = max(data.numel() for data in adapter.buffers.values())
        layouts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts, adapter.describe())
        engines = engine_layouts(family, shape, parse_engine_mesh("tp1 pp2"))
        built.plan = build_plan(
            layouts,
            engines,
            family,
            kind="stream",
            piece_bytes=PIECE_BYTES,
            experts_per_unit=EXPERTS,
            finality=finality,
        )
        targets = {piece.target for piece in built.plan.by_source.get(self.rank, ())}
        device = next(iter(adapter.buffers.values())).device
        built.lanes = open_lanes(self._addresses, name, self.rank, targets, device)
        built.emitter = Emitter(
            built.plan,
            self.rank,
            adapter.buffers,
            built.lanes,
            _header,
            slots_per_target=options.slots,
            deadline_s=DEADLINE_S,
        )
        listener = Listener(built.emitter.final, built.opens, built.withdrawn)
        built.stepper = adapter.stepper(finality, listener, max_abort_rate=1.0)  # `aborting` must not fall back

    def _step(self, built: Model, index: int, count: int) -> None:
        begin = time.perf_counter()
        generator = torch.Generator().manual_seed(index * 1000 + mesh_coords()["dp"])
        size = (BATCH, SEQUENCE + 1)
        batches = (TokenBatch(torch.randint(0, VOCAB, size, generator=generator)) for _ in range(count))
        model.train_step(built.chunks, batches, num_microbatches=count, seq_length=SEQUENCE, micro_batch_size=BATCH)
        if built.stepper is None:
            built.optimizer.step()
            return
        assert built.stepper.step().ok
        step = dict(begin=begin, backward_end=built.backward_end, end=time.perf_counter(), slot_wait_s=0.0)
        built.steps.append({**step, "version": built.version, "attempt": built.attempt})

    def _peak_bytes(self, built: Model) -> int:
        """Above what was allocated before. One microbatch per step: its activations would hide what a step takes."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.block(built, 50, 1)
            return torch.cuda.max_memory_allocated() - before
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self.block(built, 50, 1)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return peak


def _header(piece: Piece, version: int, attempt: int, checksum: int) -> PieceHeader:
    return PieceHeader(
        kind="piece",
        run_id="bench",
        incarnation=1,
        attachment="bench",
        version=version,
        attempt=attempt,
        unit=piece.unit,
        plan_digest="",
        source=piece.source,
        target=piece.target,
        seq=piece.seq,
        num_bytes=piece.num_bytes,
        checksum=checksum,
    )


def _hf_config(config: TrainerConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.expert_ffn,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_groups,
        "head_dim": config.head_dim,
        "num_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_ffn,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "norm_topk_prob": True,
        "rms_norm_eps": config.norm_eps,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": config.max_sequence,
        "torch_dtype": config.dtype,  # what the engine serves, and the lanes carry
    }
