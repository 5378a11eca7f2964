"""What lies in a checkpoint folder: published, swept, pruned, read."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from megastream.trainer import checkpoint_folder
from megastream.trainer.checkpoint_folder import (
    CURRENT,
    CheckpointError,
    CheckpointFolder,
    Manifest,
    faults,
    measure,
    reading,
)
from megastream.trainer.checkpoint_types import mismatch


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    found = CheckpointFolder(tmp_path)
    found.open(1)
    return found


def save(folder: CheckpointFolder, step: int, content: bytes = b"weights") -> Path:
    path = folder.begin(step, "launch")
    (path / "a.distcp").write_bytes(content)
    return folder.publish(path, Manifest(step, {}, {"step": step}, files={"a.distcp": measure(path / "a.distcp")}))


def test_a_published_one_is_whole_and_current(folder: CheckpointFolder) -> None:
    path = save(folder, 40)
    assert path.name == "step_00000040" and (folder.root / CURRENT).read_text() == "step_00000040\n"
    with reading(path) as manifest:
        assert manifest.step == 40 and list(faults(path, manifest.files.items())) == []
    assert folder.complete() == [(40, path)]


def _fails(path: Path) -> tuple[int, str]:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_every_kind_of_damage_is_a_fault(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folder, 1)
    files = list(Manifest.read(path).files.items())
    for content, words in ((b"weight", "has 6 bytes, the manifest says 7"), (b"weighty", "does not have the checksum")):
        (path / "a.distcp").write_bytes(content)
        assert [words in fault for fault in faults(path, files)] == [True]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "measure", _fails)
        (path / "a.distcp").write_bytes(b"weights")
        assert list(faults(path, files)) == ["file a.distcp cannot be read (Input/output error)"]
    (path / "a.distcp").unlink()
    assert list(faults(path, files)) == ["file a.distcp is missing"]
    (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"), reading(path):
        pass
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="its save did not finish"), reading(path):
        pass


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [('"step": 4,', '"step": "4",', "cannot be read .*`int`"), ('"state": {', '"states": {', "cannot be read")],
)
def test_a_manifest_that_is_none_of_ours_is_one_line(folder: CheckpointFolder, old: str, new: str, words: str) -> None:
    manifest = save(folder, 4) / "manifest.json"
    assert old in (text := manifest.read_text())
    manifest.write_text(text.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=words), reading(manifest.parent):
        pass


def test_a_copy_under_the_name_of_another_step_is_not_read(folder: CheckpointFolder) -> None:
    """Else it would be the newest at every start, and what was trained since be trained again."""
    copy = save(folder, 4).rename(folder.root / "step_00000050")
    with pytest.raises(CheckpointError, match="step_00000050 is of step 4, as its manifest.json says"), reading(copy):
        pass


def test_what_is_unfinished_is_never_listed_and_swept_at_the_next_start(folder: CheckpointFolder) -> None:
    left = folder.begin(7, "killed")
    (left / "part").write_text("x")
    (folder.root / ".removing-step_00000001-5").mkdir()
    (folder.root / "notes.txt").write_text("mine")
    assert folder.complete() == []
    folder.close()
    assert CheckpointFolder(folder.root).open(1) == [".removing-step_00000001-5", ".saving-step_00000007-killed"]
    assert not left.exists() and (folder.root / "notes.txt").exists(), "only names of ours are swept"


def test_a_second_trainer_is_kept_out(folder: CheckpointFolder) -> None:
    going_on = folder.begin(3, "first")
    with pytest.raises(CheckpointError, match=r"in use by another trainer for 0.2 s"):
        CheckpointFolder(folder.root).open(0.2)
    assert going_on.exists(), "the save of a living trainer is not swept"
    folder.close()
    CheckpointFolder(folder.root).open(0.2)


def test_a_folder_where_the_newest_ones_name_goes_is_refused_before_anything_is_saved(tmp_path: Path) -> None:
    (tmp_path / "CURRENT").mkdir()
    with pytest.raises(CheckpointError, match="CURRENT is a folder, and a file goes there; move it away"):
        CheckpointFolder(tmp_path).open(0.2)
    assert [path.name for path in tmp_path.iterdir()] == ["CURRENT"]


def test_the_newest_ones_stay(folder: CheckpointFolder) -> None:
    for step in (1, 2, 10, 9):
        save(folder, step)
    assert folder.prune(2, 10) == ["step_00000002", "step_00000001"]
    assert [step for step, _ in folder.complete()] == [10, 9]


def test_the_one_just_published_stays_whatever_is_newer(folder: CheckpointFolder) -> None:
    for step in (10, 50, 12):
        save(folder, step)
    assert folder.prune(1, 12) == ["step_00000010"]
    assert [step for step, _ in folder.complete()] == [50, 12]


def test_what_was_not_whole_counts_for_nothing_once_training_went_on_from_an_older_one(
    folder: CheckpointFolder,
) -> None:
    """Otherwise it takes the place of one that is whole, or of the next one that is saved."""
    kept = save(folder, 10, b"good")
    for step in (20, 30):
        (save(folder, step) / "a.distcp").unlink()
    folder.go_back(kept)
    assert folder.complete() == [(10, kept)] and (folder.root / CURRENT).read_text() == "step_00000010\n"
    refused = sorted(path.name.rsplit("-", 1)[0] for path in folder.root.glob("refused-*"))
    assert refused == ["refused-step_00000020", "refused-step_00000030"], "whoever wants to can still look at them"
    save(folder, 12)
    assert folder.prune(2, 12) == []
    assert [step for step, _ in folder.complete()] == [12, 10]
    folder.close()
    assert CheckpointFolder(folder.root).open(1) == [] and len(list(folder.root.glob("refused-*"))) == 2


def test_one_that_is_read_stays_until_it_has_been_read(folder: CheckpointFolder) -> None:
    first = save(folder, 1)
    entered, leave, seen = threading.Event(), threading.Event(), []

    def slow_reader() -> None:
        with reading(first) as manifest:
            entered.set()
            leave.wait(10)
            seen.extend(faults(first, manifest.files.items()))
            seen.append((first / "a.distcp").read_bytes())

    reader = threading.Thread(target=slow_reader)
    reader.start()
    entered.wait(10)
    for step in (2, 3):
        save(folder, step)
        folder.prune(1, step)
    assert [step for step, _ in folder.complete()] == [3, 1], "only the one that is read stays beside the newest"
    leave.set()
    reader.join(10)
    assert seen == [b"weights"]
    assert folder.prune(1, 3) == ["step_00000001"]
    with pytest.raises(CheckpointError), reading(first):
        pass


FLOCK = fcntl.flock


def flock_of_nfs(file: int, operation: int) -> None:
    """There a lock is one on the bytes of a file, and takes a descriptor that may read or write them: flock(2)."""
    access = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
    if access == (os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    FLOCK(file, operation)


def test_old_ones_are_read_replaced_and_removed_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    folder = CheckpointFolder(tmp_path)
    folder.open(1)
    for step in (1, 2, 2):
        with reading(save(folder, step)) as manifest:
            assert manifest.step == step
    assert folder.prune(1, 2) == ["step_00000001"]


def test_an_old_one_that_cannot_be_moved_stays_and_is_warned_of(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step just published is whole: what is older ends no training."""
    for step in (1, 2, 3):
        save(folder, step)
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        return _fails(path) if path.name == "step_00000002" else rename(path, target)  # type: ignore[return-value]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renamed)
        assert folder.prune(1, 3) == ["step_00000001"]
    (line,) = caplog.messages
    assert "step_00000002 is older than the 1 that are kept, and stays: [Errno 5] Input/output error" in line
    assert folder.prune(1, 3) == ["step_00000002"]


def test_a_step_that_is_saved_again_replaces_the_old_one(folder: CheckpointFolder) -> None:
    save(folder, 4, b"old")
    path = save(folder, 4, b"new")
    assert (path / "a.distcp").read_bytes() == b"new"
    assert [entry.name for entry in folder.root.iterdir() if entry.name.startswith(".removing")] == []


def test_a_step_that_is_saved_again_waits_for_who_reads_the_old_one(folder: CheckpointFolder) -> None:
    old = save(folder, 4, b"old")
    folder.close()
    folder.open(0.1)
    with reading(old), pytest.raises(CheckpointError, match="step_00000004 is read by another process for 0.1 s, and"):
        save(folder, 4, b"new")
    assert (old / "a.distcp").read_bytes() == b"old"
    folder.close()
    folder.open(10)
    entered, leave = threading.Event(), threading.Event()

    def reader() -> None:
        with reading(old):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=reader)
    thread.start()
    entered.wait(10)
    threading.Timer(0.2, leave.set).start()
    assert (save(folder, 4, b"new") / "a.distcp").read_bytes() == b"new"
    thread.join(10)


def test_a_step_that_was_being_replaced_by_a_killed_trainer_is_not_lost(folder: CheckpointFolder) -> None:
    for step in (4, 5):
        path = save(folder, step)
        path.rename(folder.root / f".replaced-{path.name}-17")
    save(folder, 5, b"new")
    folder.close()
    assert CheckpointFolder(folder.root).open(1) == [".replaced-step_00000005-17"]
    assert [step for step, _ in folder.complete()] == [5, 4]
    assert (folder.root / "step_00000005" / "a.distcp").read_bytes() == b"new"


def test_differing_facts_are_named_and_may_be_allowed() -> None:
    there = {"model": {"hidden": 48, "vocab": 100}, "optimizer": {"rate": 0.1}, "seed": 1}
    here = {"model": {"hidden": 64, "vocab": 100}, "optimizer": {"rate": 0.2}, "seed": 1}
    said = mismatch(Path("c"), there, here, ())
    assert "model.hidden is 48 there and 64 here, optimizer.rate is 0.1 there and 0.2 here" in said
    assert "optimizer" not in mismatch(Path("c"), there, here, ["optimizer"])
    assert mismatch(Path("c"), there, here, ["optimizer.rate", "model.hidden"]) == ""
    assert mismatch(Path("c"), there, there, ()) == ""
    assert "model.vocab is 100 there and None here" in mismatch(
        Path("c"), there, {**there, "model": {"hidden": 48}}, ()
    )
