"""Training sequences by number: the same number is the same sequence, whatever the layout and however often resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megastream.rl.data import example, read_pairs

_BLOCK_BYTES, _BLOCKS = 1 << 20, 65


class Rows:
    """The tokens of a file, cut into sequences; every epoch in another order, which follows from the seed.

    ValueError names the file when it has no tokens for one sequence, or is of no known kind.
    """

    def __init__(self, file: Path, seq_length: int, vocab: int, seed: int) -> None:
        self._file, self._length, self._vocab, self._seed = file, seq_length, vocab, seed
        self._tokens = _tokens(file)
        self.count = (len(self._tokens) - 1) // seq_length
        if self.count < 1:
            raise ValueError(
                f"{file} holds {len(self._tokens)} tokens; data.seq_length = {seq_length} needs one more than that"
            )
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def facts(self) -> dict[str, Any]:
        """What makes two files the same for a training that resumes: size, and the bytes of blocks all over it.

        Of a file up to 65 MiB every byte; of a larger one 65 MiB, both ends among them.
        """
        digest = xxhash.xxh3_64()
        with self._file.open("rb") as file:
            size = file.seek(0, 2)
            for block in range(_BLOCKS):
                file.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
        return {"file_bytes": size, "file_digest": digest.hexdigest(), "seq_length": self._length}

    def check(self, part: int, parts: int) -> None:
        """Looks at every token of one of `parts` parts of the file. ValueError names one that no model row is for."""
        ends = len(self._tokens) * part // parts, len(self._tokens) * (part + 1) // parts
        self._refuse_foreign(self._tokens[slice(*ends)])

    def _refuse_foreign(self, tokens: np.ndarray) -> None:
        if tokens.size == 0:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab:
            raise ValueError(
                f"data.file {self._file} holds token {low if low < 0 else high}; the model's vocabulary has "
                f"{self._vocab}; tokenize the text for this model"
            )

    def take(self, first: int, count: int) -> np.ndarray:
        """Sequences first, first + 1, ...: int64 [count, seq_length + 1]. ValueError names an id too high."""
        starts = np.array([self._index(number) for number in range(first, first + count)]) * self._length
        rows = np.asarray(self._tokens[starts[:, None] + np.arange(self._length + 1)], dtype=np.int64)
        self._refuse_foreign(rows)
        return rows

    def step(self, first: int, batch: int, micro: int, replica: int, replicas: int) -> Iterator[np.ndarray]:
        """The micro-batches of one replica, of a step that begins at sequence `first` and has `batch` in all."""
        mine = batch // replicas
        for begin in range(first + replica * mine, first + (replica + 1) * mine, micro):
            yield self.take(begin, micro)

    def _index(self, number: int) -> int:
        epoch, within = divmod(number, self.count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self.count)
        return int(self._order[within])


def _tokens(file: Path) -> np.ndarray:
    if file.suffix == ".npy":
        try:
            tokens: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{file} cannot be read as one row of token ids: {error}") from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{file} holds {tokens.dtype} of shape {tokens.shape}; give one row of token ids")
        return tokens
    if file.suffix == ".jsonl":
        return np.array([token for pair in read_pairs(file) for token in example(pair)], dtype=np.int64)
    raise ValueError(f"{file} is neither .jsonl (question and answer pairs) nor .npy (one row of token ids)")
