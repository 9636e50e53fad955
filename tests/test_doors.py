"""The names that scripts outside this repository rely on: they exist and mean what they say."""
import inspect
import json

import pytest
import torch

from model.qwen import Qwen
from rl.config import Config, load_config
from rl.grpo import advantages, importance_weights, token_loss
from stl.expert import solve
from stl.formula import FormulaError, parse
from stl.levels import make_task
from stl.monitor import check
from stl.planner import plan_path
from stl.tools import call_tool
from stl.world import Task, TaskError


def test_world_and_formula():
    task = make_task("L1", "eval", 17)
    data = task.to_json()
    assert Task.from_json(json.loads(json.dumps(data))).to_json() == data
    absent = ("spec", "level", "witness", "plan")
    bare = Task.from_json({key: value for key, value in data.items() if key not in absent})
    assert bare.formulas == () or list(bare.formulas) == []
    with pytest.raises(TaskError, match="half_width"):
        Task.from_json(data | {"robot": data["robot"] | {"half_width": 0}})
    tree = parse("out(D) U[0,136] in(K)")
    assert parse(str(tree)) == tree
    with pytest.raises(ValueError) as caught:
        parse("F[3,1] in(A)")
    assert isinstance(caught.value, FormulaError)


def test_check():
    task = make_task("L1", "eval", 17)
    verdict = check(task, task.witness)
    assert verdict.ok and verdict.clauses == [True] * len(task.spec) and verdict.violations == []
    still = check(task, [[0, *task.robot.start]])
    assert not still.ok and {violation.kind for violation in still.violations} == {"clause"}
    assert all(isinstance(violation.text, str) for violation in still.violations) and isinstance(still.text, str)
    broken = check(task, "nonsense")
    assert broken.clauses is None and [violation.kind for violation in broken.violations] == ["format"]
    assert still.text == call_tool(task, "check_path", {"waypoints": [[0, *task.robot.start]]})


def test_plan_path():
    task = make_task("L1", "eval", 17)
    region = next(iter(task.regions))
    path = plan_path(task, task.robot.start, goal_region=region)
    assert path.length >= 0 and path.waypoints[0] == [0, *task.robot.start]
    assert list(inspect.signature(plan_path).parameters) == [
        "task", "start", "t_start", "goal_region", "goal_point", "avoid", "hold_until"]
    assert plan_path(task, (-50, -50), goal_region=region) is None
    with pytest.raises(ValueError):
        plan_path(task, task.robot.start, goal_region="nowhere")


def test_tools_and_expert():
    task = make_task("L1", "eval", 17)
    good = {"start": list(task.robot.start), "t_start": 0, "goal_region": next(iter(task.regions))}
    assert "Path found" in call_tool(task, "plan_path", good)
    assert isinstance(call_tool(task, None, object()), str) and isinstance(call_tool(task, "plan_path", {}), str)
    wall = next(iter(task.obstacles))
    strict = call_tool(task, "plan_path", good | {"avoid": [wall]})
    assert wall in strict and "Path found" not in strict
    assert "Path found" in call_tool(task, "plan_path", good | {"avoid": [wall]}, manner="friendly")
    messages = solve(task)
    assert [m["role"] for m in messages][0] == "assistant" and "<answer>" in messages[-1]["content"]
    for message, answer in zip(messages, messages[1:], strict=False):
        if message.get("tool_calls"):
            assert answer["role"] == "tool"


def test_model():
    assert list(inspect.signature(Qwen.from_folder).parameters)[:3] == ["path", "dtype", "device"]
    assert list(inspect.signature(Qwen.forward).parameters) == ["self", "ids", "cu_seqlens"]
    assert callable(Qwen.head)


def test_grpo():
    one = advantages(torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]))
    assert one[0] == pytest.approx(2.474874, abs=1e-4) and one[1] == pytest.approx(-0.353553, abs=1e-4)
    plain = advantages(torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]), std="none")
    assert plain.tolist() == pytest.approx([0.875] + [-0.125] * 7)
    assert advantages(torch.ones(8)).tolist() == [0.0] * 8
    new, old = torch.tensor([[0.5, -0.5]]), torch.zeros(1, 2)
    loss = token_loss(new, old, torch.tensor([[1.0, 1.0]]), 0.2, 0.28)
    assert loss.shape == new.shape and loss[0, 0] == pytest.approx(-1.28)
    weights = importance_weights(torch.tensor([3.0, 0.0], requires_grad=True), torch.zeros(2), 2.0)
    assert weights.tolist() == [2.0, 1.0] and not weights.requires_grad


def test_config():
    assert isinstance(load_config("tiny.py"), Config)
