"""Policies: whose weights lie where, and which adapter they start from."""
import shutil

import pytest
import torch

import rl.policy
from model.checkpoint import CheckpointError, save_adapter, save_folder
from rl import cli
from rl.config import ConfigError, load_config, replace
from rl.policy import load_policy, make_policy, resume_policy
from rl.run import Run, RunError

CONFIG = load_config("tiny.py", ["--lora_rank=2", "--lora_alpha=4", "--steps=1", "--sft_steps=1", "--sft_tasks=1",
                                 "--sft_optimizer=adamw"])


def changed(policy):
    """A new value for the adapter, so that it can be told from a fresh one."""
    with torch.no_grad():
        for i, p in enumerate(policy.adapter.parameters()):
            p.fill_(i + 1)
    return policy


def first(policy):
    return policy.adapter.parameters()[0][0, 0].item()


def test_an_adapter_to_start_from(tmp_path):
    policy = changed(make_policy(CONFIG, adapter=True))
    save_adapter(policy.adapter, tmp_path / "mine", "")
    config = replace(CONFIG, adapter=str(tmp_path / "mine"))
    again = make_policy(config, adapter=True)
    assert all(torch.equal(a, b) for a, b in zip(policy.adapter.parameters(), again.adapter.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="r is 2, but the adapter here has 3"):
        make_policy(replace(config, lora_rank=3), adapter=True)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="adapter = .*PEFT.*--adapter=FOLDER"):
            make_policy(replace(CONFIG, adapter=str(folder)), adapter=True)


def test_targets_that_the_model_lacks():
    with pytest.raises(ConfigError, match="no layer named out_proj"):
        make_policy(replace(CONFIG, lora_targets=("out_proj",)), adapter=True)


def test_an_adapter_that_a_run_has_trained(tmp_path, monkeypatch):
    """By imitation; GRPO goes on from it in the same run folder, or in another run that names the folder."""
    model = make_policy(CONFIG)
    save_folder(model.model, tmp_path / "model")
    model.chat.save(tmp_path / "model")
    config = replace(CONFIG, model=str(tmp_path / "model"))
    run = Run.open(config, tmp_path)
    policy = changed(make_policy(config, config.model, adapter=True))
    def keep(stage, step):
        return run.save(stage, step, {}, {}, lambda folder: save_adapter(policy.adapter, folder, policy.base))

    half = keep("sft", 6)
    with pytest.raises(ConfigError, match="not over, only at step 6; let it end, or say --adapter=.*/sft-000006"):
        make_policy(replace(config, adapter=str(run.folder)), config.model, adapter=True)
    assert first(make_policy(replace(config, adapter=str(half.folder)), config.model, adapter=True)) == 1
    base = keep("sft", 7)
    run.log({"stage": "eval", "of": "sft", "step": 7, "temperature": 0.0, "success": 0.5})  # so it has ended there
    here, there = resume_policy(config, base, None, adapter=True), make_policy(
        replace(config, adapter=str(run.folder)), config.model, adapter=True)
    assert first(here) == first(there) == 1 and here.base == config.model
    assert here.sampler.version == 0
    with torch.no_grad():
        policy.adapter.parameters()[0].fill_(8)
    named = keep("grpo", 2)
    with torch.no_grad():
        policy.adapter.parameters()[0].fill_(9)
    last = keep("grpo", 3)
    resumed = resume_policy(replace(config, adapter="gone since"), base, last, adapter=True)
    assert first(resumed) == 9 and resumed.sampler.version == 3
    run.close()
    assert first(load_policy(run.folder)) == 9 and first(load_policy(run.folder, "sft")) == 1
    assert first(load_policy(named.folder)) == 8 and first(load_policy(base.folder)) == 1
    monkeypatch.chdir(named.folder.parent)
    opened = cli.open_policy(named.folder.name)
    assert opened.sampler.version == 2 and first(opened) == 8
    assert opened.config.chat == "compact", "by the run's settings"
    assert cli.open_world(named.folder.name).__name__ == config.env


@pytest.mark.parametrize("older", [False, True])
def test_the_model_below_an_adapter_is_gone(tmp_path, older):
    """Of a run whose supervised stage made it: neither a random model nor an older checkpoint stands in."""
    run, base = Run.open(CONFIG, tmp_path), make_policy(CONFIG)
    for step in (2, 3):
        gone = run.save("sft", step, {}, {}, lambda folder: save_folder(base.model, folder)).folder
    policy = resume_policy(CONFIG, run.latest("sft"), None, adapter=True)
    last = run.save("grpo", 1, {}, {}, lambda folder: save_adapter(policy.adapter, folder, policy.base))
    run.close()
    assert load_policy(run.folder).base == str(gone)
    shutil.rmtree(gone)
    if not older:
        shutil.rmtree(gone.with_name("sft-000002"))
    for make in (lambda: load_policy(run.folder), lambda: load_policy(last.folder),
                 lambda: resume_policy(CONFIG, run.latest("sft"), run.latest("grpo"), adapter=True)):
        with pytest.raises(RunError, match="sft-000003: is not there, and grpo-000001 was learnt on it; .*--new"):
            make()


def test_with_vllm_the_trainers_weights_wait_in_cpu_memory(tmp_path, monkeypatch):
    """The engine is built before anything is put on the device, and between two updates nothing is there."""
    model = make_policy(CONFIG)
    save_folder(model.model, tmp_path)
    model.chat.save(tmp_path)
    seen = []

    def open_sampler(config, model, adapter, chat, folder):
        seen.append({p.device.type for p in [*model.parameters(), *adapter.parameters()]})

    monkeypatch.setattr(rl.policy, "open_sampler", open_sampler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("model.optim._pinned", lambda tensor: tensor)
    config = replace(CONFIG, model=str(tmp_path), sampler="vllm", device="cuda")
    policy = make_policy(config, tmp_path, adapter=True)
    assert seen == [{"cpu"}] and policy.weights.device.type == "cuda"
    assert [id(t) for t in policy.weights.trained] == [id(p) for p in policy.adapter.parameters()]
    assert {id(t) for t in policy.weights.frozen} == {id(p) for p in policy.model.parameters()}
    moves = []
    monkeypatch.setattr(policy.weights, "upload", lambda: moves.append("up"))
    monkeypatch.setattr(policy.weights, "release", lambda: moves.append("down"))
    with pytest.raises(KeyError), policy.uploaded():
        raise KeyError
    assert moves == ["up", "down"]
    assert make_policy(replace(config, device="cpu", sampler="torch"), tmp_path, adapter=True).weights is None
