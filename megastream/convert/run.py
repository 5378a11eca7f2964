"""Converts and compares whole folders: describe, prove, plan, then move."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path

from megastream.convert.compare_fp8 import Held, fp8_difference
from megastream.convert.complete import Difference, by_tensor, check_complete, check_replicas, first_difference
from megastream.convert.contract import target_dtypes
from megastream.convert.execute import MIN_MEMORY_BYTES, Job, Writer, jobs_of
from megastream.convert.forms import Options, plan_target, read_form
from megastream.convert.fp8 import scale_name
from megastream.convert.landing import Landing
from megastream.convert.model import CONFIG, Model, find_model
from megastream.convert.mtp import as_held
from megastream.convert.reading import Reader
from megastream.convert.types import ConvertError, Form, Holding, Target
from megastream.layout.box import Box
from megastream.layout.shard import RankLayout, Shard
from megastream.plan.build import build_plan
from megastream.plan.types import Plan

_PIECE_BYTES = 1 << 40
"""Files need no messages of a size: windows cut what is read and written."""
_BATCH_BYTES = 1 << 30
"""Written between two notes of the journal, at least."""

OnBytes = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""


@dataclass(frozen=True)
class Converted:
    """What was written. `num_compared`: elements that the source holds more than once, all equal.

    `left_out` names what lies in the source's files and is no weight of the model, `mtp_left_out` weights of layers of
    multi-token prediction, for which the target's form has no place, `mtp_absent` those that config.json declares and
    the source does not have. `grouped` as in `Holding`.
    """

    form: Form
    num_tensors: int
    num_bytes: int
    num_compared: int
    left_out: tuple[str, ...]
    mtp_left_out: tuple[str, ...]
    mtp_absent: tuple[str, ...]
    grouped: int


@dataclass(frozen=True)
class Verified:
    """`difference` is None when both hold the same values; `num_fp8` elements of them are in fp8 on a side.

    `mtp_left_out` names weights of layers of multi-token prediction that are not compared: a side's form has no place
    for them.
    """

    forms: tuple[Form, Form]
    num_tensors: int
    num_elements: int
    num_fp8: int
    difference: Difference | None
    mtp_left_out: tuple[str, ...]


def convert(
    source: Path, target: Path, options: Options, on_bytes: OnBytes, *, overwrite: bool = False, resume: bool = False
) -> Converted:
    """Writes `source` as `target`, in the form that the options name.

    ConvertError is one line that says what is wrong and what to do; the target is then what it was before.
    """
    _check_paths(source, target)
    if options.memory_bytes < MIN_MEMORY_BYTES:
        raise ConvertError(f"--memory is {options.memory_bytes} bytes; at least {MIN_MEMORY_BYTES} are needed")
    if target.exists() and not overwrite:
        raise ConvertError(f"{target} exists; remove it, or give --overwrite")
    declared = find_model(source, options.config)
    holding = read_form(source, declared, options.from_layout, masters=options.from_masters)
    model, (holding,), mtp_left_out = as_held(declared, [holding], {holding.form, options.to})
    check_complete(holding, model)
    new = plan_target(target, model, target_dtypes(holding, model, options.to, options.dtype), options)
    order = {name: number for number, name in enumerate(model.tensors())}
    jobs = jobs_of(_plan(holding, new.holding, model), new.holding, order)
    landing = Landing(target, _identity(holding, new), overwrite=overwrite)
    try:
        with Reader(holding) as reader:
            compared = check_replicas(holding, reader)
            done = landing.open(new, resume=resume)
            with Writer(landing.files, reader, options.memory_bytes) as writer:
                _write(writer, landing, jobs, done, on_bytes)
        config = model.config_json(options.dtype or ("float32" if options.from_masters else None))
        files = model.side_files().items()
        beside = ((name, config if name == CONFIG else path.read_bytes()) for name, path in files)
        landing.publish((*beside, *new.last))
    except OSError as error:
        raise _refusal(error, target) from error
    finally:
        landing.close()
    num_bytes = sum(job.num_bytes for job in jobs)
    absent = tuple(sorted(declared.tensors().keys() - order.keys() - set(mtp_left_out)))
    left_out = holding.left_out, mtp_left_out, absent
    return Converted(new.holding.form, len(order), num_bytes, compared, *left_out, holding.grouped)


def verify(one: Path, other: Path, options: Options, on_bytes: OnBytes) -> Verified:
    """Compares two folders of any two forms by value: every tensor, every copy of it; see `fp8_difference` for fp8.

    ConvertError when one of them cannot be read, or lacks a weight. The layouts of the options are those of `one` and
    `other`, where their files do not say.
    """
    config = options.config or next((folder for folder in (one, other) if (folder / CONFIG).is_file()), None)
    model = find_model(one, config)
    read = read_form(one, model, options.from_layout), read_form(other, model, options.to_layout)
    forms = read[0].form, read[1].form
    model, holdings, mtp_left_out = as_held(model, read, forms)
    for holding in holdings:
        check_complete(holding, model, fp8=True)
    left, right = map(by_tensor, holdings)
    total = sum(shard.box.volume for name in model.tensors() for shard in right[name])
    compared = num_fp8 = 0
    difference: Difference | None = None
    with Reader(holdings[0]) as reader, Reader(holdings[1]) as other_reader:
        check_replicas(holdings[0], reader)
        if any(scale_name(name) in side for side in (left, right) for name in model.tensors()):
            check_replicas(holdings[1], other_reader)  # all else compares each copy with the other side
        for name, spec in model.tensors().items():
            mine, theirs = _held(reader, left, name), _held(other_reader, right, name)
            in_fp8 = mine.scales is not None or theirs.scales is not None
            difference = fp8_difference(name, spec.shape, mine, theirs) if in_fp8 else _difference(mine, theirs)
            volume = sum(shard.box.volume for shard in right[name])
            compared, num_fp8 = compared + volume, num_fp8 + volume * in_fp8
            on_bytes(compared, total)
            if difference is not None:
                break
    return Verified(forms, len(model.tensors()), compared, num_fp8, difference, mtp_left_out)


def _held(reader: Reader, shards: Mapping[str, Sequence[Shard]], name: str) -> Held:
    return Held(reader, shards[name], next(iter(shards.get(scale_name(name), ())), None))


def _difference(one: Held, other: Held) -> Difference | None:
    found = []
    for mine, theirs in product({shard.box: shard for shard in one.shards}.values(), other.shards):
        common = mine.box.intersect(theirs.box)
        if common is not None:
            found.append(first_difference(one.reader, mine, other.reader, theirs, common))
    differences = [difference for difference in found if difference is not None]
    return min(differences, key=lambda difference: difference.index, default=None)


def _check_paths(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise ConvertError(f"{source} is no folder; name the folder of the weights")
    one, other = source.resolve(), target.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise ConvertError(f"{target} and {source} lie in one another; choose another target")
    if target.exists() and not target.is_dir():
        raise ConvertError(f"{target} is a file; choose another target")


def plan_between(sources: Sequence[RankLayout], targets: Sequence[RankLayout], model: Model) -> Plan:
    """The same plan that a training has between its ranks and an engine's, here between any holders of weights.

    ValueError names what the sources lack, or what would be written twice.
    """
    return build_plan(
        _once(sources),
        [replace(layout, side="engine") for layout in targets],
        model.family,
        kind="convert",
        piece_bytes=_PIECE_BYTES,
        experts_per_unit=max(model.shape.num_experts, 1),
        finality="whole",
    )


def _plan(source: Holding, target: Holding, model: Model) -> Plan:
    try:
        return plan_between(source.layouts, target.layouts, model)
    except ValueError as error:
        raise ConvertError(f"{source.folder} cannot become {target.folder}: {error}") from error


def _once(layouts: Sequence[RankLayout]) -> list[RankLayout]:
    """The layouts of a source without what an earlier holder, or the same one, has already: copies are equal."""
    seen: set[tuple[str, Box]] = set()
    kept = []
    for layout in layouts:
        shards = {(shard.tensor, shard.box): shard for shard in reversed(tuple(layout.shards))}
        new = tuple(shard for place, shard in shards.items() if place not in seen)
        seen |= shards.keys()
        kept.append(replace(layout, side="trainer", shards=new))
    return kept


def _identity(source: Holding, target: Target) -> str:
    """Equal when the same files would be written from the same places of the same files: names, sizes and times of the
    source."""
    files = sorted({extent.file for extent in source.extents.values()})
    stats = [(name, stat.st_size, stat.st_mtime_ns) for name in files for stat in [(source.folder / name).stat()]]
    written = [(file.name, file.num_bytes, file.fixed) for file in target.files]
    places = [sorted(extents.items(), key=str) for extents in (source.extents, target.holding.extents)]
    said = (str(source.folder.resolve()), stats, written, places)
    return sha256(repr(said).encode()).hexdigest()


def _write(writer: Writer, landing: Landing, jobs: Sequence[Job], done: int, on_bytes: OnBytes) -> None:
    total = sum(job.num_bytes for job in jobs)
    written = sum(job.num_bytes for job in jobs[:done])

    def count(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes
        on_bytes(written, total)

    on_bytes(written, total)
    for start, end in _batches(jobs, done):
        writer.write(jobs[start:end], count)
        landing.done(end)


def _batches(jobs: Sequence[Job], done: int) -> Iterator[tuple[int, int]]:
    start, size = done, 0
    for number in range(done, len(jobs)):
        size += jobs[number].num_bytes
        if size >= _BATCH_BYTES or number + 1 == len(jobs):
            yield start, number + 1
            start, size = number + 1, 0


def _refusal(error: OSError, target: Path) -> ConvertError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConvertError(f"{target}: the disk is full; make room, and go on with --resume")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ConvertError(f"{target} cannot be written ({error.strerror}); choose another target")
    return ConvertError(f"{target}: {error}; what is written so far is kept for --resume")
