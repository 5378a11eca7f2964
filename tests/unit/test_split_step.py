"""Optimizers that count steps per group, as the fused ones do, survive a step that is taken bucket by bucket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megastream.trainer.compat import MainShard, forget_moments, main_shards
from megastream.trainer.compat_checkpoint import adam_steps, set_adam_steps
from megastream.trainer.split import SplitStep
from megastream.trainer.undo import Undo


class GroupCounting(torch.optim.Optimizer):
    """Momentum with a bias correction by the group's own step, which is an int and absent before the first one."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                moment.mul_(0.9).add_(param.grad)
                param.sub_(group["lr"] * moment / (1 - 0.9 ** group["step"]))


def _optimizer() -> tuple[Any, list[MainShard]]:
    params = [torch.nn.Parameter(torch.arange(4.0) + 10 * index) for index in range(5)]
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.5}, {"params": []}]
    inner = GroupCounting(groups[:2])
    inner.param_groups.append({**inner.param_groups[0], "params": []})
    member = SimpleNamespace(optimizer=inner)
    homes = [0 if index < 3 else 1 for index in range(5)]
    return member, [MainShard(p, p, 0, 4, member, home) for p, home in zip(params, homes, strict=True)]


def _run(split: bool) -> tuple[list[torch.Tensor], list[int]]:
    member, shards = _optimizer()
    for step in range(4):
        for group in member.optimizer.param_groups:
            group["lr"] = 0.1 * (step + 1)
        for index, shard in enumerate(shards):
            shard.main.grad = torch.full((4,), float(index + step))
        if not split:
            member.optimizer.step()
            continue
        stepping = SplitStep(member)
        for subset in ([3, 1], [0], [4, 2]):
            stepping.step(member, [shards[index] for index in subset])
        stepping.finish()
    values = [shard.main.detach() for shard in shards]
    return values, [group["step"] for group in member.optimizer.param_groups]


def test_a_loaded_state_brings_its_own_groups() -> None:
    """torch replaces every group when a state is loaded; learning rates set afterwards are in the new ones."""
    member, shards = _optimizer()
    member.optimizer.load_state_dict(member.optimizer.state_dict())
    for group in member.optimizer.param_groups:
        group["lr"] = 0.0
    before = [shard.main.detach().clone() for shard in shards]
    for shard in shards:
        shard.main.grad = torch.ones(4)
    stepping = SplitStep(member)
    stepping.step(member, shards)
    stepping.finish()
    assert all(torch.equal(a, shard.main) for a, shard in zip(before, shards, strict=True))


def _run_with_undo(restore: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Every step is made with wrong gradients first, and taken back."""
    member, shards = _optimizer()
    undo = Undo()
    for step in range(4):
        for group in member.optimizer.param_groups:
            group["lr"] = 0.1 * (step + 1)
        wrong = SplitStep(member)
        for subset in ([3, 1], [0], [4, 2]):
            for index in subset:
                shards[index].main.grad = torch.full((4,), 100.0)
            undo.save(shards[index] for index in subset)
            wrong.step(member, [shards[index] for index in subset])
        if restore:
            undo.restore()
        for index, shard in enumerate(shards):
            shard.main.grad = torch.full((4,), float(index + step))
        right = SplitStep(member)
        right.step(member, shards)
        right.finish()
        undo.forget()
    return [shard.main.detach() for shard in shards], [group["step"] for group in member.optimizer.param_groups]


def test_an_undone_step_leaves_no_trace_also_when_groups_count() -> None:
    whole, undone, broken = _run(split=False), _run_with_undo(restore=True), _run_with_undo(restore=False)
    assert all(torch.equal(a, b) for a, b in zip(whole[0], undone[0], strict=True))
    assert whole[1] == undone[1] == [4, 4, 4]
    assert not any(torch.equal(a, b) for a, b in zip(whole[0], broken[0], strict=True))


def _trainer() -> tuple[Any, list[MainShard]]:
    """The same as megatron's optimizer has it, so that our walk over its shards finds them."""
    member, shards = _optimizer()
    mains = [group["params"] for group in member.optimizer.param_groups]
    member.model_fp32_groups = member.shard_fp32_groups = mains
    member.model_float16_groups = member.shard_fp32_from_float16_groups = [[] for _ in mains]
    span = SimpleNamespace(start=0, end=4)
    member._get_model_param_range_map = lambda param: {"gbuf_world_in_bucket": span}
    assert [shard.main for shard in main_shards(member)] == [shard.main for shard in shards]
    return member, shards


def _step(shards: list[MainShard], split: SplitStep, gradient: float) -> None:
    for subset in ([3, 1], [0], [4, 2]):
        for index in subset:
            shards[index].main.grad = torch.full((4,), gradient + index)
        split.step(shards[0].member, [shards[index] for index in subset])


def _steps(member: Any) -> list[int | None]:
    return [group.get("step") for group in member.optimizer.param_groups]


def test_a_checkpoint_of_groups_that_count_holds_the_steps_that_count() -> None:
    """Not those of a step that was begun and taken back; and whoever loads it goes on with the same bits."""
    member, shards = _trainer()
    undo = Undo()
    assert adam_steps(member) == set(), "never stepped"
    for step in range(3):
        undo.save(shards)
        _step(shards, SplitStep(member), 100.0)  # in the backward, before the norm is known
        assert adam_steps(member) == ({step} if step else set())
        undo.restore()
        split = SplitStep(member)
        _step(shards, split, float(step))
        split.finish()
        undo.forget()
        assert adam_steps(member) == {step + 1} and _steps(member) == [step + 1] * 3
    resumed, fresh = _resumed(shards, 3), _resumed(shards, None)
    for loaded, mine in (resumed, fresh, (member, shards)):
        split = SplitStep(loaded)
        _step(mine, split, 3.0)
        split.finish()
    assert _steps(resumed[0]) == _steps(member) == [4, 4, 4]
    assert all(torch.equal(a.main, b.main) for a, b in zip(shards, resumed[1], strict=True))
    assert not any(torch.equal(a.main, b.main) for a, b in zip(shards, fresh[1], strict=True)), "so the count matters"


def _resumed(shards: list[MainShard], count: int | None) -> tuple[Any, list[MainShard]]:
    """A new process with these masters and moments; without a `count` it begins to count anew."""
    member, mine = _trainer()
    for old, new in zip(shards, mine, strict=True):
        new.main.data.copy_(old.main)
        moment = old.member.optimizer.state[old.main]["moment"]
        member.optimizer.state[new.main]["moment"] = moment.clone()
    if count is not None:
        set_adam_steps(member, count)
        assert adam_steps(member) == {count}
    return member, mine


def test_undo_keeps_three_copies_once() -> None:
    param = torch.nn.Parameter(torch.zeros(100))
    member = SimpleNamespace(optimizer=torch.optim.AdamW([param]))
    shard = MainShard(param, param, 0, 100, member, 0)
    undo = Undo()
    for _ in range(3):
        param.grad = torch.ones(100)
        undo.save([shard])
        undo.forget()
        member.optimizer.step()
    undo.save([shard])
    kept = undo.num_bytes
    assert 3 * 400 <= kept <= 3 * 400 + 4, "and AdamW's own step counter"
    undo.save([shard])
    assert undo.num_bytes == kept


def test_moments_are_forgotten_beside_a_stub() -> None:
    """Where all dense, or all expert, parameters are frozen, megatron chains an optimizer that has no inner one."""
    member, _ = _optimizer()
    member.optimizer.state[next(iter(member.optimizer.param_groups[0]["params"]))] = {"moment": torch.ones(4)}
    member.optimizer.param_groups[0]["step"] = 3
    stub = SimpleNamespace(is_stub_optimizer=True, optimizer=None)
    forget_moments(SimpleNamespace(chained_optimizers=[stub, member]))
    assert not member.optimizer.state and "step" not in member.optimizer.param_groups[0]


def test_a_split_step_is_the_step() -> None:
    whole, split = _run(split=False), _run(split=True)
    assert all(torch.equal(a, b) for a, b in zip(whole[0], split[0], strict=True))
    assert whole[1] == split[1] == [4, 4, 4]
