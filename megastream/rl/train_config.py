"""The configuration of `megastream train`: one YAML file, typed as `rl.config` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from megastream.families.types import ModelShape
from megastream.rl.bounds import TRAIN_BOUNDS, bounds_refusal
from megastream.rl.sections import ConfigError, Section, check_positive, read_mapping, typed
from megastream.trainer.config import TrainerConfig
from megastream.trainer.ownership import WantedOwnership
from megastream.trainer.policies import MAX_ABORT_RATE, Finality, clipping_refusal

NEWEST, NONE = "newest", "none"


class RunSection(Section, frozen=True, kw_only=True):
    """`id` names the run for the rendezvous and on the control plane; results lie in `folder`."""

    id: str
    folder: str
    steps: int
    seed: int = 1


class RendezvousSection(Section, frozen=True, kw_only=True):
    """Where the ranks meet. `address` is host:port on the first node; the port is free there."""

    nodes: int = 1
    ranks_per_node: int
    address: str = "127.0.0.1:29400"


class DataSection(Section, frozen=True, kw_only=True):
    """`file`: question and answer pairs (.jsonl) or a row of token ids (.npy), cut into sequences of `seq_length`."""

    file: str
    seq_length: int


class LayoutSection(Section, frozen=True, kw_only=True):
    """Megatron's parallel sizes; data parallelism is what is left of the ranks. See `trainer.config.TrainerConfig`."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    cp: int = 1
    stage_layers: tuple[int, ...] | None = None
    overlap_grad_reduce: bool = False
    mtp_layers: int = 0
    recompute: Literal["none", "selective", "full"] = "none"
    dispatcher: Literal["allgather", "alltoall"] = "allgather"


class BatchSection(Section, frozen=True, kw_only=True):
    """Sequences of one optimizer step in all, and of one micro-batch; whether every token weighs the same."""

    global_sequences: int
    micro_sequences: int
    per_token_loss: bool = False


class OptimizerSection(Section, frozen=True, kw_only=True):
    """Adam. The rate rises for `warmup_steps`, then falls to `min_learning_rate` until step `decay_steps`.

    `router_bias_rate`: by how much a step moves the routers' bias for the choice of experts, in families that have it.
    """

    learning_rate: float
    min_learning_rate: float = 0.0
    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int = 0
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    router_bias_rate: float = 1e-3


class StreamSection(Section, frozen=True, kw_only=True):
    """The engines that take the weights. Without this section nothing is streamed.

    `engines` are waited for at the start. With `late_joiners` others may come later, and one that is lost is left
    behind; `engine` names the only one that may attach.
    """

    control_url: str
    engine: str = ""
    engines: int = 1
    late_joiners: bool = True
    piece_mib: float = 1.0
    slots_per_target: int = 4


class CheckpointSection(Section, frozen=True, kw_only=True):
    """`load` is `newest`, `none` (begin from the weights; the folder must be empty) or the path of a checkpoint.

    With a path in another folder a training begins there, and resumes from its own checkpoints once it has some; with
    `weights_only` it takes nothing but the weights from there. `allow_changed` names facts that may differ from the
    checkpoint's, e.g. `optimizer.learning_rate`.
    """

    folder: str = ""
    every_steps: int
    keep: int = 2
    load: str = NEWEST
    weights_only: bool = False
    allow_changed: tuple[str, ...] = ()


class DeadlineSection(Section, frozen=True, kw_only=True):
    """Seconds. Every wait ends at one of these and then says who waited for whom.

    `step_s`: a step, and one piece or answer of an engine. The ranks wait for each other as much longer as one of them
    may wait alone (see `TrainConfig.group_s`), so that the deadline that is reached first is the one that says more.
    `lag_s`: for how long a step waits for a slow engine, which then skips versions; `join_s`: for one that joins;
    `alone_s`: how long training goes on without any engine.
    """

    start_s: float = 600.0
    attach_s: float = 600.0
    step_s: float = 600.0
    save_s: float = 600.0
    reconnect_s: float = 60.0
    lag_s: float = 30.0
    join_s: float = 600.0
    alone_s: float = 600.0


class TrainConfig(Section, frozen=True, kw_only=True):
    """A whole file. `weights` is the folder of a Hugging Face checkpoint, where a training begins."""

    run: RunSection
    rendezvous: RendezvousSection
    weights: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    finality: Finality = "pipelined"
    max_abort_rate: float = MAX_ABORT_RATE
    bucket_elements: int = 8_000_000
    experts_per_unit: int = 8
    ownership: WantedOwnership = "auto"
    data: DataSection
    layout: LayoutSection = LayoutSection()
    batch: BatchSection
    optimizer: OptimizerSection
    stream: StreamSection | None = None
    checkpoint: CheckpointSection | None = None
    deadlines: DeadlineSection = DeadlineSection()

    @property
    def ranks(self) -> int:
        return self.rendezvous.nodes * self.rendezvous.ranks_per_node

    @property
    def replicas(self) -> int:
        """Of the weight that most ranks hold: experts may have more of them than the rest, or fewer."""
        layout = self.layout
        experts = layout.pp * layout.ep * (layout.etp or layout.tp)
        return max(self.ranks // (layout.tp * layout.pp), self.ranks // experts)

    @property
    def group_s(self) -> float:
        """Seconds after which a collective of the ranks ends without a word.

        The longest time that one rank alone may wait while the others stand in a collective (for a save or the folder's
        lock; for the control plane and for engines, before its weights may change), and behind that a step.
        """
        given = self.deadlines
        alone_s = [given.save_s] if self.checkpoint else []
        alone_s += [given.reconnect_s + given.lag_s + given.join_s] if self.stream else []
        return given.step_s + max(alone_s, default=0.0)

    @property
    def own_first(self) -> bool:
        """Whether the training's own checkpoints come before `checkpoint.load`: unless that names one of them."""
        section = self.checkpoint
        if section is None or section.load == NEWEST or section.weights_only:
            return True
        return Path(section.load).resolve().parent != self.checkpoint_folder.resolve()

    @property
    def checkpoint_folder(self) -> Path:
        given = self.checkpoint.folder if self.checkpoint else ""
        return Path(given) if given else Path(self.run.folder) / "checkpoints"

    def trainer(self, shape: ModelShape) -> TrainerConfig:
        """The trainer room's own config."""
        layout, optimizer = self.layout, self.optimizer
        return TrainerConfig.of(
            shape,
            max_sequence=self.data.seq_length,
            dtype=self.dtype,
            tp=layout.tp,
            pp=layout.pp,
            ep=layout.ep,
            etp=layout.etp,
            vpp=layout.vpp,
            cp=layout.cp,
            stage_layers=layout.stage_layers,
            mtp_layers=layout.mtp_layers,
            overlap_grad_reduce=layout.overlap_grad_reduce,
            per_token_loss=self.batch.per_token_loss,
            recompute=layout.recompute,
            dispatcher=layout.dispatcher,
            lr=optimizer.learning_rate,
            weight_decay=optimizer.weight_decay,
            clip=optimizer.clip_grad,
            router_bias_rate=optimizer.router_bias_rate,
            seed=self.run.seed,
        )


_ZERO_IS_FINE = {
    "run.seed",
    "max_abort_rate",
    "layout.mtp_layers",
    "optimizer.min_learning_rate",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "optimizer.weight_decay",
    "optimizer.clip_grad",
    "optimizer.router_bias_rate",
}


def load_train_config(path: Path) -> TrainConfig:
    """Reads and checks a file. ConfigError says in one line what is wrong and where."""
    raw = read_mapping(path)
    try:
        return parse_train_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_train_config(raw: dict[str, Any]) -> TrainConfig:
    """A checked config from plain data."""
    config = typed(raw, TrainConfig)
    check_positive(config, _ZERO_IS_FINE)
    if reason := bounds_refusal(config, bounds=TRAIN_BOUNDS):
        raise ConfigError(reason)
    layout, batch, optimizer = config.layout, config.batch, config.optimizer
    each_replica = layout.tp * layout.cp * layout.pp
    _divides("rendezvous.nodes x ranks_per_node", config.ranks, "layout.tp x layout.cp x layout.pp", each_replica)
    replicas = config.ranks // each_replica
    each = replicas * batch.micro_sequences
    _divides("batch.global_sequences", batch.global_sequences, "replicas x batch.micro_sequences", each)
    if (layout.vpp or 1) > 1:  # Megatron gives each virtual stage layout.pp micro-batches in turn
        micro_batches = "with layout.vpp, batch.global_sequences / (replicas x batch.micro_sequences)"
        _divides(micro_batches, batch.global_sequences // each, "layout.pp", layout.pp)
    if optimizer.decay != "constant" and optimizer.decay_steps <= optimizer.warmup_steps:
        raise ConfigError(
            f"optimizer.decay_steps is {optimizer.decay_steps}; decay {optimizer.decay} needs more than the "
            f"{optimizer.warmup_steps} steps of the warm-up"
        )
    if reason := clipping_refusal(config.finality, optimizer.clip_grad):
        raise ConfigError(f"finality and optimizer.clip_grad: {reason}")
    if config.checkpoint and config.checkpoint.weights_only and config.checkpoint.load in (NEWEST, NONE):
        raise ConfigError("checkpoint.weights_only needs the path of a checkpoint in checkpoint.load")
    if config.stream and config.stream.engine and config.stream.engines > 1:
        raise ConfigError(
            f"stream.engine names {config.stream.engine}, stream.engines is {config.stream.engines}; leave engine out, "
            f"or set engines to 1"
        )
    host, _, port = config.rendezvous.address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"rendezvous.address is {config.rendezvous.address!r}; give host:port, a port up to 65535")
    return config


def _divides(what: str, value: int, by: str, size: int) -> None:
    if value % size:
        raise ConfigError(f"{what} is {value}, which {by} = {size} does not divide; choose multiples")
