"""Question and answer pairs of a reasoning-gym task, a byte-level tokenizer, and next-token batches of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

SPECIALS = ("<pad>", "<bos>", "<eos>", "<answer>")
PAD, BOS, EOS, ANSWER = range(len(SPECIALS))
VOCAB = len(SPECIALS) + 256
"""260: no multiple of 64 on purpose, so that the engine pads the embedding and the plan has to know."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One question and its answer, as text."""

    question: str
    answer: str


def make_pairs(task: str, count: int, seed: int) -> list[Pair]:
    """`count` pairs with different questions, the same ones for the same seed. ValueError names an unknown task."""
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(task, size=4 * count, seed=seed)
    except ValueError as error:
        raise ValueError(f"data.task {task!r} is no task of reasoning-gym: {error}") from error
    unique = {item["question"]: str(item["answer"]) for item in dataset}
    if len(unique) < count:
        raise ValueError(f"data.task {task!r} gives {len(unique)} different questions, {count} are asked for")
    return [Pair(question, answer) for question, answer in list(unique.items())[:count]]


def encode(text: str) -> list[int]:
    """Token ids of a text: one per UTF-8 byte."""
    return [len(SPECIALS) + byte for byte in text.encode()]


def decode(tokens: Iterable[int]) -> str:
    """The text of the byte tokens; special tokens are left out, broken UTF-8 is replaced."""
    return bytes(t - len(SPECIALS) for t in tokens if t >= len(SPECIALS)).decode(errors="replace")


def prompt(question: str) -> list[int]:
    """What the engine is asked: everything up to where the answer begins."""
    return [BOS, *encode(question), ANSWER]


def refuse_long_questions(pairs: Iterable[Pair], answer_tokens: int, max_model_len: int) -> None:
    """ValueError when the engine has no room for an answer of `answer_tokens` behind the longest of the questions."""
    longest = max(len(prompt(pair.question)) for pair in pairs)
    if longest + answer_tokens > max_model_len:
        raise ValueError(
            f"engine.max_model_len is {max_model_len}; the longest question has {longest} tokens and engine."
            f"answer_tokens is {answer_tokens}, so at least {longest + answer_tokens} are needed"
        )


def example(pair: Pair) -> list[int]:
    """What is trained on: the prompt, the answer, the end."""
    return [*prompt(pair.question), *encode(pair.answer), EOS]


class Batches:
    """Next-token batches: all pairs in one endless row of tokens, cut into sequences. Same seed, same batches."""

    def __init__(self, pairs: list[Pair], seq_length: int, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(pairs))
        row = [token for index in order for token in example(pairs[index])]
        num = (len(row) - 1) // seq_length
        if num == 0:
            raise ValueError(f"data.train gives {len(row)} tokens, data.seq_length = {seq_length} needs one more")
        starts = seq_length * np.arange(num)[:, None] + np.arange(seq_length + 1)
        self._rows = np.asarray(row, dtype=np.int64)[starts]

    def step(
        self, step: int, *, dp_rank: int, dp_size: int, num_micro_batches: int, micro_batch: int
    ) -> Iterator[np.ndarray]:
        """The micro-batches of one data parallel rank's step: int64 [micro_batch, seq_length + 1].

        Columns but the last are the inputs, columns but the first the targets.
        """
        per_rank = num_micro_batches * micro_batch
        first = (step * dp_size + dp_rank) * per_rank
        for begin in range(first, first + per_rank, micro_batch):
            yield self._rows[np.arange(begin, begin + micro_batch) % len(self._rows)]


def write_pairs(path: Path, pairs: list[Pair]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in pairs))


def read_pairs(path: Path) -> list[Pair]:
    """Inverse of `write_pairs`; other keys are passed over. ValueError names the file, the line and what is wrong."""
    pairs = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            pairs.append(msgspec.json.decode(line, type=Pair))
        except (UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise ValueError(f"{path}, line {number} holds no question and answer as text ({error})") from error
    return pairs


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of the byte-level tokenizer, as the engine loads them."""
    vocab = {name: index for index, name in enumerate(SPECIALS)}
    vocab |= {char: len(SPECIALS) + byte for byte, char in enumerate(_byte_chars())}
    added = [
        {"id": i, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, name in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIALS[PAD],
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "model_max_length": 4096,
        "chat_template": "<bos>{% for m in messages %}{{ m['content'] }}{% endfor %}<answer>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _byte_chars() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]
