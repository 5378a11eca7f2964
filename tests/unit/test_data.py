"""Data: the tokenizer files and our own encoding agree, batches repeat, held-out questions stay out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megastream.rl.data import (
    ANSWER,
    BOS,
    EOS,
    VOCAB,
    Batches,
    Pair,
    decode,
    encode,
    example,
    make_pairs,
    prompt,
    read_pairs,
    refuse_long_questions,
    write_pairs,
    write_tokenizer,
)

PAIRS = [Pair(f"{i} + {j} =", str(i + j)) for i in range(9) for j in range(9)]


def test_every_byte_has_a_token() -> None:
    text = "".join(map(chr, range(0x250))) + "\U0001f600"
    tokens = encode(text)
    assert decode([BOS, *tokens, EOS]) == text
    assert max(tokens) < VOCAB and VOCAB % 64 != 0


def test_tokenizer_files_agree_with_encode(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Calculate ( 56 + -33 ) - 84.\n\té"
    assert tokenizer.get_vocab_size() == VOCAB
    assert tokenizer.encode(text).ids == encode(text)
    assert tokenizer.decode(encode(text)) == text
    assert tokenizer.encode(f"<bos>{text}<answer>").ids == prompt(text)


def test_batches_repeat_and_ranks_differ() -> None:
    def step(index: int, rank: int) -> np.ndarray:
        batches = Batches(PAIRS, seq_length=16, seed=3)
        micro = list(batches.step(index, dp_rank=rank, dp_size=2, num_micro_batches=2, micro_batch=3))
        assert [rows.shape for rows in micro] == [(3, 17), (3, 17)]
        assert (micro[0][:-1, -1] == micro[0][1:, 0]).all(), "sequences follow one another in the row of tokens"
        return np.concatenate(micro)

    assert (step(0, 0) == step(0, 0)).all()
    assert (step(0, 0) != step(0, 1)).any()
    assert (step(0, 0) != step(1, 0)).any()


def test_task_is_named_and_seeded(tmp_path: Path) -> None:
    pairs = make_pairs("chain_sum", 40, seed=5)
    assert pairs == make_pairs("chain_sum", 40, seed=5)
    assert len({pair.question for pair in pairs}) == 40
    assert example(pairs[0])[-1] == EOS and ANSWER in example(pairs[0])
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    assert read_pairs(tmp_path / "pairs.jsonl") == pairs
    try:
        make_pairs("chain_summ", 4, seed=5)
    except ValueError as error:
        assert "chain_summ" in str(error)
    else:
        raise AssertionError("an unknown task was accepted")


def test_questions_without_room_for_an_answer_are_refused() -> None:
    longest = len(prompt(PAIRS[-1].question))
    refuse_long_questions(PAIRS, 10, longest + 10)
    with pytest.raises(ValueError, match=rf"max_model_len is {longest + 9}; .* at least {longest + 10}"):
        refuse_long_questions(PAIRS, 10, longest + 9)


@pytest.mark.parametrize(
    "line", [b'{"question": "1 + 1 ="}', b"[1]", b'{"question": 1, "answer": "2"}', b"", b"{", b'{"question": "\xff"}']
)
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, line: bytes) -> None:
    good = b'{"question": "1 + 1 =", "answer": "2", "id": 7}\n'
    (path := tmp_path / "pairs.jsonl").write_bytes(good + line + b"\n")
    with pytest.raises(ValueError, match=r"pairs\.jsonl, line 2 holds no question and answer as text"):
        read_pairs(path)
    path.write_bytes(good)
    assert read_pairs(path) == [Pair("1 + 1 =", "2")]
