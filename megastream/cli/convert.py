"""`megastream convert` and `megastream verify`: checkpoints from one form to another, and whether two are equal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megastream.convert.types import DTYPES, FORMS, ConvertError, Dtype, Form

if TYPE_CHECKING:
    from megastream.convert.run import Converted, OnBytes

_GB = 10**9
_GIB = 1 << 30
_Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="The folder that is read; its form, and whether its experts are GroupedMLP's, is found out.",
    ),
]
_Config = Annotated[
    Path | None, typer.Option("--config", help="config.json of the model, or its folder, where SRC has none.")
]
_FromLayout = Annotated[
    str | None, typer.Option(help="Layout of the files that are read, where they do not say it.", show_default=False)
]


def convert_command(
    source: _Source,
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder that is written.")],
    to: Annotated[str, typer.Option(help=f"The form of DST: {', '.join(FORMS)}.")] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16: what is wider is rounded, but for what the model needs in fp32. "
            "fp8-block128: linears in fp8 with a scale per 128 x 128, for --to hf.",
            show_default=False,
        ),
    ] = None,
    config: _Config = None,
    from_masters: Annotated[
        bool, typer.Option(help="Take the fp32 masters in the optimizer state of a torch_dist checkpoint.")
    ] = False,
    from_layout: _FromLayout = None,
    to_layout: Annotated[
        str | None, typer.Option(help='Layout of mp_rank files ("tp2 pp2 ep4") or of sharded_state ("tp2 ep2 pp2").')
    ] = None,
    max_file_gb: Annotated[float, typer.Option(min=1e-6, help="Files of about this many GB at most.")] = 5.0,
    memory_gib: Annotated[float, typer.Option(min=0.0625, help="Memory for weights on their way.")] = 2.0,
    overwrite: Annotated[bool, typer.Option(help="Replace DST, once all is written.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with a conversion that was interrupted.")] = False,
) -> None:
    """Convert a checkpoint: weights only, complete or not at all, and DST appears when all of it is on the disk."""
    from megastream.convert.forms import Options
    from megastream.convert.run import convert

    with _one_line("convert"), _bar(f"{source.name} to {to}") as on_bytes:
        options = Options(
            to=_form(to),
            dtype=_dtype(dtype),
            config=config,
            from_masters=from_masters,
            from_layout=from_layout,
            to_layout=to_layout,
            max_file_bytes=int(max_file_gb * _GB),
            memory_bytes=int(memory_gib * _GIB),
        )
        begin_s = time.monotonic()
        done = convert(source, target, options, on_bytes, overwrite=overwrite, resume=resume)
        took_s = time.monotonic() - begin_s
    typer.echo(f"{target}: {done.num_tensors} tensors, {done.num_bytes} bytes as {done.form}, in {took_s:.1f} s")
    _tell_converted(done, source)


def verify_command(
    one: Annotated[Path, typer.Argument(metavar="A", help="A folder of weights, in any form.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another one, in any form.")],
    config: _Config = None,
    from_layout: _FromLayout = None,
    to_layout: Annotated[str | None, typer.Option(help="Likewise, of B.", show_default=False)] = None,
) -> None:
    """Compare two checkpoints by value, whatever their forms. Exit code 1 when they differ, 2 when one is unfit."""
    from megastream.convert.forms import Options
    from megastream.convert.run import verify

    with _one_line("verify"), _bar(f"{one.name} and {other.name}") as on_bytes:
        options = Options(config=config, from_layout=from_layout, to_layout=to_layout)
        done = verify(one, other, options, on_bytes)
    if done.difference is not None:
        typer.echo(f"{one} and {other} differ: {done.difference}", err=True)
        raise typer.Exit(1)
    forms = " and ".join(done.forms)
    typer.echo(f"equal: {done.num_tensors} tensors, {done.num_elements} elements of {other} compared ({forms})")
    if done.num_fp8:
        typer.echo(f"{done.num_fp8} of them are in fp8, and equal within half a step of it where only one side is")
    _tell_mtp(done.mtp_left_out, "not compared, as sharded_state has no layers of multi-token prediction")


def _tell_converted(done: Converted, source: Path) -> None:
    if done.grouped:
        stored = f"{done.grouped} tensors, each with all experts of a rank"
        typer.echo(f"{source} has its experts as Megatron's GroupedMLP stores them: {stored}")
    if done.num_compared:
        typer.echo(f"{done.num_compared} elements that {source} holds more than once are equal")
    if done.left_out:
        few = ", ".join(done.left_out[:3])
        typer.echo(f"left out, being no weights of this model: {len(done.left_out)} entries of {source} ({few}, ...)")
    _tell_mtp(done.mtp_left_out, "left out, as sharded_state has no layers of multi-token prediction")
    absent = f"layers of multi-token prediction that config.json declares, and {source} does not have"
    _tell_mtp(done.mtp_absent, absent)


def _tell_mtp(tensors: Sequence[str], what: str) -> None:
    """All of them, layer by layer: nothing is left out silently."""
    if tensors:
        layers = sorted({".".join(name.split(".")[:3]) for name in tensors})
        typer.echo(f"{what}: {len(tensors)} tensors, all of {', '.join(f'{layer}.*' for layer in layers)}")


@contextmanager
def _one_line(command: str) -> Iterator[None]:
    try:
        yield
    except (ConvertError, OSError) as error:
        typer.echo(f"megastream {command}: {error}", err=True)
        raise typer.Exit(2) from None


def _form(name: str) -> Form:
    for form in FORMS:
        if form == name:
            return form
    raise ConvertError(f"--to is {name!r}; forms are {', '.join(FORMS)}")


def _dtype(name: str | None) -> Dtype | None:
    for dtype in (None, *DTYPES):
        if dtype == name:
            return dtype
    raise ConvertError(f"--dtype is {name!r}; it is {', '.join(DTYPES)}, or left out: types stay what they are")


@contextmanager
def _bar(what: str) -> Iterator[OnBytes]:
    """A progress bar on a terminal; nothing elsewhere."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
