"""train.py with vLLM as the sampler: three steps on a CPU, killed in the second one and resumed."""
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ARGUMENTS = ["--sampler=vllm", "--steps=3", "--gpu_memory=0.1", "--enforce_eager=true", "--sampler_slots=16",
             "--engine_tokens=2048", "--probe_every=2", "--sft_steps=30", "--eval_every=3", "--max_tokens=256",
             "--tool_workers=2"]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(folder, *overrides, before=(), kill=()):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/vllm/shim")}
    return subprocess.run([sys.executable, *before, str(ROOT / "tests/small_run.py"), *kill, *ARGUMENTS, *overrides],
                          cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def test_three_steps_and_a_kill(vllm, tmp_path):
    died = run(tmp_path, kill=("--kill", "grpo:2:rollouts"))
    assert died.returncode == -9, died.stderr
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/small"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["stage"] == "grpo"]
    assert [row["step"] for row in steps] == [1, 2, 3] and not any(row["stale"] for row in steps)
    assert any(stats["steps"] for row in steps for stats in row["learner"])
    for row in steps:
        assert all(stats["mismatch_mean"] < 0.01 for stats in row["learner"] if stats["steps"])
        packed = (folder / f"episodes/step-{row['step']:06d}.jsonl.gz").read_bytes()
        episodes = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
        assert len(episodes) == 16 and {e["version"] for e in episodes} == {row["step"] - 1}
    assert "sampler" in steps[0] and "sampler" in steps[2]  # the second step's episodes were read from the disk
    assert (folder / "finished").exists()
    assert not [path for path in Path("/dev/shm").glob("adapter-*") if str(os.getpid()) not in path.name]


def test_two_ranks_with_an_engine_each(vllm, tmp_path):
    done = run(tmp_path, "--steps=1", "--sft_steps=10", "--eval_every=0", before=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr  # the engines end with their ranks
    rows = [json.loads(line) for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    step = next(row for row in rows if row["stage"] == "grpo")
    assert step["episodes"] == 16 and not step["stale"]
    assert all(stats["mismatch_mean"] < 0.01 for stats in step["learner"] if stats["steps"])
    assert (tmp_path / "runs/small/finished").exists()
