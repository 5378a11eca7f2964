"""What goes wrong with a checkpoint on one rank is the error of all of them, in one line, and nobody hangs."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megastream.trainer.agreement import AgreedError
from megastream.trainer.checkpoint_folder import Manifest, measure
from megastream.trainer.checkpoint_index import NAMES
from megastream.trainer.compat_checkpoint import PlannedSave
from megastream.trainer.config import TrainerConfig
from tests.distributed.test_checkpoint import checkpointer, start, writing_held_back
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_config


@contextmanager
def no_room() -> Iterator[None]:
    """Files of this process end at 100 bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def word(call: Callable[[], object], *, no_room_here: bool = False) -> str:
    """What all ranks agreed is wrong, or nothing."""
    try:
        with no_room() if no_room_here else nullcontext():
            call()
    except AgreedError as error:
        return str(error)
    return ""


def _no_room_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: Path) -> list[str]:
    chunks, optimizer, _ = start(config, rank, world_size, init_method)
    checkpoints = checkpointer(chunks, optimizer, config, folder)
    checkpoints.open()

    def save_and_wait() -> None:
        checkpoints.save(2, {})
        checkpoints.poll(wait=True)

    said = [word(lambda: checkpoints.save(1, {}), no_room_here=rank == 0)]
    said.append(word(save_and_wait, no_room_here=rank == 1))
    checkpoints.save(3, {})
    assert checkpoints._pending is not None and checkpoints._pending.is_written_within(30)
    said.append(word(lambda: checkpoints.poll(wait=True), no_room_here=rank == 0))
    checkpoints.save(4, {})
    saved = checkpoints.poll(wait=True)
    assert saved is not None and checkpoints.load() is not None, "no rank is left in a collective of the failed ones"
    checkpoints.close()
    return said


@pytest.mark.full
def test_what_one_rank_cannot_write_is_everybodys_error(tmp_path: Path) -> None:
    """The common part and the index are written by rank 0 alone, between collectives; files by every rank."""
    one, other = run_ranks(_no_room_body, 2, config=tiny_config(layers=2), folder=tmp_path)
    assert one == other
    for step, said in enumerate(one, start=1):
        assert f"the checkpoint of step {step} cannot be written to {tmp_path}: " in said and "\n" not in said
    assert "trainer rank 1: " in one[1] and "File too large" in one[1] and "File too large" in one[2]
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000004"]


def _hanging_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: Path) -> list[str]:
    chunks, optimizer, _ = start(config, rank, world_size, init_method)
    checkpoints = checkpointer(chunks, optimizer, config, folder, deadline_s=6.0)
    checkpoints.open()
    with writing_held_back() if rank == 1 else nullcontext():
        checkpoints.save(1, {})
        said = [word(lambda: checkpoints.poll(wait=True))]
    checkpoints.close()
    dies = checkpointer(chunks, optimizer, config, folder / "dies")
    dies.open()

    def dying(planned: PlannedSave) -> None:
        raise LookupError("what nobody thought of")

    if rank == 1:
        PlannedSave.write = dying  # type: ignore[method-assign]
    dies.save(1, {})
    return [*said, word(lambda: dies.poll(wait=True))]


@pytest.mark.full
def test_a_writer_that_hangs_or_dies_is_everybodys_error(tmp_path: Path) -> None:
    one, other = run_ranks(_hanging_body, 2, config=tiny_config(layers=2), folder=tmp_path)
    assert one == other
    assert one[0] == "the checkpoint of step 1 is not written by trainer rank 1 after 6 s; raise deadlines.save_s"
    assert one[1].startswith("trainer rank 1: the checkpoint of step 1 cannot be written to ")
    assert "broke off" in one[1]
    assert not list(tmp_path.rglob("step_*"))


def tamper(path: Path) -> None:
    """The index forgets one box of one tensor."""
    index = path / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    name = next(key for key in metadata.state_dict_metadata if ".exp_avg." in key)
    metadata.state_dict_metadata[name].chunks.pop()
    index.write_bytes(pickle.dumps(metadata))


def forget(path: Path) -> None:
    """The index forgets one tensor, whose bytes lie in a file that others name."""
    index = path / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    name = next(key for key in metadata.state_dict_metadata if ".exp_avg." in key)
    del metadata.state_dict_metadata[name]
    places = {key: place for key, place in metadata.storage_data.items() if key.fqn != name}
    files = {place.relative_path for place in metadata.storage_data.values()}
    assert files == {place.relative_path for place in places.values()}
    index.write_bytes(pickle.dumps(replace(metadata, storage_data=places)))


def spoil_index(path: Path) -> None:
    (path / ".metadata").write_bytes(b"no index")


def measured_anew(path: Path, without: str = "") -> None:
    """As if these files had been published, all but one."""
    manifest = Manifest.read(path)
    files = {name: measure(path / name) for name in manifest.files if name != without}
    replace(manifest, files=files).write(path / "manifest.json")


def _index_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: Path) -> list[str]:
    chunks, optimizer, _ = start(config, rank, world_size, init_method)
    checkpoints = checkpointer(chunks, optimizer, config, folder)
    checkpoints.open()
    publish, said = PlannedSave.publish_index, []

    def tampering(planned: PlannedSave) -> None:
        publish(planned)
        if rank == 0:
            spoils[len(said)](planned.files[0].parent)

    PlannedSave.publish_index = tampering  # type: ignore[method-assign]
    spoils = (tamper, forget)
    for step in range(len(spoils)):
        checkpoints.save(step, {})
        said.append(word(lambda: checkpoints.poll(wait=True)))
    PlannedSave.publish_index = publish  # type: ignore[method-assign]
    checkpoints.save(2, {})
    checkpoints.poll(wait=True)
    path = folder / "step_00000002"
    index = (path / ".metadata").read_bytes()
    for spoil in (tamper, forget, spoil_index):
        if rank == 0:
            (path / ".metadata").write_bytes(index)
            spoil(path)
            measured_anew(path)
        dist.barrier()
        said.append(word(checkpoints.load))
    if rank == 0:
        (path / ".metadata").write_bytes(index)
        measured_anew(path, without=NAMES)
    dist.barrier()
    assert checkpoints.load() is not None, "an earlier version saved it, and no names"
    checkpoints.close()
    return said


@pytest.mark.full
def test_an_index_that_is_not_true_is_neither_published_nor_loaded(tmp_path: Path) -> None:
    """Though every file of the checkpoint is there, with the checksum of the manifest."""
    one, other = run_ranks(_index_body, 2, config=tiny_config(layers=2), folder=tmp_path)
    assert one == other
    assert "the checkpoint of step 0 cannot be written to " in one[0] and "the index holds " in one[0]
    assert "the checkpoint of step 1 cannot be written to " in one[1] and "the index does not hold " in one[1]
    assert "no checkpoint to load: " in one[2] and "step_00000002: the index holds " in one[2]
    assert "step_00000002: the index does not hold optimizer.state.exp_avg." in one[3]
    assert "step_00000002: the index cannot be read (UnpicklingError: " in one[4]
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000002"]
