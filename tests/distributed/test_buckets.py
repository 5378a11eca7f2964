"""Where buckets end that become final inside the backward: with each unit, and around what changes behind it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist

from megastream.families import family_of, load_shape
from megastream.plan import build_plan
from megastream.trainer import model
from megastream.trainer.config import TrainerConfig
from megastream.trainer.stepper import Listener
from tests.helpers.provisional import engine_side
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import forward_backward
from tests.helpers.tiny import hf_config, tiny_config
from tests.helpers.training import adapter_of

EXPERTS_PER_UNIT = 2  # what `adapter_of` asks for
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LATE_UNDER_TP = re.compile(r"(norm|mlp\.gate)\.weight$")


def unit(tensor: str) -> str:
    """By its Hugging Face name, of a rank that has all experts."""
    if match := _EXPERT.match(tensor):
        return f"layer {match[1]}, experts from {int(match[2]) // EXPERTS_PER_UNIT * EXPERTS_PER_UNIT}"
    return f"layer {match[1]}" if (match := _LAYER.match(tensor)) else tensor


def _body(rank: int, world_size: int, init_method: str, config: TrainerConfig, finality: str) -> list[set[str]]:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    _, _, adapter = adapter_of(config, finality, bucket_elements=1 << 30)  # so that no bucket ends for its size
    held: dict[str, set[str]] = {}
    for shard in adapter.describe().shards:
        held.setdefault(shard.buffer, set()).add(shard.tensor)
    return [held.get(name, set()) for name in adapter.buffers]


def buckets(world_size: int, finality: str = "early", **settings: Any) -> list[list[set[str]]]:
    """The tensors of each bucket, in the order in which they become final, by rank."""
    config = tiny_config(layers=2, clip=0.0, **settings)
    found: list[list[set[str]]] = run_ranks(_body, world_size, config=config, finality=finality)
    return found


def test_a_bucket_holds_one_unit_and_the_last_layer_comes_first() -> None:
    (held,) = buckets(1)
    units = [{unit(tensor) for tensor in tensors} for tensors in held]
    assert all(len(each) == 1 for each in units), units
    order = [name for each in units for name in each]
    assert len(set(order)) == len(order), "and a unit is in one bucket"
    layers = [int(match[1]) for name in order if (match := re.match(r"layer (\d)", name))]
    assert layers == sorted(layers, reverse=True) and set(layers) == {0, 1}
    assert order[-1] == "model.embed_tokens.weight", "what the forward uses first"
    (whole,) = buckets(1, "pipelined")
    assert any(len({unit(tensor) for tensor in tensors}) > 1 for tensors in whole), "without borders they are mixed"


def _final_body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, finality: Any
) -> dict[str, tuple[str, str, int]]:
    """For each unit of this rank: the bucket that was final last in a real step, that of the plan, and how many."""
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, _, adapter = adapter_of(config, finality, bucket_elements=300)
    layouts: list[Any] = [None] * world_size
    dist.all_gather_object(layouts, adapter.describe())
    family, each = (
        family_of(load_shape(hf_config(config))),
        {"piece_bytes": 1 << 20, "experts_per_unit": EXPERTS_PER_UNIT},
    )
    plan = build_plan(layouts, engine_side(config), family, kind="stream", finality=finality, **each)
    final: list[str] = []
    stepper = adapter.stepper(finality, Listener(final.append, withdrawn=final.clear), max_abort_rate=1.0)
    for step in range(3):
        final.clear()
        forward_backward(config, chunks, step)
        assert stepper.step().ok
    stepper.close()
    sends: dict[str, set[str]] = {}
    for piece in plan.by_source.get(rank, ()):
        sends.setdefault(piece.unit, set()).add(piece.source_buffer)
    closing = plan.closing_buffers
    return {unit: (max(sent, key=final.index), closing[unit, rank], len(sent)) for unit, sent in sends.items()}


@pytest.mark.full
@pytest.mark.parametrize(("finality", "clip"), [("early", 0.0), ("speculative", 1e6)])
def test_the_bucket_that_the_plan_names_is_the_last_of_its_unit(finality: str, clip: float) -> None:
    """In a real step, on the stage that steps inside its backward, where a unit is cut into several buckets.

    Behind the backward, as on the other stage on a CPU and in a step that is taken back, owners take turns.
    """
    config = tiny_config(pp=2, layers=2, clip=clip)
    results = run_ranks(_final_body, 4, config=config, finality=finality)
    for units in results[:2]:
        for name, (last, told, _) in units.items():
            assert last == told, name
        assert max(count for _, _, count in units.values()) > 2
    assert any(last != told for units in results[2:] for last, told, _ in units.values()), "so the test can fail"


@pytest.mark.full
def test_what_changes_behind_the_reduction_holds_nothing_else_back() -> None:
    """Norms and routers under TP; an embedding that is the head of another stage."""
    for held in buckets(2, tp=2):
        late = [{bool(_LATE_UNDER_TP.search(tensor)) for tensor in tensors} for tensors in held]
        assert all(len(each) == 1 for each in late), held
        assert [each for each in late if True in each] == late[late.index({True}) :], "they come last"
    first, last = buckets(2, pp=2, tied=True)
    assert first[-1] == {"model.embed_tokens.weight"}
    for tensors in (*first[:-1], *last[:-1]):
        assert tensors and not any("embed" in tensor or "lm_head" in tensor for tensor in tensors)
