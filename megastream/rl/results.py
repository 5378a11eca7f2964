"""The files that the processes of a run wrote, and the proof that all passes were the same training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megastream.rl.job import Job, Pass, passes_of, read_lines


class SummaryError(ValueError):
    """The files of a run do not fit together: something that must be there is missing, or passes differ."""


@dataclass
class Files:
    """All lines that the processes of a run wrote."""

    job: Job
    trainer: list[dict[str, Any]]
    engine: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    versions: list[dict[str, Any]]
    records: dict[str, Any]

    @staticmethod
    def read(job: Job) -> Files:
        ranks = range(job.config.trainer.ranks)
        return Files(
            job,
            [line for rank in ranks for line in read_lines(job.results / f"trainer-{rank}.jsonl")],
            read_lines(job.results / "engine.jsonl"),
            read_lines(job.results / "answers.jsonl"),
            read_lines(job.results / "versions.jsonl"),
            json.loads((job.results / "records.json").read_text()),
        )

    def description(self) -> dict[str, Any]:
        """The engine's line about itself."""
        for line in self.engine:
            if line["kind"] == "engine":
                return line
        raise SummaryError("engine.jsonl has no line of kind engine; the host writes it when the engine answers")

    def steps(self, one: Pass) -> list[list[dict[str, Any]]]:
        """The pass's steps, each with the lines of all ranks. SummaryError when a step or a rank is missing."""
        steps: dict[int, list[dict[str, Any]]] = {}
        for line in self.trainer:
            if line["kind"] == "step" and line["name"] == one.name:
                steps.setdefault(line["step"], []).append(line)
        ranks = self.job.config.trainer.ranks
        for index in range(one.updates):
            found = sorted(line["rank"] for line in steps.get(index, []))
            if found != list(range(ranks)):
                raise SummaryError(
                    f"step {index} of pass {one.name} has lines of ranks {found}, not one of each of {ranks}"
                )
        if len(steps) != one.updates:
            raise SummaryError(f"pass {one.name} has lines of {len(steps)} steps; {one.updates} were to be made")
        return [steps[index] for index in sorted(steps)]

    def made(self, one: Pass) -> list[int]:
        """Versions that the pass's steps made; a skipped step (norm not finite) makes none."""
        return [step[0]["version"] for step in self.steps(one) if step[0]["version"] >= 0]

    def finals(self, one: Pass) -> dict[int, str]:
        """Rank -> digest of its final parameters. SummaryError unless every rank left exactly one."""
        lines = [line for line in self.trainer if line["kind"] == "final" and line["name"] == one.name]
        ranks = sorted(line["rank"] for line in lines)
        if ranks != list(range(self.job.config.trainer.ranks)):
            raise SummaryError(
                f"pass {one.name} has final digests of ranks {ranks}, not one of each of "
                f"{self.job.config.trainer.ranks}"
            )
        return {line["rank"]: line["digest"] for line in lines}

    def mark(self, kind: str, name: str) -> dict[str, Any]:
        """Rank 0's note of when a pass began or ended."""
        for line in self.trainer:
            if line["kind"] == kind and line["name"] == name:
                return line
        raise SummaryError(f"pass {name} has no mark {kind!r} in trainer-0.jsonl")

    def live_versions(self, name: str) -> list[dict[str, Any]]:
        """Version lines of a pass, without its base."""
        return [line for line in self.versions if line["pass"] == name and line["train_step"] > 0]


def compare_passes(files: Files) -> None:
    """Every pass is the same training: losses, norms and final parameters of equal steps must be equal bit for bit.

    Shorter passes are compared as far as they go, and their final parameters with those of passes of their length.
    """
    first, *others = passes_of(files.job.config)
    by_length = {first.updates: first}
    files.finals(first)
    for other in others:
        for mine, theirs in zip(files.steps(first), files.steps(other), strict=first.updates == other.updates):
            for a, b in zip(_by_rank(mine), _by_rank(theirs), strict=True):
                _same_step(first, a, other, b)
        peer = by_length.setdefault(other.updates, other)
        if files.finals(peer) != files.finals(other):
            raise SummaryError(f"passes {peer.name} and {other.name} end with different parameters")


def _by_rank(step: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(step, key=lambda line: int(line["rank"]))


def _same_step(first: Pass, a: dict[str, Any], other: Pass, b: dict[str, Any]) -> None:
    if (a["loss"], a["grad_norm"]) != (b["loss"], b["grad_norm"]):
        raise SummaryError(
            f"step {a['step']} on rank {a['rank']} differs: {first.name} has loss {a['loss']} and norm "
            f"{a['grad_norm']}, {other.name} has {b['loss']} and {b['grad_norm']}"
        )
