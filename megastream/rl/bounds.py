"""How large the numbers of a configuration may be, and which of them must fit each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megastream.rl.sections import Section

if TYPE_CHECKING:
    from megastream.rl.config import Config

_WEEK_S = 7 * 24 * 3600.0
_PER_CORE = 16

BOUNDS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**31 - 1),  # megatron adds to it, and numpy's generators take 32 bits
    "model.layers": (1, 1000),
    "model.hidden": (1, 2**17),
    "model.heads": (1, 4096),
    "model.kv_heads": (1, 4096),
    "model.head_dim": (1, 4096),
    "model.experts": (1, 4096),
    "model.top_k": (1, 4096),
    "model.expert_ffn": (1, 2**17),
    "data.train": (1, 10_000_000),
    "data.held_out": (1, 1_000_000),
    "data.seq_length": (1, 2**20),
    "trainer.ranks": (1, 1024),
    "trainer.micro_batch": (1, 2**16),
    "trainer.num_micro_batches": (1, 2**16),
    "trainer.learning_rate": (0, 1e3),
    "trainer.clip_grad": (0, 1e9),
    "trainer.bucket_elements": (1, 2**40),
    "engine.streams": (1, 2**16),
    "engine.answer_tokens": (1, 2**20),
    "engine.max_model_len": (2, 2**20),
    "engine.kv_cache_mib": (1, 2**20),
    "engine.nice": (0, 19),
    "stream.piece_mib": (2**-10, 1024),
    "stream.max_abort_rate": (0, 1),
    "stream.experts_per_unit": (1, 4096),
    "stream.slots_per_target": (1, 4096),
    "run.updates": (1, 1_000_000),
    "run.checked_updates": (0, 1_000_000),
    "run.checked_tokens": (0, 10**9),
    "deadlines.start_s": (0.1, _WEEK_S),
    "deadlines.attach_s": (0.1, _WEEK_S),
    "deadlines.step_s": (0.1, _WEEK_S),
    "deadlines.reconnect_s": (0.1, _WEEK_S),
    "deadlines.stop_s": (0.1, _WEEK_S),
}
"""Lowest and highest value of each number; what is outside is a slip, and would hang or fail only much later."""

_DEADLINES = ("start_s", "attach_s", "step_s", "save_s", "reconnect_s", "lag_s", "join_s", "alone_s")
TRAIN_BOUNDS: dict[str, tuple[float, float]] = {
    "run.seed": BOUNDS["seed"],
    "data.seq_length": BOUNDS["data.seq_length"],
    "max_abort_rate": BOUNDS["stream.max_abort_rate"],
    "bucket_elements": BOUNDS["trainer.bucket_elements"],
    "experts_per_unit": BOUNDS["stream.experts_per_unit"],
    "stream.engines": (1, 4096),
    "stream.piece_mib": BOUNDS["stream.piece_mib"],
    "stream.slots_per_target": BOUNDS["stream.slots_per_target"],
    **{f"deadlines.{name}": (0.1, _WEEK_S) for name in _DEADLINES},
}
"""The same for `megastream train`: what would be refused only behind the start of all ranks."""

MAX_PARAMETERS = 10**11
"""Of a model whose start weights are drawn on one machine."""


def bounds_refusal(
    section: Section, prefix: str = "", bounds: Mapping[str, tuple[float, float]] = BOUNDS
) -> str | None:
    """Names the first number of a configuration that is out of its bounds; None when there is none."""
    for name in section.__struct_fields__:
        value, key = getattr(section, name), prefix + name
        if isinstance(value, Section):
            if reason := bounds_refusal(value, f"{key}.", bounds):
                return reason
        elif key in bounds and not bounds[key][0] <= value <= bounds[key][1]:
            low, high = bounds[key]
            return f"{key} is {value}; it must be from {low:g} to {_exact(high)}"
    return None


def sizes_refusal(config: Config) -> str | None:
    """Names the numbers that are possible each by itself and not together; None when all fit."""
    model, trainer, engine = config.model, config.trainer, config.engine
    if engine.answer_tokens >= engine.max_model_len:
        return (
            f"engine.answer_tokens is {engine.answer_tokens} and engine.max_model_len {engine.max_model_len}; a "
            "question needs room before its answer"
        )
    for key, value in (("model.expert_ffn", model.expert_ffn), ("model.heads", model.heads)):
        if value % trainer.tp:
            return f"{key} is {value}, which trainer.tp = {trainer.tp} does not divide; choose multiples"
    if (number := parameters(config)) > MAX_PARAMETERS:
        return f"the model would have {number} parameters; a run here takes at most {MAX_PARAMETERS}"
    return None


def ranks_refusal(ranks: int) -> str | None:
    """Names a number of trainer ranks that this machine, which runs all of them, cannot carry; None when it can."""
    cores = os.cpu_count() or 1
    if ranks > _PER_CORE * cores:
        return f"trainer.ranks is {ranks}; all run here, at most {_PER_CORE} on each of {cores} cores"
    return None


def parameters(config: Config) -> int:
    """Of all experts and attention of all layers; embeddings and norms are too few to matter."""
    model = config.model
    experts = 3 * model.experts * model.expert_ffn
    return model.layers * model.hidden * (experts + 2 * (model.heads + model.kv_heads) * model.head_dim)


def _exact(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
