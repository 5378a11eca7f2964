"""A real vLLM engine for tests: one start, many calls, its event loop in a thread."""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Coroutine
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megastream.rl.children import before_program
from megastream.rl.owned import mapped
from tests.helpers.segments import below, remove, segments_of

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def set_environment() -> None:
    """For this process and the engine's, before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    if "VLLM_RPC_BASE_PATH" not in os.environ:  # vLLM never removes its sockets
        os.environ["VLLM_RPC_BASE_PATH"] = folder = tempfile.mkdtemp(prefix="ms-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


@dataclass
class Answer:
    """One request: its tokens, vLLM's own spans, ours, why it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    carried: list[tuple[str, int, int]] = field(default_factory=list)
    between: list[tuple[str, str]] = field(default_factory=list)
    """(oldest, newest) of the spans of mixes."""
    kv: list[tuple[str | None, int, int]] = field(default_factory=list)
    cached: int = 0
    """Prompt tokens whose keys and values came from the cache."""
    finish_reason: str | None = None
    text: str = ""

    def labels(self) -> list[str]:
        """The version label of every token."""
        out: list[str] = []
        for version, start, end in self.spans:
            assert start == len(out), self.spans
            out += [version] * (end - start)
        return out


class Engine:
    """`extra` are AsyncEngineArgs beside the common ones."""

    def __init__(self, model: Path, **extra: Any):
        set_environment()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from megastream.rl.engine_start import start_engine

        self.name = ""
        self.num_tokens = 0
        """Tokens of all requests so far."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        # On CPU the KV cache's size goes through the environment, and there are no graphs.
        on_gpu = {"kv_cache_memory_bytes": 1 << 30} if torch.cuda.is_available() else {}
        arguments = AsyncEngineArgs(
            model=str(model),
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=8,
            enforce_eager=not on_gpu,
            enable_prefix_caching=True,
            disable_log_stats=True,
            weight_transfer_config={"backend": "megastream"},
            worker_extension_cls="tests.helpers.feed.Feeder",
            scheduler_cls="tests.helpers.feed.FeedScheduler",
            **on_gpu,
            **extra,
        )

        async def start() -> AsyncLLM:
            return start_engine(arguments)

        self.llm = self.run(start(), 420)
        # vLLM's front end pauses for a full collection of everything imported here, which looks like a stall.
        gc.collect()
        gc.freeze()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 60) -> Any:
        """Runs a coroutine in the engine's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    async def core(self, utility: str, *args: Any) -> Any:
        """A core utility."""
        return await self.llm.engine_core.call_utility_async(utility, *args)

    def cores(self) -> list[Any]:
        """The engine core's process, as vLLM keeps it."""
        return list(self.llm.engine_core.resources.engine_manager.processes)

    async def ranks(self, method: str, *args: Any) -> list[Any]:
        """A worker method on every rank."""
        return await self.llm.collective_rpc(method, args=args)

    async def ask(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        stop: list[str] | None = None,
        cold: bool = False,
        into: Answer | None = None,
    ) -> Answer:
        """Greedy; every token with its logprob. Text is made only to look for `stop` in it.

        `cold`: without the prefix cache. `into`: an Answer that grows while the request runs.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=stop is not None,
            stop=stop,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            skip_reading_prefix_cache=cold or None,
        )
        answer = Answer() if into is None else into
        async for output in self.llm.generate({"prompt_token_ids": prompt}, parameters, request_id):
            part = output.outputs[0]
            answer.tokens += part.token_ids
            answer.text += part.text
            self.num_tokens += len(part.token_ids)
            if part.token_ids:  # an output without tokens repeats earlier logprobs
                answer.logprobs += [top[t].logprob for t, top in zip(part.token_ids, part.logprobs, strict=True)]
            if output.finished:
                answer.finish_reason = part.finish_reason
                parameters_out = output.kv_transfer_params or {}
                carried = parameters_out.get("weight_versions", [])
                answer.kv = [(s["version"], s["start"], s["end"]) for s in parameters_out.get("kv_versions", [])]
                answer.cached = output.num_cached_tokens or 0
                answer.between = [(s["oldest"], s["newest"]) for s in carried if "oldest" in s]
                answer.carried = [(s["version"], s["start"], s["end"]) for s in carried]
                # vLLM's own field came with 0.32; before it there is only what we carry.
                own = getattr(part, "weight_versions", None)
                answer.spans = [(s.version, s.start, s.end) for s in own] if own else answer.carried
        return answer

    def close(self) -> None:
        """Ends the engine and its processes; removes the segments that vLLM leaves because it kills its workers."""

        async def stop() -> None:
            self.llm.shutdown()

        segments = segments_of(os.getpid())
        self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        del self.llm
        remove(segments)


def serve_command() -> list[str]:
    """`vllm serve`, or the module behind it: the command asks for a distribution named vllm.

    The CPU wheel has another name, which tools/setup.sh mends; without it the command ends at once.
    """
    script = Path(sys.executable).with_name("vllm")
    named = any(metadata.distributions(name="vllm"))
    if named and script.exists():
        return [str(script), "serve"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


class Server:
    """`vllm serve MODEL --weight-transfer-config megastream` as a process of its own. A context manager."""

    START_S = 420.0

    def __init__(
        self, model: Path, *arguments: str, command: list[str] | None = None, environment: dict[str, str] | None = None
    ):
        """`command` takes the place of `serve_command()` and the model; `environment` is added to this process's."""
        set_environment()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self._log = model.parent / "server.log"
        command = [*(command or (*serve_command(), str(model)))]
        command += ["--port", str(self.port), "--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager"]
        command += ["--max-model-len", "512", "--max-num-seqs", "8", *arguments]
        command += ["--weight-transfer-config", '{"backend": "megastream"}']
        with self._log.open("wb") as log:
            # A test run that is killed must not leave a server behind.
            ends_with_us = before_program(os.getpid(), nice=0)
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=ends_with_us,
                env={**os.environ, **(environment or {})},
            )

    def __enter__(self) -> Server:
        deadline = time.monotonic() + self.START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                self._get("/health")
                return self
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        raise RuntimeError(f"the server did not come up:\n{self.log()}")

    def __exit__(self, *exception: object) -> None:
        left = segments_of(self._process.pid) if self._process.poll() is None else set()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        remove(left)

    def kill(self) -> None:
        """SIGKILL for the server, its engine core and its workers, all at once, and for Python's trackers of their
        segments."""
        pids = below(self._process.pid)
        left = {name for pid in pids for name in mapped(pid)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self._process.wait(10)
        remove(left)

    def log(self) -> str:
        """What the server has printed."""
        return self._log.read_text(errors="replace")[-4000:]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON in, JSON out."""
        return json.loads(self.ask(path, body))

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        lines = [line for line in self.ask(path, {**body, "stream": True}).split("\n") if line]
        assert lines[-1] == "data: [DONE]", lines
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def ask(self, path: str, body: Any = None, **headers: str) -> str:
        """The text of a reply; urllib.error.HTTPError when it is an error. Without a body it is a GET."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read().decode()

    def _get(self, path: str) -> None:
        urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5).close()
