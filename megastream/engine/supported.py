"""Which versions of vLLM megastream is written for."""

from __future__ import annotations

SUPPORTED_MIN = (0, 26, 0)
SUPPORTED_BELOW = (0, 33)


def numbers_of(version: str) -> tuple[int, int, int]:
    """The release numbers of a version string, e.g. (0, 32, 0) for `0.32.0+cpu`."""
    numbers = version.split("+")[0].split(".")[:3]
    major, minor, patch = (int("".join(c for c in part if c.isdigit()) or 0) for part in (*numbers, "0", "0")[:3])
    return major, minor, patch


def unsupported(version: str) -> str:
    """Why this version of vLLM is not supported; empty when it is."""
    if SUPPORTED_MIN <= numbers_of(version) < SUPPORTED_BELOW:
        return ""
    least, below = (".".join(map(str, numbers)) for numbers in (SUPPORTED_MIN, SUPPORTED_BELOW))
    return (
        f"vLLM {version} is not supported: megastream needs {least} <= version < {below}; "
        "install a version in this range"
    )
