"""The configuration file: the shipped one is valid, and bad input is refused in one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megastream.rl.config import Config, ConfigError, load, parse

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
