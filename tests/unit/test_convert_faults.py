"""What is wrong with files ends a conversion in one line, before or after it began, and what was there stays."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megastream.convert.forms import Options
from megastream.convert.run import convert
from megastream.convert.types import ConvertError
from tests.helpers.convert_models import converted, difference, tensors_of, write_hf

INDEX = "model.safetensors.index.json"
NAME = "model.layers.1.self_attn.q_proj.weight"


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = tensors_of(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10)


def header(edit: Callable[[dict[str, dict[str, list[int]]]], object]) -> Callable[[Path], None]:
    """Rewrites the header of the one file; offsets keep their meaning."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + length])
        edit(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return rewrite


def shift(entries: dict[str, dict[str, list[int]]]) -> None:
    entries[NAME]["data_offsets"] = [at - 2 for at in entries[NAME]["data_offsets"]]


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (cut_off, r"model.safetensors has \d+ bytes and its header describes \d+; it is cut off"),
    "no header": (lambda f: (f / "model.safetensors").write_bytes(b"GGUF" + bytes(200)), "is no safetensors file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "is no safetensors file"),
    "no json": (
        lambda f: (f / "model.safetensors").write_bytes((9).to_bytes(8, "little") + b"{nonsense"),
        "header that is no JSON",
    ),
    "overlapping": (header(shift), f"{NAME} overlaps .*; fetch it again"),
    "a hole": (header(lambda entries: entries.pop(NAME)), r"lies \d+ bytes behind"),
    "wrong size": (header(lambda entries: entries[NAME]["shape"].append(2)), f"{NAME} is BF16 of shape"),
    "missing": (lambda f: change(f, lambda tensors: tensors.pop(NAME)), rf"\(hf\) lacks {NAME}; fetch the rest"),
    "not the model's": (
        lambda f: change(f, lambda tensors: tensors.update({"model.layers.9.x": torch.zeros(2)})),
        "model.layers.9.x is no tensor of this qwen3_moe",
    ),
    "another shape": (
        lambda f: change(f, lambda tensors: tensors.update({NAME: torch.zeros(2, 3)})),
        rf"{NAME} has shape \(2, 3\), config.json says",
    ),
    "a type that does not travel": (
        lambda f: change(f, lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.int64)})),
        f"{NAME} in .*model.safetensors is I64; types that can be converted are float32",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "name the model's config.json with --config"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_source_that_is_unfit_is_refused(tmp_path: Path, fault: str) -> None:
    source, target = write_hf(tmp_path / "a", layers=2, experts=4), tmp_path / "b"
    converted(source, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    damage, words = FAULTS[fault]
    damage(source)
    with pytest.raises(ConvertError, match=words) as caught:
        convert(source, target, Options(), lambda done, total: None, overwrite=True)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "nothing is left behind"


def test_an_index_that_belongs_to_other_files_is_refused(tmp_path: Path) -> None:
    many = converted(write_hf(tmp_path / "a", layers=2, experts=4), tmp_path / "b", max_file_bytes=30_000)
    index = json.loads((many / INDEX).read_text())
    file = index["weight_map"][NAME]
    text = (many / INDEX).read_text()
    (many / INDEX).write_text(json.dumps({"weight_map": {k: v for k, v in index["weight_map"].items() if k != NAME}}))
    with pytest.raises(ConvertError, match=f"{NAME} is in .*{file}, not in {INDEX}"):
        converted(many, tmp_path / "c")
    (many / INDEX).write_text(text)
    (many / file).rename(many / "elsewhere")
    with pytest.raises(ConvertError, match=f"{INDEX} names {file}, which is not there"):
        converted(many, tmp_path / "c")
    (many / "elsewhere").rename(many / file)
    (many / INDEX).unlink()
    save_file({NAME: torch.zeros(2)}, many / "also.safetensors")
    with pytest.raises(ConvertError, match=f"{NAME} is in also.safetensors and in {file}"):
        converted(many, tmp_path / "c")


@pytest.mark.parametrize("inside", [True, False])
def test_folders_that_lie_in_one_another_are_refused(tmp_path: Path, inside: bool) -> None:
    source = write_hf(tmp_path / "a", layers=2, experts=4)
    with pytest.raises(ConvertError, match="lie in one another"):
        converted(source, source / "b" if inside else source)


def test_a_full_disk_loses_nothing_and_the_rest_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = write_hf(tmp_path / "a"), tmp_path / "b"
    monkeypatch.setattr("megastream.convert.run._BATCH_BYTES", 20_000)
    written, real = [0], os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        written[0] += len(data)
        if written[0] > 150_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConvertError, match="the disk is full; make room, and go on with --resume"):
        converted(source, target)
    assert not target.exists()
    monkeypatch.setattr(os, "pwrite", real)
    told: list[tuple[int, int]] = []
    convert(source, target, Options(), lambda *step: told.append(step), resume=True)
    assert told[0][0] > 50_000, "what was on the disk is not written again"
    assert difference(source, target) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_disk_that_is_too_small_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_hf(tmp_path / "a", layers=2, experts=4)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConvertError, match="needs .* bytes, and 1000 are free"):
        converted(source, tmp_path / "b")


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_hf(tmp_path / "a", layers=2, experts=4)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConvertError, match="cannot be written .Read-only file system.; choose another target"):
        converted(source, tmp_path / "b")


def test_resume_refuses_what_was_another_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_hf(tmp_path / "a", layers=2, experts=4)
    with pytest.raises(ConvertError, match="nothing of .*b to resume; leave --resume out"):
        convert(source, tmp_path / "b", Options(), lambda done, total: None, resume=True)
    monkeypatch.setattr("megastream.convert.landing.Landing.publish", lambda self, last: None)
    converted(source, tmp_path / "b")  # all written, and not yet named
    monkeypatch.undo()
    os.utime(source / "model.safetensors")
    with pytest.raises(ConvertError, match="of another source, target or option; leave --resume out"):
        convert(source, tmp_path / "b", Options(), lambda done, total: None, resume=True)
    assert difference(source, converted(source, tmp_path / "b")) is None


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    source, target = write_hf(tmp_path / "a", layers=2, experts=4), tmp_path / "b"

    def meanwhile(done: int, total: int) -> None:
        if done == 0:
            with pytest.raises(ConvertError, match="another process is writing"):
                converted(source, target)

    convert(source, target, Options(), meanwhile)
    assert difference(source, target) is None
