"""The supervised stage on collected conversations: when it stops early, which tasks it refuses, and its dry run."""
import json
from pathlib import Path

import pytest

import sample
import train
from rl import tasks as tasks_module
from rl.config import ConfigError, load_config, replace
from stl.levels import make_task

SHAPE = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False}
SMALL = [f"--architecture={SHAPE}", "--sft_file=d.jsonl", "--sft_steps=12", "--sft_decay=0", "--sft_batch=2",
         "--sft_optimizer=adamw", "--sft_warmup=1", "--sft_held_out=2", "--sft_eval_every=1", "--sft_eval_from=0",
         "--sft_stop=1", "--max_turns=2", "--max_turn_tokens=6", "--steps=0", '--eval_mix={"L0": 1}']


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks_module, "SETS", {"eval": {"L1": 1}, "rl": {"L1": 1}})
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)


def collected(tasks):
    assert sample.main(["--collect", "d.jsonl", "--tasks", tasks, "--config", "tiny.py"]) == 0


def held_out_losses(name):
    rows = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [row["held_out_loss"] for row in rows if row["stage"] == "sft"]


def test_a_held_out_loss_that_does_not_fall_ends_the_stage():
    """At a rate that is too high; without patience the same run goes on to its end."""
    collected("sft:L0=6")
    assert train.main([*SMALL, "--sft_lr=0.05", "--name=ended", "--sft_patience=2"]) == 0
    losses = held_out_losses("ended")
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 2 < 12, "two measurements after the lowest"
    assert Path(f"runs/ended/checkpoints/sft-{len(losses):06d}").is_dir() and Path("runs/ended/finished").exists()
    assert train.main([*SMALL, "--sft_lr=0.05", "--name=whole"]) == 0
    assert len(held_out_losses("whole")) == 12 and held_out_losses("whole")[:best + 1] == losses[:best + 1]


@pytest.mark.parametrize("losses, patience, stops", [
    ([3.0, 2.0, 2.5], 1, True), ([3.0, 2.0, 2.5], 2, False), ([3.0, 2.0, 2.0], 1, True), ([3.0, 2.0, 1.0], 1, False),
    ([1.0, 2.0, 3.0, 0.5], 3, False), ([1.0, 2.0, 3.0, 4.0], 3, True), ([1.0, 9.0, 9.0], 0, False)])
def test_patience(losses, patience, stops):
    class Log:
        def rows(self, stage):
            return [{"step": 0}, *({"held_out_loss": loss} for loss in losses)]

    config = replace(load_config("tiny.py"), sft_patience=patience, sft_held_out=2, sft_file="d.jsonl")
    assert train.enough(config, Log(), 0.0) == stops and train.enough(config, Log(), config.sft_stop)
    for needed in ({"sft_file": ""}, {"sft_held_out": 0}, {"sft_eval_every": 0}):
        with pytest.raises(ConfigError, match="^sft_patience: .* give sft_file, sft_held_out and sft_eval_every too$"):
            replace(config, sft_patience=1, **needed)


@pytest.mark.parametrize("task", [("L0", "eval", 0), ("L1", "eval", 0), ("L1", "rl", 0)])
def test_conversations_on_tasks_of_the_sets_are_refused(task, capsys):
    """By the task's hash, whatever it is called; the first is of the run's own held-out set."""
    collected("sft:L0=5")
    rows = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    rows[3] |= {"id": "mine", "hash": make_task(*task).hash(), "task": make_task(*task).to_json() | {"id": "mine"}}
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert train.main(SMALL) == 2
    (line,) = capsys.readouterr().err.strip().split("\r")[-1].splitlines()[-1:]
    assert line.startswith("train.py: sft_file = 'd.jsonl': has the task mine, which is in the evaluation or RL sets "
                           f"(as {'-'.join(map(str, task))})"), line


def test_the_dry_run_of_the_imitation(qwen_folder, capsys):
    """It needs no file of conversations, and says so."""
    argv = ["--config", "sft.py", "--dry-run", f"--model={qwen_folder}", '--mix={"L0": 16}', '--eval_mix={"L0": 1}']
    assert train.main(argv) == 0
    said = capsys.readouterr().out
    assert "sft_file 'data/distill.jsonl' -> ''" in said and said.count("  taken: ") == said.count("aken: ") == 1
    for words in ("taken: imitation", "steps 0 -> 2", "8,953,803,264 parameters", "an 80 GB card"):
        assert words in said, said
    assert not any(Path().iterdir())
