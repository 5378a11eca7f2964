"""The run's configuration: one YAML file, typed. Unknown keys and impossible layouts are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from megastream.layout.trainer import Ownership
from megastream.rl.bounds import bounds_refusal, sizes_refusal
from megastream.rl.sections import ConfigError, Section, check_positive, read_mapping, typed
from megastream.trainer.ownership import ANY_TRANSPORT, WantedOwnership, choose_ownership
from megastream.trainer.policies import MAX_ABORT_RATE, Finality, clipping_refusal
from megastream.transport.choice import Wanted


class ModelConfig(Section, frozen=True, kw_only=True):
    """A Qwen3-MoE shape. The vocabulary is the byte-level tokenizer's and is not configured."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_ffn: int


class DataConfig(Section, frozen=True, kw_only=True):
    """A named reasoning-gym task; `train` and `held_out` count question and answer pairs, `seq_length` tokens."""

    task: str
    train: int
    held_out: int
    seq_length: int


class TrainerConfig(Section, frozen=True, kw_only=True):
    """Megatron's side. `micro_batch` counts sequences, `clip_grad` is a global norm.

    Parameters are stepped and sent in runs of `bucket_elements`; Megatron's gradient buckets stay as they are.
    `deterministic` asks torch for kernels that give the same bits each time. On a CPU all of them do; on a GPU two
    equal stock trainings differ without it from the first step on, and cannot be compared bit for bit.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    ranks: int
    micro_batch: int
    num_micro_batches: int
    learning_rate: float
    clip_grad: float
    bucket_elements: int
    deterministic: bool = False


class EngineConfig(Section, frozen=True, kw_only=True):
    """vLLM's side. `streams` questions are answered at once, each with `answer_tokens` tokens.

    `nice` is the scheduling priority of the engine's processes, 0 to 19: on few cores, training goes first.
    """

    layout: Literal["pp2", "tp2ep", "single"] = "pp2"
    streams: int
    answer_tokens: int
    max_model_len: int
    kv_cache_mib: int
    nice: int = 0


class StreamConfig(Section, frozen=True, kw_only=True):
    """How the weights travel: over host memory (`transport` gloo), or from GPU to GPU (`ipc` on one host, `nccl`
    between two GPUs; `auto` takes the fastest that both ends have). `piece_mib` bounds one message,
    `experts_per_unit` the experts tracked together.

    `finality` says when a bucket leaves; `speculative` gives up on speculation once more than `max_abort_rate` of the
    last 16 steps were clipped, until at most half of that rate is left. With `ownership` slice each data-parallel rank
    sends what it steps, before parameters are gathered; with replica any of them sends, after it; auto takes what was
    measured to be better.
    """

    transport: Wanted = "gloo"
    finality: Finality = "pipelined"
    max_abort_rate: float = MAX_ABORT_RATE
    ownership: WantedOwnership = "auto"
    piece_mib: float
    experts_per_unit: int
    slots_per_target: int


class RunConfig(Section, frozen=True, kw_only=True):
    """`updates` optimizer steps are timed in each mode; `checked_updates` more are checked byte for byte."""

    updates: int
    checked_updates: int
    checked_tokens: int
    modes: tuple[Literal["stock", "stream", "whole"], ...] = ("stock", "stream", "whole")


class DeadlineConfig(Section, frozen=True, kw_only=True):
    """Seconds. Every wait ends at one of these and then says who waited for whom."""

    start_s: float
    attach_s: float
    step_s: float
    reconnect_s: float
    stop_s: float


class Config(Section, frozen=True, kw_only=True):
    """A whole file."""

    seed: int
    model: ModelConfig
    data: DataConfig
    trainer: TrainerConfig
    engine: EngineConfig
    stream: StreamConfig
    run: RunConfig
    deadlines: DeadlineConfig

    @property
    def data_parallel(self) -> int:
        return self.trainer.ranks // (self.trainer.tp * self.trainer.pp)

    @property
    def ownership(self) -> tuple[Ownership, str]:
        """Which replica sends what, and why."""
        lanes = ANY_TRANSPORT if self.stream.transport == "auto" else (self.stream.transport,)
        return choose_ownership(self.stream.ownership, self.stream.finality, self.data_parallel, lanes)

    @property
    def engine_ranks(self) -> int:
        return 1 if self.engine.layout == "single" else 2


def load(path: Path) -> Config:
    """Reads and checks a file. ConfigError says in one line what is wrong and where."""
    raw = read_mapping(path)
    try:
        return parse(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(raw: dict[str, Any]) -> Config:
    """A checked Config from plain data."""
    config = typed(raw, Config)
    check_positive(config, _ZERO_IS_FINE)
    if reason := bounds_refusal(config):
        raise ConfigError(reason)
    _check_layout(config)
    if reason := sizes_refusal(config):
        raise ConfigError(reason)
    _check_modes(config.run.modes)
    _check_finality(config)
    return config


def with_engine_layout(config: Config, layout: str) -> Config:
    """The same configuration for another engine layout. ConfigError names an unknown one."""
    known = get_args(get_type_hints(type(config.engine))["layout"])
    if layout not in known:
        raise ConfigError(f"--engine-layout is {layout!r}; it is one of {', '.join(known)}")
    raw = msgspec.to_builtins(config)
    raw["engine"]["layout"] = layout
    return parse(raw)


_ZERO_IS_FINE = {
    "run.checked_updates",
    "run.checked_tokens",
    "engine.nice",
    "seed",
    "trainer.clip_grad",
    "stream.max_abort_rate",
}


def _check_layout(config: Config) -> None:
    model, trainer = config.model, config.trainer
    _divides("trainer.ranks", trainer.ranks, "trainer.tp x trainer.pp", trainer.tp * trainer.pp)
    _divides("the data parallel size", config.data_parallel * trainer.tp, "trainer.ep", trainer.ep)
    _divides("model.layers", model.layers, "trainer.pp", trainer.pp)
    _divides("model.experts", model.experts, "trainer.ep", trainer.ep)
    _divides("model.heads", model.heads, "model.kv_heads", model.kv_heads)
    _divides("model.kv_heads", model.kv_heads, "trainer.tp", trainer.tp)
    engine_tp = 2 if config.engine.layout == "tp2ep" else 1
    _divides("model.heads", model.heads, "the engine's tp", engine_tp)
    _divides("model.experts", model.experts, "the engine's ep", engine_tp)
    if config.engine.layout == "pp2" and model.layers < 2:
        raise ConfigError(f"model.layers is {model.layers}; engine.layout pp2 needs at least 2")
    if model.top_k > model.experts:
        raise ConfigError(f"model.top_k is {model.top_k} but model.experts is {model.experts}")


def _check_modes(modes: tuple[str, ...]) -> None:
    if not modes or len(set(modes)) != len(modes):
        raise ConfigError(
            f"run.modes is [{', '.join(modes)}]; give each of stock, stream and whole at most once, and one"
        )


def _check_finality(config: Config) -> None:
    stream = config.stream
    if reason := clipping_refusal(stream.finality, config.trainer.clip_grad):
        raise ConfigError(f"stream.finality and trainer.clip_grad: {reason}")


def _divides(what: str, value: int, axis: str, size: int) -> None:
    if value % size:
        raise ConfigError(f"{what} is {value}, which {axis} = {size} does not divide; choose multiples")
