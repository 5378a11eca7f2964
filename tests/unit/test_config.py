"""The configuration file: the shipped one is valid, and bad input is refused in one line that names it."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import pytest
import yaml

from megastream.rl.bounds import BOUNDS, ranks_refusal
from megastream.rl.checkpoint import tensor_shapes
from megastream.rl.config import Config, load, parse
from megastream.rl.sections import ConfigError, Section

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def edited(**changes: object) -> dict:
    """The shipped configuration as plain data, with `section__key=value` changes."""
    raw = yaml.safe_load(QUICKSTART.read_text())
    for path, value in changes.items():
        *sections, key = path.split("__")
        target = raw
        for section in sections:
            target = target[section]
        target[key] = value
    return raw


def test_quickstart_fulfils_the_promised_size() -> None:
    config = load(QUICKSTART)
    model = config.model
    assert isinstance(config, Config)
    assert model.layers >= 8 and model.experts >= 32
    assert (config.trainer.pp, config.trainer.ep, config.trainer.ranks) == (2, 2, 4)
    assert config.run.updates >= 30 and config.run.checked_tokens >= 5000
    shapes = dict(tensor_shapes(model))
    assert len(shapes) >= 1500 and sum(prod(shape) for shape in shapes.values()) >= 20e6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer__learning_rat": 1}, ("unknown key trainer.learning_rat", "trainer.learning_rate")),
        ({"trainer__top_k": 1}, ("unknown key trainer.top_k", "model.top_k")),
        ({"enginee": {}}, ("unknown key enginee", "engine")),
        ({"model__experts": 63}, ("model.experts is 63", "trainer.ep = 2")),
        ({"model__layers": 7}, ("model.layers is 7", "trainer.pp = 2")),
        ({"trainer__ranks": 3}, ("trainer.ranks is 3", "= 2")),
        ({"model__hidden": 0}, ("model.hidden is 0",)),
        ({"model__hidden": "wide"}, ("model.hidden", "int")),
        ({"engine__layout": "pp3"}, ("engine.layout", "pp3")),
        ({"seed": 2**31}, ("seed is 2147483648", "2147483647")),
        ({"engine__nice": 20}, ("engine.nice is 20", "from 0 to 19")),
        ({"model__layers": 10**30}, ("model.layers is 1000", "to 1000")),
        ({"data__train": 10**30}, ("data.train is", "to 10000000")),
        ({"trainer__ranks": 4000}, ("trainer.ranks is 4000", "1024")),
        ({"stream__finality": "eager"}, ("stream.finality is 'eager'", "it is one of whole, pipelined")),
        ({"run__modes": ["stream", "both"]}, ("run.modes[1] is 'both'", "it is one of stock, stream, whole")),
        ({"trainer__learning_rate": float("nan")}, ("trainer.learning_rate is nan", "finite")),
        ({"trainer__clip_grad": float("inf")}, ("trainer.clip_grad is inf", "finite")),
        ({"stream__piece_mib": 1e-300}, ("stream.piece_mib is 1e-300", "0.000976562 to 1024")),
        ({"stream__max_abort_rate": 1.5}, ("stream.max_abort_rate is 1.5", "from 0 to 1")),
        ({"deadlines__step_s": float("inf")}, ("deadlines.step_s is inf", "finite")),
        ({"deadlines__start_s": 1e-300}, ("deadlines.start_s is 1e-300", "0.1 to 604800")),
        ({"engine__answer_tokens": 512}, ("engine.answer_tokens is 512", "max_model_len 512")),
        ({"model__experts": 4096, "model__hidden": 2**17}, ("parameters", "at most 100000000000")),
        ({"model__expert_ffn": 63, "trainer__tp": 2}, ("model.expert_ffn is 63", "trainer.tp = 2")),
        ({"run__modes": []}, ("run.modes",)),
        ({"run__modes": ["stream", "stream"]}, ("run.modes", "stream, stream")),
    ],
)
def test_bad_values_are_named(changes: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(edited(**changes))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_missing_key_is_named() -> None:
    raw = edited()
    del raw["trainer"]["ranks"]
    with pytest.raises(ConfigError, match="ranks"):
        parse(raw)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: [unclosed")
    for path in (bad, tmp_path / "absent.yaml"):
        with pytest.raises(ConfigError, match=path.name):
            load(path)


def test_every_number_of_the_file_has_bounds() -> None:
    def numbers(section: Section, prefix: str = "") -> list[str]:
        found = []
        for name in section.__struct_fields__:
            value = getattr(section, name)
            if isinstance(value, Section):
                found += numbers(value, f"{prefix}{name}.")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found.append(prefix + name)
        return found

    layout_divides = {"trainer.tp", "trainer.pp", "trainer.ep"}  # into trainer.ranks
    assert set(numbers(load(QUICKSTART))) - layout_divides == set(BOUNDS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"seed: 1\nmodel: {}\nseed: 2\n", "key seed is given twice, in lines 1 and 3"),
        (b"model:\n  layers: 1\n  layers: 2\n", "key layers is given twice"),
        (b"a: " + b"[" * 5000, "nested too deeply"),
        (b"seed: \xe9\n", "utf-8"),
        (b"seed: " + b"9" * 5000, "4300 digits"),
        (b"seed: 2020-13-45\n", "month"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_with_its_name(tmp_path: Path, content: bytes, words: str) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load(bad)
    assert str(bad) in str(caught.value) and "\n" not in str(caught.value)


def test_more_ranks_than_the_machine_carries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert ranks_refusal(32) is None
    assert "trainer.ranks is 33" in str(ranks_refusal(33))
