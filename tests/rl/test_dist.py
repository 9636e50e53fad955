"""Several ranks, as torchrun starts them, on CPUs: the same run as one process makes, to rounding."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl import dist
from rl.ledger import Clock
from rl.run import read_episodes

ROOT = Path(__file__).resolve().parent.parent.parent
ARGUMENTS = ["--sft_steps=1", "--sft_tasks=8", "--steps=2", "--eval_every=0", "--micro_tokens=500",
             '--eval_mix={"L0": 2}']
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(folder, start, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *start, str(ROOT / "tests/small_run.py"), *arguments, *ARGUMENTS],
                          cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def rows(folder, stage):
    lines = (folder / "runs/small/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["stage"] == stage]


def test_two_ranks_make_the_run_of_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, start in ((one, []), (two, TORCHRUN)):
        folder.mkdir()
        done = run(folder, start, "--count")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("finished") + done.stdout.count("done: curves") == 1, "rank 0 alone prints"
    for stage in ("sft", "eval", "grpo"):
        assert len(rows(one, stage)) == len(rows(two, stage)) > 0, "each row once"
    for ours, theirs in zip(rows(one, "sft"), rows(two, "sft"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    for ours, theirs in zip(rows(one, "eval"), rows(two, "eval"), strict=True):
        assert {k: v for k, v in ours.items() if k != "time"} == {k: v for k, v in theirs.items() if k != "time"}
    for ours, theirs in zip(rows(one, "grpo"), rows(two, "grpo"), strict=True):
        assert ours["sampler"]["turns"] >= 16 and ours["sampler"]["preemptions"] == 0, "of all ranks"
        assert {k: v for k, v in ours.items() if k not in ("learner", "time")} == {
            k: v for k, v in theirs.items() if k not in ("learner", "time")}
        for a, b in zip(ours["learner"], theirs["learner"], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=2e-6)
        name = f"runs/small/episodes/step-{ours['step']:06d}.jsonl.gz"
        a, b = read_episodes(one / name), read_episodes(two / name)
        assert [e.ids for e in a] == [e.ids for e in b]
        assert [(e.group, e.sample) for e in b] == [(i // 4, i % 4) for i in range(16)]
    last = "runs/small/checkpoints/grpo-000002"
    expected, found = (load_file(folder / last / "trainer/optimizer.safetensors") for folder in (one, two))
    for name, tensor in expected.items():  # averages of the gradients and of their squares
        assert (found[name] - tensor).abs().max() <= 1e-3 * tensor.abs().max()
    expected, found = (load_file(folder / last / "adapter_model.safetensors") for folder in (one, two))
    for name, tensor in expected.items():  # Adam divides a gradient near zero by its own size: rounding shows
        assert (found[name] - tensor).abs().mean() < 1e-6 and torch.isfinite(tensor).all()
    assert any((tensor.abs() > 1e-3).any() for name, tensor in expected.items() if "lora_B" in name)


def test_a_mistake_of_rank_0_ends_all_ranks(monkeypatch):
    """It says so before it raises, and the others end with it instead of waiting."""
    wire = []
    monkeypatch.setattr(dist, "_place", (0, 2))
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda box: wire.append(list(box)))
    with pytest.raises(ZeroDivisionError):
        dist.on_first(lambda: 1 / 0)
    assert dist.on_first(lambda: 7) == 7 and wire == [[None, False], [7, True]]
    monkeypatch.setattr(dist, "_place", (1, 2))
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda box: box.__setitem__(slice(2), wire.pop()))
    assert dist.on_first(lambda: pytest.fail("rank 0's work")) == 7
    with pytest.raises(SystemExit):
        dist.on_first(lambda: pytest.fail("rank 0's work"))


def test_clocks_and_memory_of_all_ranks(monkeypatch):
    """Seconds: the mean, which the FLOPs of all cards are divided by. Memory: the fullest card's."""
    clock = Clock()
    clock.seconds, clock.peaks = {"sample": 4.0, "update": 1.0}, {"update": 5}
    assert clock.figures() == {"time": {"sample": 4.0, "update": 1.0}, "memory": {"update": 5}}
    assert clock.figures() == {"time": {}}
    clock.seconds, clock.peaks = {"sample": 4.0, "update": 1.0}, {"update": 5}
    monkeypatch.setattr(dist, "gather", lambda items: [*items, ({"sample": 4.0, "update": 3.0}, {"update": 7})])
    assert clock.figures() == {"time": {"sample": 4.0, "update": 2.0}, "memory": {"update": 7}}
