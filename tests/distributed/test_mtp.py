"""Multi-token prediction: equal to stock under every policy, saved and loaded, and left out of what engines get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastream.families import family_of, load_shape
from megastream.trainer import model
from megastream.trainer.adapter import MegatronAdapter
from megastream.trainer.config import TrainerConfig
from tests.distributed.test_adapter import check_loaded
from tests.distributed.test_emit_gloo import Way, check_arrivals
from tests.helpers.against_stock import forward_backward, masked_batches, random_checkpoint, write_checkpoint
from tests.helpers.mtp_reference import mtp_loss
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import STEPS, Run, compare, compare_clipped, in_turn, train_all
from tests.helpers.tiny import hf_config, tiny_config, tiny_glm4
from tests.helpers.training import adapter_of


@pytest.mark.full
def test_pp2_ep2_equals_stock_when_every_step_is_undone() -> None:
    """The embedding stands on both stages and is summed over them: late on each, and everything else early."""
    config = tiny_glm4(pp=2, ep=2, layers=2, mtp_layers=1, clip=0.3)
    for stock, speculative in compare(config, 4, ("speculative",)):
        assert stock["clipped"] == speculative["aborts"] == STEPS
        assert speculative["late"] == 1 and speculative["early"] == speculative["buckets"] - 1


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2 ep2, two layers": (4, dict(pp=2, ep=2, mtp_layers=2, layers=2)),
    "ep2 fp32": (2, dict(ep=2, dtype="float32", layers=2)),
    "pp2 vpp2 recompute": (2, dict(pp=2, vpp=2, recompute="full")),
    "tp2 ep2 alltoall": (2, dict(tp=2, ep=2, etp=1, dispatcher="alltoall", layers=2)),
    "pp2 dp2 uneven overlapped": (
        4,
        dict(pp=2, stage_layers=(3, 1), overlap_grad_reduce=True, ddp_bucket_elements=20_000),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "clip"), in_turn(tuple(LAYOUTS)))
def test_other_layouts_equal_stock(name: str, clip: str) -> None:
    world_size, settings = LAYOUTS[name]
    compare_clipped(lambda limit: tiny_glm4(clip=limit, **{"mtp_layers": 1, **settings}), world_size, clip)


@pytest.mark.full
def test_an_embedding_that_is_released_before_it_is_summed_over_stages_shows() -> None:
    config = tiny_glm4(pp=2, layers=2, mtp_layers=1, clip=0.0)
    runs = (Run("stock"), Run("early"), Run("early", broken="nothing is late"))
    for stock, early, broken in train_all(config, 2, runs):
        assert stock["params"] == early["params"]
        assert stock["params"] != broken["params"]


def _loss_body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: str
) -> tuple[float | None, float | None]:
    """The loss of the next token, and that of the one behind it, as megatron keeps it for its log."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, _, adapter = adapter_of(config, "stock")
    adapter.load_hf(folder)
    loss = forward_backward(chunks, config, 0)
    tracker = MTPLossLoggingHelper.tracker
    values = tracker.get("values", tracker.get("loss_values"))  # 0.16, 0.19
    return loss, None if values is None else float(values[0]) / 2  # microbatches


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [(dict(), 1), (dict(pp=2), 2), (dict(tp=2, ep=2, etp=1), 2)],
    ids=["1", "pp2", "tp2 ep2"],
)
def test_its_loss_is_that_of_layers_of_transformers(settings: dict[str, Any], world_size: int, tmp_path: Path) -> None:
    """Loaded from a checkpoint; the loss changes with each weight that a decoder layer does not have."""
    config = tiny_glm4(layers=2, mtp_layers=1, dtype="float32", **settings)
    tensors = random_checkpoint(config)
    write_checkpoint(config, tmp_path, tensors)
    *_, (_, loss) = run_ranks(_loss_body, world_size, config=config, folder=str(tmp_path))
    batches = list(masked_batches(config, 0, 0))
    assert loss == pytest.approx(mtp_loss(config, tmp_path, batches), abs=3e-5)
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.o_proj"):
        key = f"model.layers.2.{name}.weight"
        other = write_checkpoint(config, tmp_path / "other", {**tensors, key: tensors[key].flip(0)})
        assert abs(loss - mtp_loss(config, other, batches)) > 1e-4, name


@pytest.mark.full
@pytest.mark.parametrize(("settings", "world_size"), [(dict(pp=2, ep=2), 4), (dict(tp=2, pp=2, vpp=2), 4)])
def test_loaded_layers_are_the_checkpoint(settings: dict[str, Any], world_size: int, tmp_path: Path) -> None:
    check_loaded(tiny_glm4(dtype="float32", mtp_layers=2, **settings), world_size, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("finality", ["pipelined", "speculative", "early"])
def test_what_leaves_is_the_model_without_them(finality: str, tmp_path: Path) -> None:
    config = tiny_glm4(pp=2, ep=2, layers=2, mtp_layers=1, clip=0.0, lr=0.05, router_bias_rate=0.3)
    check_arrivals(config, 4, tmp_path, Way(finality))


def _listed_body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig
) -> tuple[set[str], tuple[str, ...], list[str]]:
    """Megatron's names of these layers' parameters, what the layout lists as unused, and what is refused."""
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer, adapter = adapter_of(config, "pipelined")
    layout = adapter.describe()
    assert not [shard for shard in layout.shards if "layers.2." in shard.tensor]
    messages = []

    def refused(**changes: Any) -> None:
        shape = load_shape({**hf_config(config), **changes})
        with pytest.raises(ValueError, match="mtp_num_layers=1 is not supported: ") as error:
            MegatronAdapter(chunks, optimizer, family_of(shape), shape)
        messages.append(str(error.value))

    refused(model_type="qwen3_moe", attention_bias=False)
    refused(tie_word_embeddings=True)
    next(chunks[0].parameters()).grad_norm_group = "mtp"
    refused()
    return {name for name, _ in chunks[0].named_parameters() if "mtp." in name}, layout.unused, messages


def test_they_are_listed_as_unused_or_refused_by_name() -> None:
    ((names, unused, messages),) = run_ranks(_listed_body, 1, config=tiny_glm4(layers=2, mtp_layers=1))
    assert all(name.startswith("decoder.layers.2.") for name in unused)
    assert len(unused) == len(names) + 1, "parameters, and the bias of the router"
    for message, part in zip(messages, ("family qwen3_moe has no rows", "a tied head", "grad_norm_group"), strict=True):
        assert part in message and message.endswith("; leave these layers out") and "\n" not in message


def test_only_a_family_with_rows_is_built_with_them() -> None:
    glm4, qwen3 = (load_shape(hf_config(config)) for config in (tiny_glm4(), tiny_config()))
    assert TrainerConfig.of(glm4, max_sequence=16, mtp_layers=1).mtp_layers == 1
    with pytest.raises(ValueError, match="mtp_layers=1 is not supported: the table of family qwen3_moe has no rows"):
        TrainerConfig.of(qwen3, max_sequence=16, mtp_layers=1)


def test_a_shape_counts_them_behind_the_decoder_s_layers() -> None:
    config = tiny_glm4(layers=2)
    shape = load_shape(hf_config(config))
    family = family_of(shape)
    own = {spec.name for spec in family.tensors(replace(shape, mtp_layers=1))} - {s.name for s in family.tensors(shape)}
    assert own and all(name.startswith("model.layers.2.") for name in own)
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.e_score_correction_bias"} <= own
    with pytest.raises(ValueError, match="layer 2 of a model with 2 layers"):
        family.trainer_entry("decoder.layers.2.eh_proj.weight", shape)
    entry = family.trainer_entry("decoder.layers.2.eh_proj.weight", replace(shape, mtp_layers=1))
    assert entry.tensors[0].shape == (config.hidden, 2 * config.hidden)
