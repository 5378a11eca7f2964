"""Checked passes: the engine's live bytes against the trainer's raw parameters, by way of the oracle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

import torch

from megastream.rl import oracle
from megastream.rl.checkpoint import tensor_shapes, write_checkpoint
from megastream.rl.job import Job, Notes


class RankCalls(Protocol):
    """The one call of the engine that is needed; vLLM's AsyncLLM has it."""

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        """One worker method on every rank, in order with the steps; the replies in rank order."""


class Checker:
    """Compares one live version at a time. The trainer waits meanwhile, so the version stays."""

    def __init__(self, job: Job, engine: RankCalls, notes: Notes) -> None:
        self._job, self._engine, self._notes = job, engine, notes
        self._last: dict[str, torch.Tensor] = {}

    async def check(self, version: int) -> dict[str, Any]:
        """Version, number of tensors compared, names that differ.

        ValueError when an engine rank cannot read its weights or holds another version.
        """
        paths = await self._raw(version)
        live = await self._live(version)
        names, differing = await asyncio.to_thread(self._compare, paths, live)
        for path in paths:
            path.unlink()
        return {"version": version, "tensors": names, "differing": differing}

    def export(self, folder: Path) -> None:
        """Writes the last checked version as a checkpoint, from the trainer's parameters and not from the engine's.

        ValueError when none was checked or the tensors are not those of the model.
        """
        model = self._job.config.model
        held = {name: tuple(tensor.shape) for name, tensor in self._last.items()}
        if held != dict(tensor_shapes(model)):
            raise ValueError(f"the last checked version has {len(held)} tensors that are not those of the model")
        write_checkpoint(folder, model, {name: tensor.clone() for name, tensor in self._last.items()})

    async def _raw(self, version: int) -> list[Path]:
        deadline_s, ranks = self._job.config.deadlines.step_s, self._job.config.trainer.ranks
        paths = []
        for rank in range(ranks):
            note = await asyncio.to_thread(
                self._notes.wait, f"raw/{version}/{rank}", deadline_s, f"trainer rank {rank}"
            )
            paths.append(Path(note["path"]))
        return paths

    async def _live(self, version: int) -> list[dict[str, str]]:
        replies = await self._engine.collective_rpc("megastream_call", args=("digest", {}))
        for reply in replies:
            if not reply["ok"]:
                raise ValueError(f"engine rank {reply['rank']} cannot read its live weights: {reply['error']}")
            if reply["label"] != str(version):
                raise ValueError(
                    f"engine rank {reply['rank']} holds version {reply['label']}, {version} is to be checked"
                )
        return [reply["digests"] for reply in sorted(replies, key=lambda reply: reply["rank"])]

    def _compare(self, paths: list[Path], live: list[dict[str, str]]) -> tuple[int, list[str]]:
        model = self._job.config.model
        engine = oracle.EngineShape.of(self._job.config.engine.layout)
        hf = oracle.to_hf(oracle.gather([oracle.read_dump(path) for path in paths]), model)
        self._last = hf
        num_tensors, differing = 0, []
        for rank in range(engine.ranks):
            expected = {n: oracle.digest(t) for n, t in oracle.expected_live(hf, model, engine, rank).items()}
            num_tensors += len(expected)
            differing += [f"rank {rank}: {name}" for name in oracle.compare(expected, live[rank])]
        return num_tensors, differing
