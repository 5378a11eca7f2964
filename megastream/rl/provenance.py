"""Which weights made a token, from records: what every rank held at every step, joined with what the tokens say.

Three sources that know nothing of each other are compared: each rank's own (step, live version), the core's batches
(step, stamp, tokens of each request), and the spans that came out with the answers. A missing record is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


class ProvenanceError(ValueError):
    """A record is missing, so nothing can be said about some tokens. Names the step, the rank or the request."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One engine step as the core saw it: its number, its stamp, and the new tokens of each request."""

    step: int
    stamp: str
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request. `request` is the name under which batches know it; spans are (version, start, end)."""

    request: str
    num_tokens: int
    spans: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """`mixed`: the ranks held different versions at the token's step. `mislabelled`: its span says another one."""

    checked: int
    mixed: int
    mislabelled: int


def check_tokens(
    batches: Iterable[Batch],
    ranks: Sequence[Sequence[tuple[int, str]]],
    answers: Iterable[Answer],
    wanted: Callable[[str], bool],
) -> TokenCounts:
    """Counts over all tokens that `wanted` says yes to for any rank's live version or for the token's own label.

    Asked so broadly, because a rank or a label that is wrong must not take the token out of the count.
    """
    live = [_by_step(rank, records) for rank, records in enumerate(ranks)]
    made_by = _tokens_of_requests(batches)
    checked = mixed = mislabelled = 0
    for answer in answers:
        steps = made_by.get(answer.request, [])
        if len(steps) != answer.num_tokens:
            raise ProvenanceError(
                f"request {answer.request} has {answer.num_tokens} tokens, but the batches made {len(steps)} of them"
            )
        for step, label in zip(steps, _labels(answer), strict=True):
            versions = [_held(records, rank, step) for rank, records in enumerate(live)]
            if not any(map(wanted, {*versions, label})):
                continue
            checked += 1
            mixed += len(set(versions)) > 1
            mislabelled += any(label != version for version in versions)
    return TokenCounts(checked, mixed, mislabelled)


def _by_step(rank: int, records: Sequence[tuple[int, str]]) -> dict[int, str]:
    held: dict[int, str] = {}
    for step, version in records:
        if held.setdefault(step, version) != version:
            raise ProvenanceError(f"engine rank {rank} has two records of step {step}: {held[step]} and {version}")
    return held


def _tokens_of_requests(batches: Iterable[Batch]) -> dict[str, list[int]]:
    """Request -> the step of each of its tokens, in order."""
    steps: dict[str, list[int]] = {}
    for batch in sorted(batches, key=lambda batch: batch.step):
        for request, count in batch.tokens.items():
            steps.setdefault(request, []).extend([batch.step] * count)
    return steps


def _labels(answer: Answer) -> list[str]:
    """The version that the answer's spans give to each token."""
    labels: list[str | None] = [None] * answer.num_tokens
    for version, start, end in answer.spans:
        labels[start:end] = [version] * (end - start)
    if len(labels) != answer.num_tokens or None in labels:
        raise ProvenanceError(
            f"the spans of request {answer.request} do not cover its {answer.num_tokens} tokens: {answer.spans}"
        )
    return [label for label in labels if label is not None]


def _held(records: dict[int, str], rank: int, step: int) -> str:
    if step not in records:
        raise ProvenanceError(f"engine rank {rank} has no record of step {step}, which made tokens")
    return records[step]
