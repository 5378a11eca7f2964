"""What the engine computes with equals what was committed, on live bytes and through the live kernels."""

from __future__ import annotations

import pytest

from tests.helpers import reveal
from tests.helpers.engine import Answer, Engine
from tests.helpers.feed import RANDOM
from tests.helpers.served import Cold
from tests.helpers.traffic import commit, differing

pytestmark = pytest.mark.timeout(600)

A, B, C = RANDOM, RANDOM + 1, RANDOM + 2
SPELLED = 13 * reveal.BASE
"""Its weights answer with the first spelled token over and over, which the byte tokenizer has a text for."""
PROMPT = [31, 7, 250, 99, 3, 120]


def test_all_live_buffers_are_read_back(engine: Engine) -> None:
    engine.run(commit(engine, 0))
    assert engine.run(differing(engine, 0)) == []


@pytest.mark.parametrize("name", ["mlp.experts.routed_experts.w2_weight", "self_attn.o_proj.weight"])
def test_one_flipped_bit_is_one_differing_buffer(engine: Engine, name: str) -> None:
    """In a live expert, and in a packed linear; on one rank only."""

    async def run() -> None:
        await commit(engine, A)
        assert await differing(engine, A) == []
        layers = {"model.layers.0.", "model.layers.3."}
        held = await engine.ranks("feed_names")
        layer = next(layer for layer in sorted(layers) if f"{layer}{name}" in held[1])
        await engine.ranks("feed_flip", 1, f"{layer}{name}")
        assert await differing(engine, A) == [f"{layer}{name}"]

    engine.run(run())


def test_there_and_back_again(engine: Engine) -> None:
    """A, B, C, B: tokens and logprobs of B are the same both times, and other than A's and C's; nothing has moved."""

    async def run() -> None:
        answers, addresses = {}, await engine.ranks("feed_addresses")
        for version in (A, B, C):
            await commit(engine, version)
            assert await differing(engine, version) == []
            answers[version] = await engine.ask(f"v{version}", PROMPT, 12)
        await commit(engine, B)
        again = await engine.ask("again", PROMPT, 12)
        assert (again.tokens, again.logprobs) == (answers[B].tokens, answers[B].logprobs)
        assert len({tuple(a.logprobs) for a in answers.values()}) == 3
        assert await engine.ranks("feed_addresses") == addresses and all(addresses)

    engine.run(run())


def test_weights_that_waited_in_host_memory_are_those_of_a_commit(engine: Engine) -> None:
    """Nothing is prepared: they are packed and written inside the ordered call."""

    async def run() -> None:
        await commit(engine, B)
        expected = await engine.ask("prepared", PROMPT, 12)
        await commit(engine, A)
        for rank in (0, 1):
            await engine.ranks("feed_behave", rank, "host")
        await commit(engine, B)
        for rank in (0, 1):
            await engine.ranks("feed_behave", rank, "")
        assert await differing(engine, B) == []
        answer = await engine.ask("written", PROMPT, 12)
        assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)

    engine.run(run())


def test_paused_whole_load_equals_a_commit(engine: Engine) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    async def load(version: int) -> None:
        await engine.llm.pause_generation(mode="keep", clear_cache=False)
        try:
            await engine.llm.start_weight_update()
            await engine.llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
            await engine.llm.finish_weight_update(str(version))
        finally:
            await engine.llm.resume_generation()

    async def run() -> None:
        await commit(engine, B)
        expected = await engine.ask("streamed", PROMPT, 12)
        await commit(engine, A)
        await load(B)
        assert await differing(engine, B) == []
        answer = await engine.ask("loaded", PROMPT, 12)
        assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)
        assert answer.labels() == [str(B)] * 12
        await commit(engine, C)
        assert await differing(engine, C) == []

        await engine.ranks("feed_behave", 1, "fail")
        with pytest.raises(Exception, match=f"whole update to version {A} failed on rank 1: .*told to fail"):
            await load(A)
        assert (await engine.ask("poisoned", PROMPT, 3)).finish_reason == "error"
        await engine.ranks("feed_behave", 1, "")
        await engine.llm.collective_rpc("megastream_call", args=("status", {}))
        await load(A)
        assert await differing(engine, A) == []
        assert (await engine.ask("healthy", PROMPT, 3)).labels() == [str(A)] * 3

    engine.run(run())


def test_native_calls_are_refused_by_name(engine: Engine) -> None:
    """Refused once, in the core: the replies of later calls still belong to their own calls."""

    async def run() -> None:
        with pytest.raises(Exception, match="start_weight_update: the engine is not paused"):
            await engine.llm.start_weight_update()
        with pytest.raises(Exception, match="reload_weights: tokens would go on being stamped with the version before"):
            await engine.llm.collective_rpc("reload_weights")
        with pytest.raises(Exception, match="init_weight_transfer_engine: megastream takes no init_info"):
            await engine.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"bad": 1}})
        await engine.llm.pause_generation(mode="keep", clear_cache=False)
        try:
            with pytest.raises(Exception, match="finish_weight_update: no weight update is active"):
                await engine.llm.finish_weight_update()
            with pytest.raises(Exception, match='give {"update_info": {"version": V}}'):
                await engine.llm.collective_rpc("update_weights", kwargs={"update_info": {"file": "x"}})
        finally:
            await engine.llm.resume_generation()
        replies = await engine.ranks("megastream_call", "status", {})
        assert [(reply["ok"], reply["rank"]) for reply in replies] == [(True, 0), (True, 1)]
        replies = await engine.core("feed_call", "anything")
        assert [(reply["op"], reply["ok"]) for reply in replies] == [("anything", True)] * 2

    engine.run(run())


def test_spans_reach_the_last_output_of_every_request(engine: Engine) -> None:
    async def run() -> None:
        await engine.core("set_weight_version", "77")
        answer = await engine.ask("native", PROMPT, 4)
        assert answer.spans == answer.carried == [("77", 0, 4)]
        await commit(engine, SPELLED)
        text = (await engine.ask("text", PROMPT, 1, stop=["no such text"])).text
        stopped = await engine.ask("stopped", PROMPT, 8, stop=[text])
        assert (stopped.finish_reason, stopped.spans) == ("stop", [(str(SPELLED), 0, len(stopped.tokens))])
        assert stopped.carried == stopped.spans, "ended by vLLM's front end, on an output like any other"

    engine.run(run())


def test_a_server_cold_started_from_the_checkpoint_says_the_same(engine: Engine, cold: Cold) -> None:
    """`megastream serve`: /v1/completions of a fresh single worker against the live-updated pipeline."""
    if engine.name != "pp2":
        pytest.skip("tensor parallel sums are rounded in another order than a single worker's")

    async def streamed() -> Answer:
        await commit(engine, C)
        await commit(engine, cold.version)
        return await engine.ask("streamed", list(cold.prompt), 12)

    expected = engine.run(streamed())
    choice = cold.reply["choices"][0]
    assert choice["token_ids"] == expected.tokens
    assert choice["logprobs"]["token_logprobs"] == expected.logprobs
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 12}]
    assert cold.reply["kv_transfer_params"]["weight_versions"] == choice["weight_versions"]
