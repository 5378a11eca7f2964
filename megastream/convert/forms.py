"""Which forms there are: told by the names of files, and each read and planned by its own module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megastream.convert.hf import INDEX, plan_hf, read_hf
from megastream.convert.model import Model
from megastream.convert.types import ConvertError, Form, Holding, Target


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to read and write. Layouts are strings as `megastream plan` takes them; None where the files say."""

    to: Form = "hf"
    config: Path | None = None
    from_layout: str | None = None
    to_layout: str | None = None
    max_file_bytes: int = 5 * 10**9
    memory_bytes: int = 2 << 30


def find_form(folder: Path) -> Form:
    """The form of a folder. ConvertError when it is none that is known."""
    if not folder.is_dir():
        raise ConvertError(f"{folder} is no folder; name the folder of the weights")
    if (folder / INDEX).is_file() or any(folder.glob("*.safetensors")):
        return "hf"
    raise ConvertError(f"{folder} holds no weights in a form that is known")


def read_form(folder: Path, model: Model, layout: str | None) -> Holding:
    """Where all weights of a folder lie."""
    find_form(folder)
    return read_hf(folder, model)


def plan_target(folder: Path, model: Model, dtypes: Mapping[str, str], options: Options) -> Target:
    """What is written for a model whose tensors have these dtypes."""
    return plan_hf(folder, model, dtypes, options.max_file_bytes)
