"""How fast `megastream convert` is, against `cp --reflink=never` and `sync` of the same bytes.

python tools/bench_convert.py [--gb 4] [--rounds 5] [--only NAME] [--folder FOLDER]

Makes a random Qwen3-MoE of that size, and in every round copies and converts it, by turns: with its files in the page
cache (warm) and without (cold, by posix_fadvise). Both end when the data is on the disk, and both are whole commands:
convert's start, about a second of Python, counts. Prints medians, their ratio to the copy, and the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megastream.convert.safetensors_file import layout_file
from megastream.families import family_of, load_shape
from megastream.layout.shard import TensorSpec

HIDDEN, EXPERT_FFN, LAYERS, VOCAB = 2048, 768, 4, 32_000
EXPERT_BYTES = 2 * LAYERS * 3 * HIDDEN * EXPERT_FFN
OTHER_BYTES = 2 * (2 * VOCAB * HIDDEN + LAYERS * 2 * (32 + 4) * 128 * HIDDEN)
CONVERSIONS = {
    "hf in files of 1 GB": ("--to", "hf", "--max-file-gb", "1"),
    "sharded_state tp2 ep2": ("--to", "sharded_state", "--to-layout", "tp2 ep2"),
    "mp_rank tp2 etp1 ep2 pp2": ("--to", "mp_rank", "--to-layout", "tp2 etp1 ep2 pp2"),
    "torch_dist": ("--to", "torch_dist"),
}


def make_model(folder: Path, gb: float) -> int:
    """A folder of one file with random bytes; returns the bytes of its weights."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": max(round((gb * 1e9 - OTHER_BYTES) / EXPERT_BYTES / 2), 4) * 2,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": EXPERT_FFN,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shape = load_shape(config)
    specs = [TensorSpec(spec.name, spec.shape, "bfloat16") for spec in family_of(shape).tensors(shape)]
    file, _ = layout_file("model.safetensors", specs)
    noise = np.random.default_rng(0).integers(0, 0x3F80, 1 << 25, dtype=np.uint16).tobytes()  # finite numbers
    with (folder / file.name).open("wb") as written:
        written.write(file.fixed[0][1])
        while (left := file.num_bytes - written.tell()) > 0:
            written.write(noise[: min(left, len(noise))])
        os.fsync(written.fileno())
    return file.num_bytes


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    subprocess.run(["sync", *(str(path) for path in target.iterdir())], check=True)


def converting(options: tuple[str, ...]) -> Callable[[Path, Path], None]:
    def run(source: Path, target: Path) -> None:
        command = [sys.executable, "-m", "megastream.cli.main", "convert", str(source), str(target), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    return run


def warm(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def cool(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(way: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    begin_s = time.monotonic()
    way(source, target)
    took_s = time.monotonic() - begin_s
    shutil.rmtree(target)
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: the temporary one")
    parser.add_argument("--only", default="", help="conversions whose name begins so")
    given = parser.parse_args()
    chosen = {name: options for name, options in CONVERSIONS.items() if name.startswith(given.only)}
    ways = {"cp and sync": copy, **{name: converting(options) for name, options in chosen.items()}}
    with tempfile.TemporaryDirectory(prefix="megastream-bench-", dir=given.folder) as folder:
        source = Path(folder) / "source"
        num_bytes = make_model(source, given.gb)
        print(f"{num_bytes} bytes, {given.rounds} rounds, {os.cpu_count()} cores")
        for state, prepare in (("cold", cool), ("warm", warm)):
            times: dict[str, list[float]] = {name: [] for name in ways}
            loads = []
            for _ in range(given.rounds):
                for name, way in ways.items():
                    prepare(source)
                    loads.append(os.getloadavg()[0])
                    times[name].append(measure(way, source, Path(folder) / "target"))
            print(f"{state}: load of the machine {min(loads):.1f} to {max(loads):.1f}")
            base = statistics.median(times["cp and sync"])
            for name, taken in times.items():
                middle = statistics.median(taken)
                spread = f"{min(taken):.2f} to {max(taken):.2f}"
                speed = f"{num_bytes / middle / 1e6:.0f} MB/s"
                print(f"  {name:26} {middle:6.2f} s ({spread}), {speed}, {100 * base / middle:.0f} % of the copy's")


if __name__ == "__main__":
    main()
