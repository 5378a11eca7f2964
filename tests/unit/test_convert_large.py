"""What only shows with large files: numbers beyond 32 bits, and memory that does not grow with the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from megastream.convert.safetensors_file import layout_file
from megastream.convert.torch_file import Slot, lay_out_archive, open_file, pickled, read_torch_file
from megastream.families import family_of, load_shape
from megastream.layout.shard import TensorSpec
from tests.helpers.tiny import hf_config, tiny_config

ROOT = Path(__file__).parents[2]


def test_archives_beyond_4_gib(tmp_path: Path) -> None:
    """A file with a hole where the data goes, so that it takes no disk."""
    specs = [TensorSpec("a", (3, 1 << 30), "bfloat16"), TensorSpec("b", (5,), "float32")]
    path = tmp_path / "x.pt"
    archive = lay_out_archive(pickled([Slot(0, specs[0]), Slot(1, specs[1])]), specs)
    with path.open("wb") as file:
        file.truncate(archive.num_bytes)
        for start, data in (*archive.fixed, (archive.starts[1], torch.arange(5.0).numpy().tobytes())):
            file.seek(start)
            file.write(data)
        file.seek(archive.starts[0] + 2 * (2 << 30) + 6)
        file.write(b"\x80\x3f")
    with zipfile.ZipFile(path) as zipped:
        assert [info.file_size for info in zipped.infolist() if "/data/" in info.filename] == [6 << 30, 20]
    first, second = torch.load(path, mmap=True, weights_only=True)
    assert first.shape == (3, 1 << 30) and first[2, 3] == 1 and not first[2, :3].any()
    assert second.equal(torch.arange(5.0))
    with open_file(path) as opened:
        stored = read_torch_file(opened, 0, archive.num_bytes, "x")
    assert [stored.start(ref, "x") for ref in stored.tree] == list(archive.starts)


MEASURE = """
import resource, sys
from pathlib import Path
from megastream.convert.forms import Options
from megastream.convert.run import convert

source, target, to, layout, dtype, mib = sys.argv[1:]
options = Options(to=to, to_layout=layout or None, dtype=dtype or None, memory_bytes=int(mib) << 20)
if to in ("mp_rank", "torch_dist"):  # whose own objects stand in their files
    import torch.distributed.checkpoint
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the imports


def peak_kib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])


before = peak_kib()
convert(Path(source), Path(target), options, lambda done, total: None)
print(peak_kib() - before)
"""


def write_holes(folder: Path) -> Path:
    """A model of 600 MB in one file that takes no disk."""
    config = hf_config(tiny_config(hidden=1024, heads=8, head_dim=128, experts=16, expert_ffn=1024, vocab=32768))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shape = load_shape(config)
    file, _ = layout_file("model.safetensors", family_of(shape).tensors(shape))
    assert file.num_bytes > 550_000_000
    with (folder / file.name).open("wb") as written:
        written.truncate(file.num_bytes)
        written.write(file.fixed[0][1])
    return folder


def grown_bytes(source: Path, target: Path, to: str, layout: str = "", dtype: str = "") -> int:
    """By how much the peak of what is resident grows in a conversion with 64 MiB."""
    command = [sys.executable, "-c", MEASURE, str(source), str(target), to, layout, dtype, "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout) * 1024


@pytest.mark.full
@pytest.mark.parametrize(
    ("to", "layout", "dtype"),
    [("hf", "", ""), ("hf", "", "fp8-block128"), ("sharded_state", "tp4", ""), ("sharded_state", "tp4 ep4", "")],
)
def test_memory_is_the_budgets(tmp_path: Path, to: str, layout: str, dtype: str) -> None:
    assert grown_bytes(write_holes(tmp_path / "a"), tmp_path / "b", to, layout, dtype) < 64 << 20


@pytest.mark.full
@pytest.mark.parametrize(("form", "layout"), [("mp_rank", "tp2 etp1 ep4 pp2 dp2"), ("torch_dist", "")])
def test_memory_is_the_budgets_with_torchs_files_both_ways(tmp_path: Path, form: str, layout: str) -> None:
    source, there, back = write_holes(tmp_path / "a"), tmp_path / "b", tmp_path / "c"
    try:
        assert grown_bytes(source, there, form, layout) < 64 << 20
        assert grown_bytes(there, back, "hf") < 64 << 20
    finally:
        for folder in (there, back):
            shutil.rmtree(folder, ignore_errors=True)  # 600 MB each
