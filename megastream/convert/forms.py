"""Which forms there are: told by the names of files, and each read and planned by its own module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megastream.convert import torch_dist
from megastream.convert.hf import INDEX, plan_hf, read_hf
from megastream.convert.model import Model
from megastream.convert.mp_rank import plan_mp_rank, read_mp_rank
from megastream.convert.sharded_state import FILE, plan_sharded_state, read_sharded_state
from megastream.convert.torch_dist import read_torch_dist
from megastream.convert.torch_dist_write import plan_torch_dist
from megastream.convert.types import ConvertError, Dtype, Form, Holding, Target

_TRACKER = "latest_checkpointed_iteration.txt"
"""In the root of Megatron's checkpoints: the number of the newest one."""
_CURRENT = "CURRENT"
"""In the root of a `megastream train`: the name of the newest one."""
_NO_FP8: dict[Form, str] = {
    "torch_dist": "is what a trainer goes on from, in the types that it trains in",
    "mp_rank": "is what a trainer goes on from, in the types that it trains in",
    "sharded_state": "holds fp8 as the kernels of one engine lay it out",
}
"""Why a form has no weights in fp8."""
_TRAINERS: tuple[Form, ...] = ("torch_dist", "mp_rank")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to read and write. Layouts are strings as `megastream plan` takes them; None where the files say.

    `dtype`: what weights are rounded to; None: types stay what they are. `from_masters`: weights are an optimizer's.
    """

    to: Form = "hf"
    dtype: Dtype | None = None
    config: Path | None = None
    from_masters: bool = False
    from_layout: str | None = None
    to_layout: str | None = None
    max_file_bytes: int = 5 * 10**9
    memory_bytes: int = 2 << 30

    @property
    def fp8(self) -> bool:
        return self.dtype == "fp8-block128"


def find_form(folder: Path) -> tuple[Form, Path]:
    """The form of a folder, and the folder of the files: in the root of a training's checkpoints, the newest one.

    ConvertError when it is none that is known.
    """
    if not folder.is_dir():
        raise ConvertError(f"{folder} is no folder; name the folder of the weights")
    if (folder / _TRACKER).is_file():
        step = (folder / _TRACKER).read_text().strip()
        folder = folder / (f"iter_{int(step):07}" if step.isdigit() else step)
    elif (folder / _CURRENT).is_file():
        folder = folder / (folder / _CURRENT).read_text().strip()
    if (folder / torch_dist.INDEX).is_file():
        return "torch_dist", folder
    if any(folder.glob("mp_rank_*")):
        return "mp_rank", folder
    names = [path.name for path in folder.glob("*.safetensors")]
    if any(FILE.fullmatch(name) for name in names) and not (folder / INDEX).is_file():
        return "sharded_state", folder
    if names or (folder / INDEX).is_file():
        return "hf", folder
    raise ConvertError(
        f"{folder} holds no weights in a form that is known: *.safetensors, {torch_dist.INDEX} of torch_dist, mp_rank_*"
    )


def read_form(folder: Path, model: Model, layout: str | None, *, masters: bool = False) -> Holding:
    """Where all weights of a folder lie, or their fp32 masters. `layout` is for forms of ranks, where the files do not
    say it."""
    form, folder = find_form(folder)
    _check_trainer(model, form)
    if masters and form != "torch_dist":
        raise ConvertError(
            f"{folder} is {form}; --from-masters is for torch_dist, whose keys say whose masters they are"
        )
    if form == "mp_rank":
        return read_mp_rank(folder, model, layout)
    if form == "sharded_state":
        return read_sharded_state(folder, model, layout)
    if layout is not None:
        raise ConvertError(f"{folder} is {form}, which has no layout; leave {layout!r} out")
    return read_torch_dist(folder, model, masters=masters) if form == "torch_dist" else read_hf(folder, model)


def plan_target(folder: Path, model: Model, dtypes: Mapping[str, str], options: Options) -> Target:
    """What is written for a model whose tensors have these dtypes."""
    most, layout = options.max_file_bytes, options.to_layout
    if options.fp8:
        _check_fp8(model, options.to)
    _check_trainer(model, options.to)
    if options.to in ("mp_rank", "sharded_state"):
        if layout is None:
            raise ConvertError(f'{options.to} has a file for each rank; say which with --to-layout, e.g. "tp2 ep2"')
        if options.to == "mp_rank":
            return plan_mp_rank(folder, model, dtypes, layout)
        return plan_sharded_state(folder, model, dtypes, layout, most)
    if layout is not None:
        raise ConvertError(f"{options.to} has no layout; leave --to-layout out")
    if options.to == "torch_dist":
        return plan_torch_dist(folder, model, dtypes, most)
    return plan_hf(folder, model, dtypes, most, fp8=options.fp8)


def _check_trainer(model: Model, form: Form) -> None:
    if form in _TRAINERS and (why := model.family.trainer_differs):
        raise ConvertError(f"{model.family.name} has no {form} form here: {why}; use hf or sharded_state")


def _check_fp8(model: Model, form: Form) -> None:
    if form in _NO_FP8:
        raise ConvertError(f"--dtype fp8-block128 is for --to hf; {form} {_NO_FP8[form]}")
    stacked = [row for row in model.family.rows if row.kind == "expert" and not all(s.linear for s in row.sources)]
    if stacked:
        raise ConvertError(
            f"--dtype fp8-block128 is for experts with a tensor each; {model.family.name} stacks them in "
            f"{stacked[0].sources[0].name.format(layer=0)}, for which these files have no scales; leave --dtype out"
        )
