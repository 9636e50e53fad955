"""train.py as a user runs it: to the end, killed and resumed to the bit, and with mistakes on its command line."""
import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import train
from examples.countdown import env as countdown
from rl import dist, dryrun, plan
from rl.chat import argument_schemas
from rl.config import ConfigError, load_config, replace
from rl.run import Run
from stl.monitor import Verdict

ROOT = Path(__file__).resolve().parent.parent
SMALL = ROOT / "tests" / "small_run.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(folder, *arguments, script=SMALL, timeout=280):
    return subprocess.run([sys.executable, str(script), *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True,
                          text=True, timeout=timeout)


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
        packed = (folder / f"episodes/step-{row['step']:06d}.jsonl.gz").read_bytes()
        episodes = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
        assert len(episodes) == 16 and sum(e["reward"] for e in episodes) / 16 == row["reward"]
        assert sum(stats["tokens"] for stats in row["learner"]) == sum(sum(e["mask"]) for e in episodes)
        assert all(stats["mismatch_max"] < 1e-4 for stats in row["learner"] if stats["steps"])
        assert {e["version"] for e in episodes} == {row["step"] - 1}
    cost, said = json.loads((folder / "cost.json").read_text()), [row for row in rows if row["stage"] == "sft"]
    assert cost["trained"] == sum(row["tokens"] for row in said) + sum(row["trained"] for row in steps)
    assert cost["phases"].keys() > {"imitation", "evaluate", "sample", "update"}
    assert cost["seconds"] > sum(cost["phases"].values())
    assert (folder / "curves.png").stat().st_size > 5000
    assert {path.name for path in (folder / "checkpoints/sft-000012").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "trainer"}
    # vLLM and others read every safetensors file of a model folder as weights
    assert [path.name for path in (folder / "checkpoints/sft-000012").glob("*.safetensors")] == ["model.safetensors"]
    assert (folder / "checkpoints/grpo-000004/adapter_config.json").exists()
    again = run(undisturbed)
    assert again.returncode == 0 and "is finished" in again.stdout and "--steps=N --force goes on" in again.stdout


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_kills_at_random_moments(tmp_path, kills):
    """Weights, optimizer state, episodes and metrics of each run, resumed every time, equal the undisturbed one's."""
    done = run(tmp_path, "--kills", str(kills), timeout=3600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{kills} kills in "), done.stdout


def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path):
    (tmp_path / "numpy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run([sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')",
                           ROOT / "train.py"], env=ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert done.returncode == -signal.SIGINT and not done.stderr


def test_a_spot_machines_warning(undisturbed, tmp_path):
    """SIGTERM in the middle of a step: it ends in order, and the same command comes to the same end."""
    process = subprocess.Popen([sys.executable, str(SMALL)], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    log = tmp_path / "runs/small/metrics.jsonl"
    while process.poll() is None and not (log.exists() and '"stage": "grpo"' in log.read_text()):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=240)[1].replace("\r", "\n")
    kept = sorted(path.name for path in (tmp_path / "runs/small/checkpoints").glob("grpo-*")) or ["sft-000012"]
    stage, _, step = kept[-1].partition("-")
    words = f"\nruns/small: stopped; the same command goes on after {stage} step {int(step)}\n\ntrain.py: interrupted\n"
    assert process.returncode == 1 and said.endswith(words), said  # no bar behind it
    assert not (tmp_path / "runs/small/finished").exists()
    assert run(tmp_path).returncode == 0
    same_as(undisturbed, tmp_path)


@pytest.mark.parametrize("stop, number", [(0.0, signal.SIGTERM), (1.0, signal.SIGINT)],
                         ids=["a warning, stops early", "Ctrl-C, goes the whole way"])
def test_an_end_in_the_imitation_costs_no_step(monkeypatch, tmp_path, stop, number):
    """SIGTERM or Ctrl-C while a step is computed waits for its checkpoint, however long those are apart; while the
    weights are measured it does not wait, and they are measured again."""
    settings = ["--name=small", "--steps=0", "--sft_steps=7", "--sft_tasks=16", "--sft_eval_every=3",
                "--sft_eval_from=6", "--max_turns=1", "--max_turn_tokens=4", '--mix={"L0": 9}', '--eval_mix={"L0": 2}',
                "--checkpoint_seconds=600", f"--sft_stop={stop}"]
    asked, done, warnings = [], [], []
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT)}
    step, evaluate = train.Learner.sft_step, train.evaluate

    def warned(function, what):
        def wrapped(*args):
            done.append(what(*args))
            if warnings and done[-1] == warnings[0]:
                warnings.pop(0)
                signal.raise_signal(number)
            return function(*args)
        return wrapped

    monkeypatch.setattr(train.Learner, "sft_step", warned(step, lambda *_: "step"))
    monkeypatch.setattr(train, "evaluate", warned(evaluate, lambda *args: ("measured", args[5], args[6])))
    monkeypatch.setattr(signal, "alarm", asked.append)

    def go(name):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        done.clear()
        return train.main(settings)

    try:
        assert go("undisturbed") == 0
        whole = list(done)
        assert whole.count("step") == (6 if stop == 0 else 7) and whole.count(("measured", 6, 1.0)) >= 1
        warnings += ["step", ("measured", 6, 1.0)]
        assert go("warned") == 1 and done == ["step"]
        assert [row["step"] for row in metrics(tmp_path / "warned")] == [1]
        assert (tmp_path / "warned/runs/small/checkpoints/sft-000001/state.json").exists()
        assert go("warned") == 1 and done == ["step"] * 5 + [("measured", 6, 1.0)]
        assert asked == [20, 20] * (number == signal.SIGTERM)
        assert go("warned") == 0 and done == whole[6:]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    shutil.rmtree(tmp_path / "warned/runs/small/checkpoints/sft-000001")  # more were kept, of course
    if stop:
        shutil.rmtree(tmp_path / "warned/runs/small/checkpoints/sft-000006")
        shutil.rmtree(tmp_path / "undisturbed/runs/small/checkpoints/sft-000006")
    same_as(tmp_path / "undisturbed", tmp_path / "warned")


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["", "ignored, in a background"])
def test_a_second_ctrl_c_ends_at_once(before):
    was, came = signal.signal(signal.SIGINT, before), []
    try:
        with train.held_back(came):
            signal.raise_signal(signal.SIGINT)
            assert came == [True] * (before != signal.SIG_IGN)
            with pytest.raises(KeyboardInterrupt) if came else contextlib.nullcontext():
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, was)


@pytest.mark.parametrize("engine", ["", "with time_limit(100): "], ids=["trainer", "while the engine works"])
def test_nothing_outlives_the_warning_for_long(tmp_path, engine):
    """A kernel that does not come back is ended by the alarm, here after 1 s instead of 20."""
    script = tmp_path / "stuck.py"
    script.write_text(f"""
import signal, sys, time
sys.path.insert(0, sys.argv[1])
import train
from rl.sampler_vllm import time_limit
alarm, asked = signal.alarm, []
signal.alarm = lambda seconds: (asked.append(seconds), alarm(1))
signal.signal(signal.SIGTERM, train.stop)
try:
    {engine}signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print(asked, flush=True)
    with time_limit(100):  # in which the engine finishes with what it has
        pass
time.sleep(200)
""")
    done = run(tmp_path, str(ROOT), script=script)
    assert done.returncode == -signal.SIGALRM and done.stdout == "[20]\n", done.stderr


def same_as(undisturbed, folder):
    assert metrics(folder) == metrics(undisturbed)
    expected, found = weights(undisturbed), weights(folder)
    assert expected.keys() == found.keys() and expected
    for name, tensor in expected.items():
        assert tensor.equal(found[name]), name


@pytest.mark.parametrize("arguments, words", [
    (["--stepz=3"], ["stepz", "steps"]),
    (["--config", "tinny.py"], ["tinny.py", "tiny.py"]),
    (["--confg", "l8.py"], ["unexpected '--confg' (did you mean --config?)"]),
    (["--confg=l8.py"], ["unexpected '--confg=l8.py' (did you mean --config?)"]),
    (["--lr=fast"], ["lr", "float"]),
    (["--samples=0"], ["train.py: samples = 0: must be above 0"]),
    (['--mix={"L9": 3}'], ["L9", "L"]),
    (["--lora_targets=('q_prj',)"], ["q_prj", "q_proj"]),
    (["--model=nowhere", "--chat=qwen", "--sft_steps=0"], ["nowhere"]),
    (["--optimizer_steps=100"], ["optimizer_steps", "24"]),
    (["steps=3"], ["steps=3", "--KEY=VALUE"]),
    (["--config", "l8.py"], ["Qwen/Qwen3.5-9B", "--model="]),
    (["--plan", "--architecture={'model_type': 'gpt2'}"], ["architecture", "gpt2", "qwen3_5_text"]),
    (["--architecture={'model_type': 'qwen3', 'hidden_size': 32, 'intermediate_size': 32, 'num_hidden_layers': 1, "
      "'num_attention_heads': 0}"], ["architecture", "num_attention_heads 0", "from 1"]),
    (["--sampler=script"], ["sampler = 'script'", "torch, vllm"]),
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
    assert "8,953,803,264 parameters" in done.stdout and "main memory, pinned, for each GPU" in done.stdout
    assert "l8, the network by `architecture` in the settings; Qwen/Qwen3.5-9B was not looked at, as" in done.stdout
    shape = load_config("l8.py").architecture
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 16}))
    half = run(tmp_path, "--config", "l8.py", "--plan", "--model=.", script=ROOT / "train.py")
    assert half.returncode == 0 and "5,494,022,400 parameters" in half.stdout, half.stderr
    assert "l8, the network by ./config.json\n" in half.stdout


def test_the_plan_counts_the_memory_of_all_ranks(monkeypatch):
    config = load_config("l8.py")
    shape, source = plan.shape_of(replace(config, model="", sampler="torch"))
    assert source == "`architecture` in the settings"
    monkeypatch.setattr(plan.os, "sysconf", {"SC_PHYS_PAGES": 10**7, "SC_PAGE_SIZE": 4096}.get)
    assert not any("main memory" in line for line in plan.missing(config, shape)), "24 GB of 41 for one GPU"
    monkeypatch.setattr(dist, "_place", (0, 4))
    assert "main memory: 95 GB are pinned for 4 GPUs, and here are 41" in plan.missing(config, shape)
    asleep = replace(config, sleep_level=1)
    assert "main memory: 180 GB are pinned for 4 GPUs, and here are 41" in plan.missing(asleep, shape)


def test_for_a_cpu_nothing_is_planned(monkeypatch, capsys):
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    assert train.main(["--plan"]) == 0
    said = capsys.readouterr().out
    assert "\n874,368 parameters in float32; for a CPU no memory or time is planned\n" in said
    assert "GiB" not in said and "expected on" not in said and "missing here:" in said


def test_a_second_process_and_changed_settings_are_refused(undisturbed):
    changed = run(undisturbed, "--lr=1e-3")
    assert changed.returncode == 2 and "lr 0.002 -> 0.001" in changed.stderr and "--force" in changed.stderr


def test_fewer_steps_than_were_done_end_the_run(undisturbed, tmp_path):
    shutil.copytree(undisturbed / "runs", tmp_path / "runs")
    done = run(tmp_path, "--steps=2", "--force", timeout=100)
    assert done.returncode == 0 and "done: curves" in done.stdout, done.stderr
    assert [row["step"] for row in metrics(tmp_path) if row["stage"] == "grpo"] == [1, 2, 3, 4]


def test_more_imitation_by_force(monkeypatch, tmp_path, capsys):
    """It goes on from where it ended, unless GRPO has begun on what it came to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    settings = ["--name=small", "--steps=0", "--sft_tasks=16", "--sft_eval_every=0", "--max_turns=1",
                "--max_turn_tokens=4", '--mix={"L0": 9}', '--eval_mix={"L0": 2}']
    for steps, more in ((3, []), (3, []), (5, ["--force"]), (5, []), (4, ["--force"])):
        assert train.main([*settings, f"--sft_steps={steps}", *more]) == 0
    rows = [(row["stage"], row["step"]) for row in metrics(tmp_path)]
    assert rows == [*(("sft", i) for i in (1, 2, 3)), *[("eval", 3)] * 2, ("sft", 4), ("sft", 5), *[("eval", 5)] * 2]
    assert "imitation is over" not in capsys.readouterr().out
    done = Run.open(load_config("tiny.py", [*settings, "--sft_steps=4"]))
    assert done.finished and done.latest().step == 5  # although fewer were asked for at last
    done.save("grpo", 1, {}, {})
    done.close()
    assert train.main([*settings, "--sft_steps=9", "--force"]) == 0
    assert "the imitation is over, as GRPO has begun" in capsys.readouterr().out
    assert [(row["stage"], row["step"]) for row in metrics(tmp_path)] == rows


def test_more_imitation_than_it_was_stopped_at(monkeypatch, tmp_path, capsys):
    """--force with more steps goes on from an early stop, to the next; the same command again does nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    settings = ["--name=small", "--steps=0", "--sft_tasks=16", "--sft_eval_every=2", "--sft_eval_from=1",
                "--sft_stop=0", "--max_turns=1", "--max_turn_tokens=4", '--mix={"L0": 9}', '--eval_mix={"L0": 2}']
    for steps, more, ended in ((6, [], 2), (6, [], 2), (9, ["--force"], 4), (9, [], 4)):
        assert train.main([*settings, f"--sft_steps={steps}", *more]) == 0
        assert [row["step"] for row in metrics(tmp_path) if row["stage"] == "sft"] == list(range(1, ended + 1))


def test_an_adapter_is_needed_to_begin_with_only(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    begun = []
    monkeypatch.setattr(train, "reinforce", lambda config, run, ledger: begun.append(run.latest("grpo").step))
    monkeypatch.setattr(train.report, "curves", lambda *_: None)
    config = load_config("tiny.py", ["--sft_steps=0", "--adapter=gone"])
    with pytest.raises(ConfigError, match="adapter = 'gone'"):
        train.train(config)
    assert not any(tmp_path.iterdir())
    run = Run.open(config)
    run.save("grpo", 7, {}, {})
    run.close()
    train.train(config)
    assert begun == [7]


@pytest.mark.parametrize("stages", [["--steps=0"], ["--sft_steps=0", "--steps=1"]], ids=["imitation", "grpo"])
def test_a_prompt_that_leaves_no_room_is_refused(monkeypatch, tmp_path, capsys, stages):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    settings = ["--name=small", "--sft_steps=1", "--sft_tasks=8", '--mix={"L0": 9}', '--eval_mix={"L0": 2}', *stages]
    assert train.main([*settings, "--max_tokens=30"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "max_tokens = 30: the prompt of task 'L0-eval-0" in said[0], said
    assert int(said[0].partition(" alone has ")[2].split()[0]) > 30 and not any(tmp_path.iterdir())


def test_measuring_leaves_training_unchanged(undisturbed, tmp_path):
    """Neither weights nor rewards depend on whether, and how often, held-out tasks were played in between."""
    assert run(tmp_path, "--eval_every=0", '--eval_mix={"L0": 5}', "--sft_eval_every=5").returncode == 0
    expected, found = weights(undisturbed), weights(tmp_path)
    assert all(expected[name].equal(found[name]) for name in expected) and expected.keys() == found.keys()
    assert [row["reward"] for row in metrics(tmp_path) if row["stage"] == "grpo"] == [
        row["reward"] for row in metrics(undisturbed) if row["stage"] == "grpo"]


def test_the_dry_run_goes_the_whole_way(qwen_folder, tmp_path, monkeypatch, capsys):
    """l8_distilled: Qwen's format over a hybrid network, an adapter to begin with, episodes with every ending."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    assert train.main(["--config", "l8_distilled.py", "--dry-run", f"--model={qwen_folder}"]) == 0
    said = capsys.readouterr().out
    assert "NOT TAKEN" not in said and said.count("  taken: ") == 14, said
    assert "done: curves" not in said and "a large mismatch is expected" in said and "H100 80 GB" not in said
    for words in ("steps 40 -> 3", "sampler 'vllm' -> 'script'", "\nL8 ", "8,953,803,264 parameters", "expected on one",
                  "versions: ", "adapter runs/sft: "):
        assert words in said, said
    assert not any(tmp_path.iterdir())


def test_with_torchrun_one_process_goes_the_dry_way(monkeypatch, capsys):
    """Alone; the plan is for all ranks."""
    went = []
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setattr(train, "dry_run", lambda *_: went.append("dry run"))
    monkeypatch.setattr(train.dist, "start", went.append)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert train.main(["--config", "l8.py", "--dry-run"]) == 0 and "8,953,803,264" in capsys.readouterr().out
    assert went == ["dry run", "cpu", "cpu"]


def test_the_dry_run_of_another_world_that_draws_on(tmp_path, monkeypatch, capsys):
    """Whatever its answers look like; dynamic sampling draws no more tasks than the script has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    config = str(ROOT / "examples/countdown/config.py")
    assert train.main(["--config", config, "--dry-run", "--dynamic_sampling=true"]) == 0
    said = capsys.readouterr().out
    assert "NOT TAKEN" not in said and said.count("  taken: ") == 15 and said.count("2 of 4 groups kept") == 3, said


def test_the_dry_run_of_a_world_without_tools_or_words_for_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    others = [word for word in countdown.WORDS if word not in ("calculate", "expression")]
    monkeypatch.setattr(countdown, "WORDS", others)
    config = str(ROOT / "examples/countdown/config.py")
    assert train.main(["--config", config, "--dry-run", "--tools=false"]) == 0
    assert train.main(["--config", config, "--dry-run"]) == 2 and "WORDS lacks calculate" in capsys.readouterr().err
    monkeypatch.setattr(countdown, "TOOLS", [])
    alone = countdown.demonstrate
    monkeypatch.setattr(countdown, "demonstrate", lambda *args, **named: alone(*args, **named | {"tools": False}))
    argument_schemas.cache_clear()
    try:
        assert train.main(["--config", config, "--dry-run"]) == 0, "no tool, and no answer of one"
    finally:
        argument_schemas.cache_clear()


def test_the_dry_run_checks_the_world_s_expert(tmp_path, monkeypatch, capsys):
    """A world whose grader and expert disagree is told by the name of a task."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setattr(countdown, "grade", lambda task, text: Verdict(False, None, [], "it is never right"))
    assert train.main(["--config", str(ROOT / "examples/countdown/config.py"), "--dry-run"]) == 1
    assert capsys.readouterr().err == ("train.py: examples.countdown.env.demonstrate: the expert's own answer to task "
                                       "N2-rl-0 is not rewarded: it is never right\n")


def test_a_dry_run_that_misses_a_branch_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(dryrun, "EPISODES", (("right",) * 4,) * 4)
    monkeypatch.setattr(dryrun.importlib.util, "find_spec", lambda name: None)  # no vocabulary of Qwen's either
    config = load_config("l8.py", [])
    scaled, chat = dryrun.scale_down(config, tmp_path)
    assert chat.size < 1000 and scaled.mix == {"L0": 16} and scaled.architecture["model_type"] == "qwen3_5_text"
    monkeypatch.chdir(tmp_path)
    train.train(replace(scaled, steps=1))
    taken = dryrun.branches(scaled, chat, tmp_path / "runs/dry-run")
    assert taken["a group that succeeds"] and taken["a right answer"] and taken["a tool's answer"]
    assert not any(taken[name] for name in ("a mixed group", "an optimizer step", "a wrong answer", "evaluation",
                                            "a turn cut by its length", "a checkpoint, and going on from it"))


def test_every_figure_of_the_log_is_explained(undisturbed):
    """docs/metrics.md names each key, but for those of things that are named by others: levels, counts, phases."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = metrics(undisturbed)
    keys = {key for row in rows for part in (row, *row.get("learner", ())) for key in part}
    assert {row["stage"] for row in rows} == {"sft", "grpo", "eval"} and "ratio_max" in keys
    assert not [key for key in keys if f"`{key}`" not in text and not key.startswith("entropy_L")]
