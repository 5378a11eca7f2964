"""A training that resumes is the one that was never interrupted: under the same layout bit for bit."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastream.trainer import buckets, checkpoint, compat_checkpoint, model
from megastream.trainer.adapter import mesh_coords
from megastream.trainer.agreement import AgreedError
from megastream.trainer.checkpoint import Checkpointer
from megastream.trainer.checkpoint_folder import CheckpointFolder, Manifest, reading
from megastream.trainer.checkpoint_types import CheckpointSettings
from megastream.trainer.compat_checkpoint import PlannedSave
from megastream.trainer.config import TrainerConfig
from megastream.trainer.finality import make_stepper
from megastream.trainer.stepper import Listener, Trained
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import BATCH, SEQUENCE, batches, tiny_config, tiny_glm4
from tests.helpers.training import router_biases

STEPS, SAVE_AT, REPLICAS = 6, 3, 4


def checkpointer(chunks: Any, optimizer: Any, config: TrainerConfig, folder: Path, **changes: Any) -> Checkpointer:
    facts = {"model": {"hidden": config.hidden, "vocab": config.vocab}, "seed": config.seed}
    settings = CheckpointSettings(**{"keep": 2, "deadline_s": 80.0, "launch": "test", **changes})
    coords = {name: size for name, size in mesh_coords().items() if name.endswith("_size")}
    return Checkpointer(chunks, optimizer, folder, settings, facts=facts, layout=coords)


def train(config: TrainerConfig, chunks: Any, optimizer: Any, stepper: Any, step: int) -> tuple[float | None, float]:
    """One step on 4 replicas' worth of data, whatever the layout: the microbatches of all that a rank stands for."""
    for group in optimizer.param_groups:
        group["lr"] = config.lr * (1 + 0.1 * step)
    coords = mesh_coords()
    mine = range(coords["dp"] * REPLICAS // coords["dp_size"], (coords["dp"] + 1) * REPLICAS // coords["dp_size"])
    data = [batch for replica in mine for batch in batches(config, step, replica)]
    loss = model.train_step(chunks, iter(data), num_microbatches=len(data), seq_length=SEQUENCE, micro_batch_size=BATCH)
    result = stepper.step()
    assert result.ok
    return loss, result.grad_norm


def digest(chunks: Any, optimizer: Any) -> dict[str, str]:
    shards = list(compat_checkpoint.optimizer_shards(optimizer))
    held = {
        "params": [p for chunk in chunks for p in chunk.parameters()],
        "biases": router_biases(chunks),
        **{name: [s.tensors[name] for s in shards] for name in ("param", "exp_avg", "exp_avg_sq")},
    }
    found = {"steps": str(compat_checkpoint.adam_steps(optimizer))}
    for name, tensors in held.items():
        total = hashlib.sha256()
        for tensor in tensors:
            total.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        found[name] = total.hexdigest()
    return found


def start(config: TrainerConfig, rank: int, world_size: int, init_method: str) -> tuple[Any, Any, Any]:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer = model.build(config)
    trained = Trained(chunks, optimizer, buckets.cut(chunks, optimizer, 6000))
    stepper = make_stepper("pipelined", trained, Listener(lambda bucket: None))
    return chunks, optimizer, stepper


def _whole(rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: Path) -> dict[str, Any]:
    """All steps without a break; a checkpoint on the way, of which nothing is written before the next step is done."""
    chunks, optimizer, stepper = start(config, rank, world_size, init_method)
    checkpoints = checkpointer(chunks, optimizer, config, folder)
    checkpoints.open()
    trace = [train(config, chunks, optimizer, stepper, step) for step in range(SAVE_AT)]
    torch.rand(1 + rank)  # so that no new process stands there by itself
    before = digest(chunks, optimizer)
    with writing_held_back():
        checkpoints.save(SAVE_AT, {"sequences": 40 * SAVE_AT})
        drawn = torch.rand(2).tolist()
        assert digest(chunks, optimizer) == before, "saving changes nothing"
        trace.append(train(config, chunks, optimizer, stepper, SAVE_AT))
        assert checkpoints.poll() is None
    trace += [train(config, chunks, optimizer, stepper, step) for step in range(SAVE_AT + 1, STEPS)]
    saved = checkpoints.poll(wait=True)
    assert checkpoints.poll(wait=True) is None
    checkpoints.close()
    return {"trace": trace, "digest": digest(chunks, optimizer), "saved": saved, "drawn": drawn, "before": before}


@contextmanager
def writing_held_back() -> Iterator[None]:
    """Saves wait with their files until the block ends."""
    ended, write = threading.Event(), PlannedSave.write

    def held_back(planned: PlannedSave) -> None:
        assert ended.wait(60), "a save did not return before it was written"
        write(planned)

    PlannedSave.write = held_back  # type: ignore[method-assign]
    try:
        yield
    finally:
        PlannedSave.write = write  # type: ignore[method-assign]
        ended.set()


def _resumed(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: Path, again: Path | None = None
) -> dict[str, Any]:
    """A new process with other initial weights: everything that counts comes from the checkpoint."""
    chunks, optimizer, stepper = start(config, rank, world_size, init_method)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(9.0)
    for bias in router_biases(chunks):
        bias.fill_(9.0)
    optimizer.reload_model_params()
    checkpoints = checkpointer(chunks, optimizer, config, folder)
    checkpoints.open()
    resumed = checkpoints.load()
    drawn, loaded = torch.rand(2).tolist(), digest(chunks, optimizer)
    assert resumed is not None and resumed.step == SAVE_AT and resumed.state["sequences"] == 40 * SAVE_AT
    checkpoints.close()
    if again is not None:  # what was read, written as this layout writes it
        copies = checkpointer(chunks, optimizer, config, again)
        copies.open()
        copies.save(resumed.step, resumed.state)
        copies.poll(wait=True)
        copies.close()
    trace = [train(config, chunks, optimizer, stepper, step) for step in range(resumed.step, STEPS)]
    found = digest(chunks, optimizer)
    return {"trace": trace, "digest": found, "loaded": loaded, "same_layout": resumed.same_layout, "drawn": drawn}


def _pruned_body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: Path
) -> tuple[list[list[str]], str]:
    """Loads what another training saves and prunes meanwhile: rank 1 does it for that one, rank 0 has the lock."""
    chunks, optimizer, _ = start(config, rank, world_size, init_method)
    others = checkpointer(chunks, optimizer, config, folder / "others", keep=3)
    others.open()
    for step in (1, 2, 3):
        others.save(step, {})
        others.poll(wait=True)
    others.close()
    mine = checkpointer(chunks, optimizer, config, folder / "mine")
    mine.open()
    removed: list[list[str]] = []
    load_into = compat_checkpoint.load_into

    def while_pruned(*args: Any) -> Any:
        if rank == 1:
            removed.append(CheckpointFolder(folder / "others").prune(3 - len(removed), 3))
        dist.barrier()
        return load_into(*args)

    compat_checkpoint.load_into = while_pruned
    one, two = (folder / "others" / f"step_{step:08d}" for step in (1, 2))
    for kept in (one, two):  # of three only two are to be kept, then only one
        assert mine.load(kept) is not None and kept.is_dir()
        dist.barrier()
    checkpoint.reading = _released_early
    said = ""
    try:
        mine.load(two)
    except AgreedError as error:
        said = str(error)
    mine.close()
    return removed, said


@contextmanager
def _released_early(path: Path) -> Iterator[Manifest]:
    with reading(path) as manifest:
        pass
    yield manifest


@pytest.mark.full
def test_what_is_loaded_is_not_pruned_meanwhile(tmp_path: Path) -> None:
    """It is when the lock on it ends too early, and then the load fails on all ranks."""
    (_, one), (removed, other) = run_ranks(_pruned_body, 2, config=tiny_config(layers=2), folder=tmp_path)
    first, second = "step_00000001", "step_00000002"
    assert removed == [[], [first], [second]]
    assert one == other and second in one
    assert [path.name for path in (tmp_path / "others").glob("step_*")] == ["step_00000003"]


def _config(tiny: Callable[..., TrainerConfig] = tiny_config, **settings: Any) -> TrainerConfig:
    return tiny(**settings)


def save_and_resume(
    folder: Path, one: dict[str, Any], other: dict[str, Any], ranks: tuple[int, int], again: Path | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    whole = run_ranks(_whole, ranks[0], config=_config(**one), folder=folder, timeout_s=100)
    resumed = run_ranks(_resumed, ranks[1], config=_config(**other), folder=folder, again=again, timeout_s=100)
    assert all(result["saved"].step == SAVE_AT for result in whole)
    return whole, resumed


def _compare(rank: int, world_size: int, init_method: str, one: Path, other: Path) -> tuple[int, list[str]]:
    """Every tensor of both checkpoints, whole, as megatron's own reader gives it: their number, and what differs."""
    from megatron.core import dist_checkpointing

    model.start_process_group(tiny_config(), rank=0, world_size=1, init_method=init_method, deadline_s=60)
    loaded = [dist_checkpointing.load_plain_tensors(str(path)) for path in (one, other)]
    left, right = ({n: t for n, t in plain.items() if torch.is_tensor(t)} for plain in loaded)
    assert all(torch.isfinite(tensor).all() for tensor in left.values())
    moments = [tensor for name, tensor in left.items() if ".exp_avg_sq." in name]
    assert moments and all(tensor.any() for tensor in moments), "every parameter was stepped"
    names = left.keys() | right.keys()
    return len(names), [n for n in sorted(names) if n not in left or n not in right or not left[n].equal(right[n])]


def losses(results: list[dict[str, Any]]) -> list[float]:
    """Mean over the replicas that report one, step by step."""
    traces = [[loss for loss, _ in result["trace"]] for result in results if result["trace"][0][0] is not None]
    return [sum(step) / len(step) for step in zip(*traces, strict=True)]


def norms(results: list[dict[str, Any]]) -> list[float]:
    return [norm for _, norm in results[0]["trace"]]


SAME = [
    ("pp2 ep2 bf16 clipped", dict(pp=2, ep=2, clip=0.3), 4),
    ("dp4", dict(layers=2, clip=0.3), 4),
    ("dp2 fp32 weight decay", dict(dtype="float32", weight_decay=0.1), 2),
    ("pp2 dp2 tied", dict(pp=2, tied=True, clip=0.3), 4),
    ("tp2 ep2 etp1", dict(tp=2, ep=2, etp=1, clip=0.3), 2),
    ("pp2 vpp2", dict(pp=2, vpp=2, dispatcher="alltoall", clip=0.3), 2),
    ("dp2, stock buckets overlapped", dict(overlap_grad_reduce=True, ddp_bucket_elements=20000), 2),
    ("pp2 ep2, routers' biases", dict(tiny=tiny_glm4, pp=2, ep=2), 4),
    ("pp2 ep2, multi-token prediction", dict(tiny=tiny_glm4, mtp_layers=1, pp=2, ep=2), 4),
]


@pytest.mark.parametrize(
    ("name", "settings", "ranks"),
    [pytest.param(*case, id=case[0], marks=() if case is SAME[0] else pytest.mark.full) for case in SAME],
)
def test_resume_in_the_same_layout_is_exact(tmp_path: Path, name: str, settings: dict[str, Any], ranks: int) -> None:
    whole, resumed = save_and_resume(tmp_path, settings, settings, (ranks, ranks))
    for one, other in zip(whole, resumed, strict=True):
        assert other["same_layout"]
        assert other["loaded"] == one["before"], "before any forward"
        assert other["trace"] == one["trace"][SAVE_AT:]
        assert other["digest"] == one["digest"]
        assert other["drawn"] == one["drawn"], "random numbers go on, too"
    assert len({str(one["drawn"]) for one in whole}) == ranks
    assert name != "dp4" or len({other["loaded"]["params"] for other in resumed}) == 1, "replicas are equal"


OTHER = [
    ("pp2 ep2 to ep4", dict(pp=2, ep=2), dict(ep=4), (4, 4)),
    ("pp2 ep2 to tp2 ep2", dict(pp=2, ep=2), dict(tp=2, ep=2, etp=1), (4, 2)),
    ("ep4 to one rank", dict(ep=4, clip=0.3), dict(clip=0.3), (4, 1)),
    ("one rank to pp2 dp2", dict(clip=0.3), dict(pp=2, clip=0.3), (1, 4)),
    ("tp2 ep2 etp1 to pp2 ep2", dict(tp=2, ep=2, etp=1), dict(pp=2, ep=2), (2, 4)),
    ("pp2 tied to dp2 tied", dict(pp=2, tied=True), dict(tied=True), (2, 2)),
    ("pp2 vpp2 to pp4", dict(pp=2, vpp=2), dict(pp=4), (2, 4)),
    (
        "routers' biases, pp2 ep2 to tp2 ep2",
        dict(tiny=tiny_glm4, pp=2, ep=2),
        dict(tiny=tiny_glm4, tp=2, ep=2, etp=1),
        (4, 2),
    ),
    (
        "multi-token prediction, ep4 to pp2 vpp2",
        dict(tiny=tiny_glm4, mtp_layers=1, ep=4),
        dict(tiny=tiny_glm4, mtp_layers=1, pp=2, vpp=2),
        (4, 2),
    ),
]


@pytest.mark.parametrize(
    ("name", "one", "other", "ranks"),
    [pytest.param(*case, id=case[0], marks=pytest.mark.full) for case in OTHER],
)
def test_resume_in_another_layout(
    tmp_path: Path, name: str, one: dict[str, Any], other: dict[str, Any], ranks: tuple[int, int]
) -> None:
    """Weights, masters and moments are exact. Later steps differ only as sums in another order do."""
    first, again = tmp_path / "first", tmp_path / "again"
    fp32 = {"dtype": "float32"}
    whole, resumed = save_and_resume(first, {**one, **fp32}, {**other, **fp32}, ranks, again)
    name = f"step_{SAVE_AT:08d}"
    ((num_tensors, differing),) = run_ranks(_compare, 1, one=first / name, other=again / name)
    assert num_tensors > 100 and differing == []
    assert losses(resumed) == pytest.approx(losses(whole)[SAVE_AT:], rel=1e-5)
    assert norms(resumed) == pytest.approx(norms(whole)[SAVE_AT:], rel=1e-4)
    assert not resumed[0]["same_layout"]
    assert {result["digest"]["steps"] for result in resumed} == {f"{{{STEPS}}}"}
