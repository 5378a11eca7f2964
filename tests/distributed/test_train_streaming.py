"""`megastream train` with an engine: what is live after a resume, and under which number.

The engine is the fake one, over a real control plane and real lanes; the trainer is real.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megastream.control.embedded import EmbeddedServer
from megastream.control.redis_log import RedisLog
from megastream.engine.agent import RankAgent
from megastream.engine.contract import CommitRequest
from megastream.engine.coordinator import Coordinator
from megastream.engine.settings import EngineSettings
from megastream.families import family_of, load_shape
from megastream.layout.mesh import parse_engine_mesh
from megastream.layout.shard import RankLayout
from megastream.layout.synthetic import engine_layouts
from megastream.protocol.records import Accepted, Attached, Committed, RankCommit, Record
from megastream.transport.gloo import GlooReceiver
from tests.helpers.fake_engine import FakeCore, FakeLive
from tests.helpers.synthetic import empty_buffers, region
from tests.helpers.tiny import tiny_config, tiny_glm4
from tests.helpers.train_job import begin, job, lines, run, write_files

SETTINGS = EngineSettings(bind_s=40, transfer_s=20, liveness_s=40, commit_s=20, detach_s=20, poll_s=0.05)


class Live(FakeLive):
    """Serves a Hugging Face checkpoint; remembers a digest of its bytes after each commit."""

    def __init__(self, layout: RankLayout, weights: dict[str, torch.Tensor]) -> None:
        self.layout, self.buffers, self.break_commits = layout, empty_buffers(layout), 0
        self.history: list[str] = []
        self.by_version: dict[int, str] = {}
        for shard in layout.shards:
            box = tuple(slice(low, high) for low, high in zip(shard.box.lo, shard.box.hi, strict=True))
            region(self.buffers[shard.buffer], shard).copy_(weights[shard.tensor][box])

    def describe_whole(self) -> RankLayout:
        return self.layout

    def commit(self, prepared: dict[str, torch.Tensor]) -> None:
        super().commit(prepared)
        total = hashlib.sha256()
        for _, tensor in sorted(self.buffers.items()):
            total.update(tensor.view(torch.uint8).numpy().data)
        self.history.append(total.hexdigest())


@contextmanager
def engine(url: str, name: str, weights: Path) -> Iterator[list[Live]]:
    """Two pipeline stages that serve `weights`, up and waiting for a trainer."""
    shape = load_shape(weights)
    tensors = load_file(weights / "model.safetensors")
    lives = [Live(layout, tensors) for layout in engine_layouts(family_of(shape), shape, parse_engine_mesh("pp2"))]
    with ExitStack() as open_things:

        def log() -> RedisLog:
            found = RedisLog(url, "test", reconnect_s=30)
            open_things.callback(found.close)
            return found

        agents = []
        for rank, live in enumerate(lives):
            receiver = GlooReceiver("127.0.0.1")
            open_things.callback(receiver.close)
            agents.append(
                RankAgent(log(), engine=name, rank=rank, world_size=2, live=live, receiver=receiver, settings=SETTINGS)
            )
            open_things.callback(agents[-1].close)
        core = FakeCore(agents)
        open_things.callback(core.close)
        coordinator = Coordinator(log(), engine=name, world_size=2, core=core, settings=SETTINGS)
        open_things.callback(coordinator.close)
        for agent, live in zip(agents, lives, strict=True):
            _note_versions(agent, live)
            agent.start()
        coordinator.start()
        yield lives


def _note_versions(agent: RankAgent, live: Live) -> None:
    commit = agent.commit

    def noting(request: CommitRequest) -> RankCommit:
        reply = commit(request)
        live.by_version[request.version] = live.history[-1]
        return reply

    agent.commit = noting  # type: ignore[method-assign]


def records(url: str) -> list[Record]:
    log, found, after = RedisLog(url, "test", reconnect_s=30), [], "0"
    while entries := log.read(after, 0.1):
        found += [record for _, record in entries]
        after = entries[-1][0]
    log.close()
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("lost", "tiny"),
    [
        ("nothing", tiny_config),
        ("nothing", tiny_glm4),
        ("control plane", tiny_config),
        ("control plane and versions.json", tiny_config),
    ],
    ids=["same", "same, routers' biases", "control plane lost too", "and versions.json"],
)
def test_a_fresh_engine_has_the_resumed_weights_before_the_first_step(tmp_path: Path, lost: str, tiny: Any) -> None:
    """And its number is above all that was published: a checkpoint knows it, too."""
    write_files(tmp_path, tiny)
    weights = tmp_path / "weights"
    with ExitStack() as servers:
        first = servers.enter_context(EmbeddedServer(tmp_path / "s1"))
        with engine(first.url, "one", weights) as before:
            assert run(job(tmp_path, run__steps=4, stream__control_url=first.url)) == [""] * 4
        published = [r.version for r in records(first.url) if isinstance(r, Committed | Attached)]
        assert published[0] == 0 and max(published) == 4, "a fresh run begins with the checkpoint that is served"
        second = servers.enter_context(EmbeddedServer(tmp_path / "s2")) if "plane" in lost else first
        if "json" in lost:
            (tmp_path / "run" / "versions.json").unlink()
        with engine(second.url, "two", weights) as after:
            assert run(job(tmp_path, run__steps=6, stream__control_url=second.url)) == [""] * 4
        found = [record for record in records(second.url)]
    own: list[Any] = found if "plane" in lost else [r for r in found if getattr(r, "attachment", "") == "i2"]
    attached = next(r for r in own if isinstance(r, Attached))
    accepted = [r for r in own if isinstance(r, Accepted)]
    assert attached.engine == "two" and attached.replaced and attached.version > max(published)
    assert [(r.version - attached.version, r.train_step) for r in accepted] == [(0, 4), (1, 5), (2, 6)]
    assert own.index(attached) < own.index(accepted[1]), "live before the first step is accepted"
    for one, other in zip(before, after, strict=True):
        assert other.history[0] == one.history[-1], "what was live when the training was interrupted"
        assert len(set(other.history)) == len(other.history) >= 2
    steps = [line for line in lines(tmp_path) if line["kind"] == "step"]
    assert [line["version"] for line in steps[4:]] == [attached.version + 1, attached.version + 2]


@pytest.mark.full
def test_an_engine_that_comes_last_is_waited_for(tmp_path: Path) -> None:
    write_files(tmp_path)
    with EmbeddedServer(tmp_path / "s") as server:
        trainer = begin(job(tmp_path, run__steps=2, stream__control_url=server.url), tmp_path / "ranks")
        trainer.wait_for(lambda: any(line["kind"] == "start" for line in lines(tmp_path)), 40)
        with engine(server.url, "late", tmp_path / "weights") as lives:
            assert trainer.wait(60) == [0] * 4
        assert all(live.history for live in lives)


@pytest.mark.full
def test_an_engine_that_never_comes_ends_the_training_with_one_word(tmp_path: Path) -> None:
    write_files(tmp_path)
    with EmbeddedServer(tmp_path / "s") as server:
        trainer = begin(job(tmp_path, deadlines__start_s=2, stream__control_url=server.url), tmp_path / "ranks")
        codes = trainer.wait(40)
        assert None not in codes and all(codes)
        said = (tmp_path / "ranks" / "0.log").read_text()
    assert "trainer rank 0 waited 2 s for all ranks of an engine to come up" in said


@pytest.mark.full
@pytest.mark.parametrize(
    ("finality", "tiny"),
    [("pipelined", tiny_config), ("speculative", tiny_config), ("speculative", tiny_glm4)],
    ids=["pipelined", "speculative", "speculative, routers' biases"],
)
def test_an_engine_that_comes_in_the_middle_of_training_has_what_the_other_one_has(
    tmp_path: Path, finality: str, tiny: Any
) -> None:
    """Real ranks: what the second engine is sent between two steps equals what left bucket by bucket in the step."""

    def steps() -> list[dict[str, Any]]:
        return [line for line in lines(tmp_path) if line["kind"] == "step"]

    write_files(tmp_path, tiny)
    weights = tmp_path / "weights"
    settings = dict(run__steps=5000, checkpoint__every_steps=5000, finality=finality, stream__slots_per_target=1)
    with EmbeddedServer(tmp_path / "s") as server, engine(server.url, "one", weights) as first:
        trainer = begin(job(tmp_path, stream__control_url=server.url, **settings), tmp_path / "ranks")
        try:
            assert trainer.wait_for(lambda: len(steps()) >= 3, 60)
            with engine(server.url, "two", weights) as second:
                assert trainer.wait_for(lambda: any(line["joined"] == ["two"] for line in steps()), 60)
                assert trainer.wait_for(lambda: all(len(live.by_version) >= 5 for live in second), 60)
        finally:
            for rank in range(4):
                trainer.kill(rank)
            trainer.wait(10)
    for one, two in zip(first, second, strict=True):
        both = sorted(one.by_version.keys() & two.by_version.keys())
        assert min(two.by_version) in both and len(both) >= 3
        assert [version for version in both if one.by_version[version] != two.by_version[version]] == []
        assert len(set(two.by_version.values())) == len(two.by_version)
    found = steps()
    assert all(line["takes"][0] == "one" for line in found), "the first engine took every version"
    joined = next(index for index, line in enumerate(found) if line["joined"])
    assert "two" not in found[joined]["takes"] and found[joined]["join_ms"] > 0
    assert ["one", "two"] in [line["takes"] for line in found[joined:]]
