"""The guard of a run: a small process that outlives its launcher by a moment, and then leaves nothing behind.

    python -m megastream.rl.guard RUN_FOLDER

Its standard input is a pipe whose other end only the launcher holds. When the launcher is gone, however it went, the
pipe closes; the guard then ends every process of the run and removes what it owned.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megastream.rl.owned import Owner, clean


def main(run_folder: Path) -> None:
    """Blocks until the launcher ends. A launcher that ended in order has removed the owner file before."""
    sys.stdin.buffer.read()
    try:
        owner = Owner.read(run_folder)
    except ValueError as error:
        sys.exit(f"megastream guard: {error}")
    if owner is not None:
        clean(run_folder, owner)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
