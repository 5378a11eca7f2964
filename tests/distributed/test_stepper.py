"""Every finality policy equals stock `optimizer.step()` bit for bit, over stock DDP with stock bucket sizes."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastream.trainer import model
from megastream.trainer.agreement import AgreedError
from megastream.trainer.buckets import Bucket, OwnedRange
from megastream.trainer.early import DamagedWeights
from megastream.trainer.stepper import Listener
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import (
    STEPS,
    Run,
    SkippedStep,
    compare,
    compare_clipped,
    forward_backward,
    in_turn,
    train_all,
)
from tests.helpers.tiny import tiny_config
from tests.helpers.training import adapter_of, digest


def test_ep2_bf16_equals_stock_when_every_step_is_clipped() -> None:
    """Two replicas of the dense weights, two expert-parallel ranks."""
    config = tiny_config(ep=2, layers=2, clip=0.3)
    for stock, _, pipelined, speculative in compare(config, 2, ("whole", "pipelined", "speculative")):
        assert stock["clipped"] == STEPS
        assert pipelined["buckets"] >= 4, "every rank must have several buckets"
        assert speculative["aborts"] == STEPS


def test_pp2_tied_early_and_speculative_equal_stock_without_clipping() -> None:
    config = tiny_config(pp=2, layers=2, tied=True, clip=0.0)
    for _, early, speculative in compare(config, 2, ("early", "speculative")):
        assert speculative["aborts"] == 0
        for streamed in (early, speculative):
            assert streamed["late"] == 1, "the tied embedding alone is changed later"
            assert streamed["early"] == streamed["buckets"] - 1


ONE_STAGE_STEPS_NOTHING_EARLY = dict(pp=2, layers=2, stage_layers=(0, 2), tied=True)
"""The first stage has the embedding alone, which is tied: its only bucket is late."""


def test_all_ranks_withdraw_though_one_stepped_nothing_early() -> None:
    """Attempts are numbers that all ranks must agree on: a stage with late buckets only counts them like the others."""
    config = tiny_config(clip=0.3, **ONE_STAGE_STEPS_NOTHING_EARLY)
    for stock, speculative in compare(config, 2, ("speculative",)):
        assert stock["clipped"] == speculative["withdrawn"] == speculative["aborts"] == STEPS


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 fp32": (2, dict(dtype="float32", layers=2)),
    "dp2 bf16": (2, dict(layers=2)),
    "pp2 ep2 fp32": (4, dict(pp=2, ep=2, dtype="float32", layers=2)),
    "pp2 ep2": (4, dict(pp=2, ep=2, layers=2)),
    "pp2 dp2 tied": (4, dict(pp=2, tied=True, layers=2)),
    "pp3": (3, dict(pp=3, layers=6)),
    "pp2 tp2": (4, dict(pp=2, tp=2, layers=2)),
    "tp2 ep2 etp1 fp32": (2, dict(tp=2, ep=2, etp=1, dtype="float32", layers=2)),
    "pp2 vpp2 alltoall": (2, dict(pp=2, vpp=2, dispatcher="alltoall")),
    "pp2 vpp2 tied dp2 fp32": (4, dict(pp=2, vpp=2, tied=True, dtype="float32")),
    "pp2 ep2, stock buckets overlapped": (
        4,
        dict(pp=2, ep=2, overlap_grad_reduce=True, ddp_bucket_elements=20000, layers=2),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "clip"), in_turn(tuple(LAYOUTS)))
def test_other_layouts_equal_stock(name: str, clip: str) -> None:
    world_size, settings = LAYOUTS[name]
    for ranks in compare_clipped(lambda limit: tiny_config(clip=limit, **settings), world_size, clip):
        aborts = next(run["aborts"] for run in ranks if run["finality"] == "speculative")
        assert aborts == {"never": 0, "always": STEPS}.get(clip, ranks[0]["clipped"])
        assert clip != "sometimes" or 0 < aborts < STEPS


@pytest.mark.full
@pytest.mark.parametrize("settings", [dict(ep=2), dict(pp=2, tied=True), dict(pp=2, vpp=2, layers=4, dtype="float32")])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_speculation_that_ends_and_begins_again_changes_no_bit(settings: dict[str, Any], clip: float) -> None:
    """Five steps speculated on, five not, and so on; and one that ends with the first clipped step."""
    config = tiny_config(clip=clip, **{"layers": 2, **settings})
    turns, ended = Run("speculative", turns=5), Run("speculative", max_abort_rate=0.0)
    for stock, in_turns, once in compare(config, 2, (turns, ended)):
        assert stock["clipped"] == (STEPS if clip else 0)
        assert in_turns["early"] == 0, "the last five steps are made behind the norm"
        assert (in_turns["aborts"], once["aborts"]) == ((STEPS // 2, 1) if clip else (0, 0))
        assert once["early"] == 0 if clip else once["early"] > 0


@pytest.mark.full
@pytest.mark.parametrize("settings", [dict(ep=2, dtype="float32"), dict(ep=4), dict(pp=2, ep=2)])
def test_more_than_two_replicas_differ_from_stock_by_the_order_of_sums_alone(settings: dict[str, Any]) -> None:
    """With gradients on a grid, so that sums are exact in any order, no bit differs; without, fp32 sums of four do.

    `early` and `speculative` let each bucket be summed by itself. The order in which the transport adds four replicas'
    gradients depends on where an element lies in what is summed at once; megatron sums a whole stage at once.
    """
    config = tiny_config(clip=0.0, layers=2, **settings)
    compare(config, 4 * config.pp, ("early", "speculative"), exact_sums=True)
    compare(config, 4 * config.pp, ("whole", "pipelined"))
    if config.dtype == "float32":
        stock, early = train_all(config, 4, (Run("stock"), Run("early")))[0]
        assert stock["params"] != early["params"]
        assert stock["trace"][0][0] == early["trace"][0][0], "the first loss comes before any sum"
        for (_, norm), (_, other) in zip(stock["trace"][:1], early["trace"][:1], strict=True):
            assert norm == pytest.approx(other, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("settings", [dict(), dict(ep=4)], ids=["dp4", "ep4"])
def test_more_than_two_replicas_withdraw_what_is_clipped(settings: dict[str, int]) -> None:
    """With sums that are exact in any order; see the test above."""
    config = tiny_config(clip=0.3, layers=2, **settings)
    for stock, speculative in compare(config, 4, ("speculative",), exact_sums=True):
        assert stock["clipped"] == speculative["aborts"] == speculative["withdrawn"] == STEPS


@pytest.mark.full
@pytest.mark.parametrize(
    "settings", [dict(tp=2, dtype="float32"), dict(pp=2, vpp=2, stage_layers=(0, 1, 1, 0))], ids=["tp2", "vpp2"]
)
def test_clipping_that_never_clips_takes_nothing_back(settings: dict[str, Any]) -> None:
    config = tiny_config(clip=1e6, layers=2, **settings)
    for stock, speculative in compare(config, 2, ("speculative",)):
        assert stock["clipped"] == speculative["aborts"] == speculative["withdrawn"] == 0
        assert speculative["early"] > 0


@pytest.mark.full
@pytest.mark.parametrize("ddp", [{"grad_reduce_in_fp32": False}, {"average_in_collective": True}], ids=str)
def test_reductions_of_another_kind_equal_stock(ddp: dict[str, bool]) -> None:
    """Main gradients in bf16, and sums that the transport divides: not our own model's, but a trainer may set them."""
    for clip, policies in ((0.3, ("whole", "pipelined", "speculative")), (0.0, ("early",))):
        for runs in compare(tiny_config(ep=2, layers=2, clip=clip), 2, policies, ddp=ddp):
            assert all(run["ddp"][name] == value for run in runs for name, value in ddp.items())


@pytest.mark.parametrize(
    ("broken", "finality"),
    [
        ("skip one bucket", "pipelined"),
        pytest.param("reduce twice", "early", marks=pytest.mark.full),
        pytest.param("no undo", "speculative", marks=pytest.mark.full),
    ],
)
def test_what_must_not_be_left_out_shows(broken: str, finality: str) -> None:
    """It is noticed when a bucket is not stepped, when one is reduced twice, and when an abort undoes nothing."""
    config = tiny_config(clip=0.3 if finality == "speculative" else 0.0, layers=2)
    for ranks in train_all(config, 2, (Run("stock"), Run(finality, broken=broken))):
        stock, other = ranks
        assert stock["params"] != other["params"]
        assert stock["trace"] != other["trace"]


@pytest.mark.full
@pytest.mark.parametrize("settings", [dict(pp=2, tied=True), dict(tp=2)])
def test_a_bucket_released_before_its_late_coupling_shows(settings: dict[str, int]) -> None:
    """Tied embeddings are summed over two stages, norms over TP, both behind the reduction."""
    config = tiny_config(clip=0.0, **settings)
    runs = (Run("stock"), Run("early"), Run("early", broken="nothing is late"))
    for stock, early, broken in train_all(config, 2, runs):
        assert stock["params"] == early["params"]
        assert stock["params"] != broken["params"]


def _waits_body(rank: int, world_size: int, init_method: str) -> tuple[bool, bool]:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)

    def spoilt(values: torch.Tensor, works: list[Any]) -> bool:
        for work in works:
            work.wait()
        values.mul_(0.5)  # what a token count, clipping or a late coupling does to a gradient that is there
        kept = values.clone()
        for work in works:
            work.wait()
        return not torch.equal(values, kept)

    grads, group = torch.full((8,), 1.0 + rank), dist.group.WORLD
    mine = grads[4 * rank : 4 * rank + 4]
    scattered = spoilt(mine, [dist.reduce_scatter_tensor(mine, grads.clone(), group=group, async_op=True)])
    ranges = (OwnedRange(0, 0, 4), OwnedRange(1, 4, 8))
    assert group is not None
    bucket = Bucket("b", grads.clone(), (), group, ranges, grads, 1.0, dist.ReduceOp.SUM, late=False, turn=0)
    return scattered, spoilt(grads[4 * rank : 4 * rank + 4], bucket.reduce())


def test_a_double_wait_spoils_a_reduce_scatter_but_not_a_bucket() -> None:
    """gloo copies the result of a reduce-scatter out again on every wait: why buckets are reduced to their owners."""
    assert run_ranks(_waits_body, 2) == [(True, False)] * 2


def _changed_body(
    rank: int, world_size: int, init_method: str, config: Any, finality: Any, max_abort_rate: float
) -> str:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer, adapter = adapter_of(config, finality)
    stepper = adapter.stepper(finality, Listener(lambda name: None), max_abort_rate=max_abort_rate)
    for step in range(2):
        forward_backward(config, chunks, step)
        assert stepper.step().ok
    forward_backward(config, chunks, 2)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    try:
        stepper.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("finality", "settings"),
    [
        ("speculative", ONE_STAGE_STEPS_NOTHING_EARLY),
        pytest.param("early", dict(layers=2, clip=0.0), marks=pytest.mark.full),
    ],
)
def test_a_learning_rate_that_is_set_behind_the_backward_is_refused(finality: str, settings: dict[str, Any]) -> None:
    """Buckets were stepped with the old one by then; a rank that stepped none stops, too."""
    config = tiny_config(**settings)
    for message in run_ranks(_changed_body, 2, config=config, finality=finality, max_abort_rate=1.0):
        assert re.match(r"lr of parameter group 0 was 0\.001 in .* and is 0\.5 in step\(\), .*before the fo", message)


@pytest.mark.full
def test_a_learning_rate_may_be_set_there_when_nothing_is_stepped_early() -> None:
    for finality, clip in (("pipelined", 1.0), ("speculative", 0.01)):  # rate 0: none is speculated on any more
        config = tiny_config(layers=2, clip=clip)
        assert run_ranks(_changed_body, 2, config=config, finality=finality, max_abort_rate=0.0) == ["", ""]


def _not_finite_body(rank: int, world_size: int, init_method: str, config: Any, finality: Any) -> Any:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer, adapter = adapter_of(config, finality)
    step = SkippedStep(config, chunks, optimizer, adapter, finality, broken_rank=world_size - 1)
    return [step.run(math.nan if bad else 0.0) for bad in (False, True, False, False)]


@pytest.mark.parametrize(
    ("finality", "clip"),
    [
        ("pipelined", 1.0),
        ("speculative", 1.0),
        pytest.param("speculative", 0.0, marks=pytest.mark.full),
        pytest.param("whole", 1.0, marks=pytest.mark.full),
    ],
)
def test_gradients_that_are_not_finite_make_no_version(finality: str, clip: float) -> None:
    """One rank's NaN is everybody's: not ok, nothing of it stays final, and the log of rank 0 names bucket and weight.

    Every weight, master and moment stays as it was, and training goes on.
    """
    results = run_ranks(_not_finite_body, 2, config=tiny_config(layers=2, clip=clip), finality=finality)
    for rank, (first, bad, *after) in enumerate(results):
        assert first.ok and first.changed and first.final and not first.log
        assert not bad.ok and not math.isfinite(bad.norm)
        assert not bad.changed
        assert not bad.final, "what was provisional is withdrawn"
        assert ("gradients are not finite in c0.dense0.b0." in bad.log) == (rank == 0)
        if rank == 0:
            assert "on rank 1; the step" in bad.log and "weight)" in bad.log
        assert all(step.ok and step.changed for step in after)
        assert bad.withdrawn == (1 if finality == "speculative" else 0)


@pytest.mark.full
def test_a_stage_that_stepped_nothing_early_withdraws_a_skipped_step() -> None:
    config = tiny_config(**ONE_STAGE_STEPS_NOTHING_EARLY)
    for first, bad, *_ in run_ranks(_not_finite_body, 2, config=config, finality="speculative"):
        assert first.ok and not bad.ok and not bad.changed
        assert bad.withdrawn == 1


@pytest.mark.full
def test_early_stops_also_on_a_stage_that_stepped_nothing() -> None:
    config = tiny_config(**{**ONE_STAGE_STEPS_NOTHING_EARLY, "clip": 0.0})
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] failed") as error:
        run_ranks(_not_finite_body, 2, config=config, finality="early", timeout_s=60)
    assert str(error.value).count("DamagedWeights: ") == 2
    assert len(set(re.findall("DamagedWeights: .*", str(error.value)))) == 1, "rank 0 can say it for all"


def test_early_stops_when_gradients_are_not_finite() -> None:
    """It has stepped other buckets by then and keeps nothing to go back to: every rank ends, the message says why."""
    with pytest.raises(AssertionError) as error:
        run_ranks(_not_finite_body, 2, config=tiny_config(layers=2, clip=0.0), finality="early", timeout_s=60)
    for word in ("ranks [0, 1] failed", "DamagedWeights", "not finite in c0.dense0", "'speculative', which skips such"):
        assert word in str(error.value)
    assert len(set(re.findall("DamagedWeights: .*", str(error.value)))) == 1, "rank 0 can say it for all"
    assert issubclass(DamagedWeights, AgreedError)


def test_digest_sees_one_bit() -> None:
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])
