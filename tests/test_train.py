"""train.py as a user runs it: to the end, killed and resumed to the bit, and with mistakes on its command line."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl.config import load_config

ROOT = Path(__file__).resolve().parent.parent
SMALL = ROOT / "tests" / "small_run.py"


def run(folder, *arguments, script=SMALL):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, str(script), *arguments], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=240)


def weights(folder):
    return {f"{path}/{name}".partition("checkpoints")[2]: tensor
            for path in sorted((folder / "runs/small/checkpoints").glob("**/*.safetensors"))
            for name, tensor in load_file(path).items()}


def metrics(folder):
    """The rows without what depends on time."""
    rows = [json.loads(line) for line in (folder / "runs/small/metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_to_its_end(undisturbed):
    folder = undisturbed / "runs/small"
    rows = metrics(undisturbed)
    steps = [row for row in rows if row["stage"] == "grpo"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if row["stage"] == "sft"] == list(range(1, 13))
    assert {(row["of"], row["step"], row["temperature"]) for row in rows if row["stage"] == "eval"} == {
        ("sft", 12, 1.0), ("sft", 12, 0.0), ("grpo", 0, 1.0), ("grpo", 2, 1.0), ("grpo", 4, 1.0), ("grpo", 4, 0.0)}
    assert any(0 < row["reward"] < 1 for row in steps), "no group was mixed: nothing was tested"
    assert any(stats["steps"] for row in steps for stats in row["learner"])
    for row in steps:
        lines = (folder / f"episodes/step-{row['step']:06d}.jsonl").read_text().splitlines()
        episodes = [json.loads(line) for line in lines]
        assert len(episodes) == 16 and sum(e["reward"] for e in episodes) / 16 == row["reward"]
        assert sum(stats["tokens"] for stats in row["learner"]) == sum(sum(e["mask"]) for e in episodes)
        assert all(stats["mismatch_max"] < 1e-4 for stats in row["learner"] if stats["steps"])
        assert {e["version"] for e in episodes} == {row["step"] - 1}
    assert (folder / "curves.png").stat().st_size > 5000
    assert {path.name for path in (folder / "checkpoints/sft-000012").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "trainer"}
    # vLLM and others read every safetensors file of a model folder as weights
    assert [path.name for path in (folder / "checkpoints/sft-000012").glob("*.safetensors")] == ["model.safetensors"]
    assert (folder / "checkpoints/grpo-000004/adapter_config.json").exists()
    again = run(undisturbed)
    assert again.returncode == 0 and "is finished" in again.stdout


@pytest.mark.parametrize("kill", ["grpo:3:rollouts", "grpo:3:checkpoint"])
def test_two_steps_and_a_kill_and_two_steps(undisturbed, tmp_path, kill):
    """Final weights, optimizer state and metrics equal the undisturbed run's to the bit."""
    died = run(tmp_path, "--kill", kill)
    assert died.returncode == -9, died.stderr
    assert max(row["step"] for row in metrics(tmp_path) if row["stage"] == "grpo") in (2, 3)
    resumed = run(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    same_as(undisturbed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["sft:5:checkpoint", "sft:9:after", "sft:12:after", "grpo:1:rollouts", "grpo:2:update",
                                  "grpo:4:update", "grpo:4:after", "grpo:1:checkpoint"])
def test_kills_anywhere(undisturbed, tmp_path, kill):
    assert run(tmp_path, "--kill", kill).returncode == -9
    assert run(tmp_path).returncode == 0
    same_as(undisturbed, tmp_path)


def same_as(undisturbed, folder):
    assert metrics(folder) == metrics(undisturbed)
    expected, found = weights(undisturbed), weights(folder)
    assert expected.keys() == found.keys() and expected
    for name, tensor in expected.items():
        assert tensor.equal(found[name]), name


@pytest.mark.parametrize("arguments, words", [
    (["--stepz=3"], ["stepz", "steps"]),
    (["--config", "tinny.py"], ["tinny.py", "tiny.py"]),
    (["--lr=fast"], ["lr", "float"]),
    (["--samples=0"], ["samples", "between 1"]),
    (['--mix={"L9": 3}'], ["L9", "L"]),
    (["--lora_targets=('q_prj',)"], ["q_prj", "q_proj"]),
    (["--model=nowhere", "--chat=qwen", "--sft_steps=0"], ["nowhere"]),
    (["--optimizer_steps=100"], ["optimizer_steps", "24"]),
    (["steps=3"], ["steps=3", "--KEY=VALUE"]),
    (["--config", "l8.py"], ["Qwen/Qwen3.5-9B", "--model="]),
    (["--plan", "--architecture={'model_type': 'gpt2'}"], ["architecture", "gpt2", "qwen3_5_text"]),
])
def test_mistakes_get_one_line(tmp_path, arguments, words):
    done = run(tmp_path, *arguments, script=ROOT / "train.py")
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert not any(tmp_path.iterdir())


def test_the_memory_of_a_step_is_planned_without_weights_or_gpu(tmp_path):
    done = run(tmp_path, "--config", "l8.py", "--plan", script=ROOT / "train.py")
    assert done.returncode == 0, done.stderr
    assert "8,953,803,264 parameters" in done.stdout and "architecture" in done.stdout
    shape = load_config("l8.py").architecture
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 16}))
    half = run(tmp_path, "--config", "l8.py", "--plan", "--model=.", script=ROOT / "train.py")
    assert half.returncode == 0 and "5,494,022,400 parameters" in half.stdout and "./config.json" in half.stdout


def test_a_second_process_and_changed_settings_are_refused(undisturbed):
    changed = run(undisturbed, "--lr=1e-3")
    assert changed.returncode == 2 and "lr 0.004 -> 0.001" in changed.stderr and "--force" in changed.stderr


def test_measuring_leaves_training_unchanged(undisturbed, tmp_path):
    """Neither weights nor rewards depend on whether, and how often, held-out tasks were played in between."""
    assert run(tmp_path, "--eval_every=0", '--eval_mix={"L0": 5}', "--sft_eval_every=5").returncode == 0
    expected, found = weights(undisturbed), weights(tmp_path)
    assert all(expected[name].equal(found[name]) for name in expected) and expected.keys() == found.keys()
    assert [row["reward"] for row in metrics(tmp_path) if row["stage"] == "grpo"] == [
        row["reward"] for row in metrics(undisturbed) if row["stage"] == "grpo"]
