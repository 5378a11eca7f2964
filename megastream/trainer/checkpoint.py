"""Checkpoints of a trainer: saved beside the training, complete or not there, loaded under any layout.

    checkpoints = Checkpointer(chunks, optimizer, folder, settings, facts=facts, layout=layout)
    checkpoints.open()
    resumed = checkpoints.load()            # None in an empty folder
    while training:
        step()
        if time_to_save:
            checkpoints.save(step, state)   # copies, then writes in a thread
        checkpoints.poll()                  # publishes what has been written on every rank
    checkpoints.poll(wait=True)
    checkpoints.close()

Every rank makes the same calls in the same order; all ranks see one file system. What fails on one rank is raised on
all of them as AgreedError, with the words of the first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megastream.trainer import compat, compat_checkpoint
from megastream.trainer.agreement import AgreedError, gather, raise_first, together
from megastream.trainer.checkpoint_folder import CheckpointError, CheckpointFolder, Manifest, faults, measure, reading
from megastream.trainer.checkpoint_index import index_faults, write_names
from megastream.trainer.checkpoint_pending import PendingSave
from megastream.trainer.checkpoint_state import describe, snapshot, tensor_names
from megastream.trainer.checkpoint_types import CheckpointSettings, Resumed, Saved, mismatch

_POLL_S = 0.01
_VISIBLE_S = 10.0
"""How long a folder made on one node may take to be seen on another."""


class Checkpointer:
    """One per trainer rank. `facts` are what a training that resumes must share, `layout` says how this one is cut."""

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        folder: Path,
        settings: CheckpointSettings,
        *,
        facts: dict[str, Any],
        layout: dict[str, Any],
    ) -> None:
        self._chunks, self._optimizer, self._settings = chunks, optimizer, settings
        self._facts, self._layout = facts, {**layout, "ranks": dist.get_world_size()}
        self._folder, self._rank = CheckpointFolder(folder), dist.get_rank()
        self._pending: PendingSave | None = None

    def open(self) -> list[str]:
        """Takes the folder and sweeps what a killed trainer left in it; returns the names, on rank 0."""
        swept: list[str] = []
        with together(CheckpointError, OSError):
            if self._rank == 0:
                swept = self._folder.open(self._settings.deadline_s)
        with together(CheckpointError):
            self._see(self._folder.root)
        return swept

    def close(self) -> None:
        """Gives the folder back. A save that was not waited for is left unfinished, and swept at the next start."""
        self._folder.close()

    # ---- saving

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Starts a save of everything as it is now; training may go on when it returns. `state` is plain JSON data.

        Blocks while tensors are copied to the CPU, and until an earlier save has been published.
        """
        self.poll(wait=True)
        begin = time.monotonic()
        folder = self._begin(step)
        counts = set().union(*gather(compat_checkpoint.adam_steps(self._optimizer)))
        if len(counts) > 1:
            raise AgreedError(f"parameters were stepped {sorted(counts)} times; a checkpoint holds one step count")
        adam_step = counts.pop() if counts else 0
        compat_checkpoint.allocate_moments(self._optimizer)
        with together(*compat_checkpoint.loading_errors()):
            parts = describe(self._chunks, self._optimizer)
            names = tensor_names(parts)
            snapshot(parts)
        names = set().union(*gather(names))
        parts |= {"iteration": step, "train_state": state, "random": gather(compat_checkpoint.random_states())}
        with self._writing(step):
            planned = compat_checkpoint.plan_save(parts, folder)
            if self._rank == 0:
                write_names(folder, names)
        manifest = Manifest(
            step, self._facts, {**state, "adam_step": adam_step}, layout=self._layout, libraries=_libraries()
        )
        self._pending = PendingSave(folder, manifest, planned, begin, time.monotonic() - begin)
        self._pending.start(f"megastream-save-{self._rank}")

    def poll(self, *, wait: bool = False) -> Saved | None:
        """Publishes the pending save once every rank has written; None while it goes on, or when there is none.

        AgreedError, once for a save, when writing failed somewhere, or is not done after `deadline_s`.
        """
        pending = self._pending
        if pending is None:
            return None
        left_s = self._settings.deadline_s - (time.monotonic() - pending.begin_s)
        writing = gather(not pending.is_written_within(max(left_s, 0.0) if wait else 0.0))
        if any(writing):
            if any(gather(left_s <= 0 or wait)):
                self._pending = None
                raise AgreedError(
                    f"the checkpoint of step {pending.manifest.step} is not written by trainer rank "
                    f"{writing.index(True)} after {self._settings.deadline_s:g} s; raise deadlines.save_s"
                )
            return None
        self._pending = None
        return self._publish(pending)

    def _publish(self, pending: PendingSave) -> Saved:
        with self._writing(pending.manifest.step):
            if pending.error:
                raise CheckpointError(pending.error)
        with self._writing(pending.manifest.step):
            pending.planned.publish_index()
        files = {name: fact for part in gather(pending.files) for name, fact in part.items()}
        removed: list[str] = []
        path = pending.folder
        with self._writing(pending.manifest.step):
            if self._rank == 0:
                files |= {p.name: measure(p) for p in pending.folder.iterdir() if p.name not in files}
                _refuse_faults(pending.folder, list(index_faults(pending.folder, _sizes(files))))
                path = self._folder.publish(pending.folder, replace(pending.manifest, files=files))
                removed = self._folder.prune(self._settings.keep, pending.manifest.step)
        num_bytes = sum(size for size, _ in files.values())
        total_s = time.monotonic() - pending.begin_s
        return Saved(pending.manifest.step, path, num_bytes, pending.blocked_s, total_s, tuple(removed))

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """What goes wrong in the block, on whatever rank, is an AgreedError that names the checkpoint."""
        with together(CheckpointError):
            try:
                yield
            except compat_checkpoint.loading_errors() as error:
                raise CheckpointError(
                    f"the checkpoint of step {step} cannot be written to {self._folder.root}: {error}"
                ) from error

    def _begin(self, step: int) -> Path:
        path = ""
        with together(CheckpointError, OSError):
            if self._rank == 0:
                path = str(self._folder.begin(step, self._settings.launch))
        folder = Path(gather(path)[0])
        with together(CheckpointError):
            self._see(folder)
        return folder

    def _see(self, folder: Path) -> None:
        end = time.monotonic() + min(_VISIBLE_S, self._settings.deadline_s)
        while not folder.is_dir():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"trainer rank {self._rank} does not see {folder}; all nodes need one file system"
                )
            time.sleep(_POLL_S)

    # ---- loading

    def load(
        self, which: Path | None = None, *, allow_changed: Sequence[str] = (), weights_only: bool = False
    ) -> Resumed | None:
        """Loads `which`, or the newest checkpoint that is whole, into model and optimizer; None when there is none.

        Newer ones in the folder were not whole: they get names that are never picked. `allow_changed` are dotted names
        of facts that may differ. `weights_only` resets the fp32 masters to the loaded weights and forgets the moments.
        AgreedError when `which` is not whole, when there are checkpoints and none is whole, or when it is of another
        model, data or schedule: the message names what differs.
        """
        with ExitStack() as held:
            found = self._find(which, held)
            if found is None:
                return None
            path, manifest, refused = found
            if which is not None and not weights_only:
                self._refuse_newer(path, manifest.step)
            raise_first(gather(mismatch(path, manifest.facts, self._facts, allow_changed) or None))
            loaded = self._read(path, manifest, weights_only)
            same = manifest.layout == self._layout and not weights_only
            if same:
                compat_checkpoint.set_random_states(loaded["random"][self._rank])
            with together(OSError):  # also: nobody reads any more when the lock on it ends
                if refused and self._rank == 0:
                    self._folder.go_back(path)
        return Resumed(manifest.step, path, manifest.state, tuple(refused), same, weights_only)

    def refuse_any(self) -> None:
        """AgreedError when the folder holds a checkpoint: a training that begins anew would mix with it."""
        if found := self._folder_complete():
            raise AgreedError(f"{found[0][1]} is there already; resume it, or choose another folder for a new training")

    def _refuse_newer(self, path: Path, step: int) -> None:
        """A folder holds one training: what is newer than where it goes on would be taken at the next start."""
        newer = [other for number, other in self._folder_complete() if number > step]
        if newer and path.resolve().parent == self._folder.root.resolve():
            raise AgreedError(f"{path} is older than {newer[0].name} beside it; move that away, or save elsewhere")

    def _find(self, which: Path | None, held: ExitStack) -> tuple[Path, Manifest, list[str]] | None:
        """The first whole one of the candidates; rank 0 keeps it from being removed for as long as `held` lasts."""
        paths = [which] if which is not None else [path for _, path in self._folder_complete()]
        refused: list[str] = []
        for path in paths:
            reason: str | None = None
            manifest: Manifest | None = None
            if self._rank == 0:
                try:
                    manifest = held.enter_context(reading(path))
                except (CheckpointError, OSError) as error:
                    reason = str(error)
            manifest, reason = gather((manifest, reason))[0]
            if manifest is not None:
                reason = self._verify(path, manifest)
                if reason is None:
                    return path, manifest, refused
            refused.append(reason or "")
        if refused:
            remedy = "give another one" if which is not None else "restore one, or choose an empty folder to begin anew"
            raise AgreedError(f"no checkpoint to load: {'; '.join(refused)}; {remedy}")
        return None

    def _folder_complete(self) -> list[tuple[int, Path]]:
        found: list[tuple[int, Path]] = []
        with together(OSError):
            if self._rank == 0:
                found = self._folder.complete()
        return list(gather(found)[0])

    def _verify(self, path: Path, manifest: Manifest) -> str | None:
        """Why it is not whole, or None. Each rank reads its share of the files."""
        files = sorted(manifest.files.items())
        mine = list(faults(path, files[self._rank :: dist.get_world_size()]))
        found = [fault for part in gather(mine) for fault in part]
        if not found:
            found = gather(list(index_faults(path, _sizes(manifest.files))) if self._rank == 0 else [])[0]
        return f"{path}: {found[0]}" + (f" and {len(found) - 1} more" if len(found) > 1 else "") if found else None

    def _read(self, path: Path, manifest: Manifest, weights_only: bool) -> dict[str, Any]:
        if not weights_only:
            if "adam_step" not in manifest.state:
                raise AgreedError(
                    f"{path} does not say how often Adam stepped; load weights_only from it, or another one"
                )
            compat_checkpoint.allocate_moments(self._optimizer)
        with together(*compat_checkpoint.loading_errors()):
            parts = describe(self._chunks, None if weights_only else self._optimizer)
        with together(*compat_checkpoint.loading_errors()):  # what fails in one of its ranks, megatron raises in all
            loaded = compat_checkpoint.load_into(parts, path)
            for number, chunk in enumerate(self._chunks):
                compat_checkpoint.set_model(chunk, loaded[f"model{number}"])
        if weights_only:
            compat.forget_moments(self._optimizer)
            self._optimizer.reload_model_params()
        else:
            compat_checkpoint.set_adam_steps(self._optimizer, manifest.state["adam_step"])
        return loaded


def _refuse_faults(folder: Path, found: list[str]) -> None:
    if found:
        raise CheckpointError(
            f"{folder} is not whole: {found[0]}" + (f" and {len(found) - 1} more" if found[1:] else "")
        )


def _sizes(files: dict[str, tuple[int, str]]) -> dict[str, int]:
    return {name: size for name, (size, _) in files.items()}


def _libraries() -> dict[str, str]:
    return {"megatron-core": compat.check_version(), "torch": torch.__version__}
