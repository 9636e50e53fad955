"""sample.py and eval.py as a user meets them: what they print, and one line and exit code 2 for a user's mistake."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import eval as eval_script
import sample as sample_script
from model.checkpoint import save_folder
from rl import cli
from rl.chat import CompactChat
from rl.config import Config
from rl.env import EnvFault
from rl.episode import Episode
from rl.policy import make_policy
from rl.run import Run
from stl.levels import make_task

ROOT = Path(__file__).resolve().parents[1]
TASK = make_task("L0", "eval", 0).to_json()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without runs."""
    monkeypatch.chdir(tmp_path)


def write(path: Path, **changes) -> str:
    data = {key: value for key, value in (TASK | changes).items() if value is not None}
    path.write_text(json.dumps(data))
    return str(path)


def mistake(capsys, main, *argv: str) -> str:
    """What the script says on stderr; checks that it is one line with exit code 2."""
    try:
        code = main(list(argv))
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    return err


@pytest.mark.parametrize("argv, said", [
    (["--policy", "exprt"], "did you mean expert? Or give expert, naive, search, api, a run folder or a model folder"),
    (["--level", "L9"], "the levels are L0, L1"),
    (["--seed", "-1"], "at least 0"),
    (["--seed", "1" * 30], "at least 0"),
    (["--temperature", "nan"], "from 0 to 100"),
    (["--draw", "picture.bmp"], ".png, .svg, .gif"),
    (["--draw", "absent/picture.png"], "in a folder that is there"),
    (["--task", "absent.json"], "absent.json"),
    (["--task", "x.json", "--level", "L1"], "give one of the two"),
    (["--colour"], "unrecognized"),
])
def test_sample_names_the_mistake(capsys, argv, said):
    assert said in mistake(capsys, sample_script.main, *argv)


@pytest.mark.parametrize("argv, said", [
    (["--level", "L0,LX"], "the levels are L0, L1"),
    (["--level", "L0,"], "unknown level ''"),
    (["--tasks", "0"], "at least 1"),
    (["--samples", "two"], "at least 1"),
    (["--json", "absent/x.json"], "in a folder that is there"),
    (["--json", "/proc/x.json"], "--json /proc/x.json: cannot be written"),
    (["--html", "."], "must be a file that may be written"),
    (["--policy", "absent"], "absent"),
    (["--policy", "."], "neither a run folder nor a model folder"),
])
def test_eval_names_the_mistake(capsys, argv, said):
    assert said in mistake(capsys, eval_script.main, *argv)


@pytest.mark.parametrize("changes, said", [
    ({"robot": None}, "robot"),
    ({"robot": {"half_width": -1, "v_max": 1, "start": [1, 1]}}, "robot.half_width"),
    ({"spec": ["F[0,5] in(Z)"]}, "spec[0]"),
    ({"obstacels": {}}, "obstacles"),
    ({"regions": {"A": [0, 0, 0, 1]}}, "regions.A"),
    ({"plan": None}, "no plan"),
    ({"plan": [{"goal": "A"}]}, "the plan cannot be shown"),
])
def test_a_broken_task_file_is_named(capsys, tmp_path, changes, said):
    assert said in mistake(capsys, sample_script.main, "--task", write(tmp_path / "t.json", **changes))


def test_a_file_that_is_no_json(capsys, tmp_path):
    (tmp_path / "t.json").write_bytes(b"\xff\x00{")
    assert "t.json" in mistake(capsys, sample_script.main, "--task", str(tmp_path / "t.json"))


def test_the_expert_is_shown_with_calls_answers_and_verdict(capsys, tmp_path):
    assert sample_script.main(["--level", "L0", "--draw", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    parts = "task L0-eval-0", "Formulas:\n1. ", "plan_path(start=[", "Path found", "<answer>[[", "verdict: solved"
    assert all(part in out for part in parts)
    assert "\x1b" not in out  # colour is for terminals
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_failure_gives_its_reasons(capsys, tmp_path):
    file = write(tmp_path / "t.json", spec=["F[0,1] in(A)", "F[0,99] in(B)"], plan=None, witness=None)
    assert sample_script.main(["--policy", "naive", "--task", file]) == 0
    out = capsys.readouterr().out
    assert "verdict: failed" in out and "fails  F[0,1] in(A)" in out and "holds  F[0,99] in(B)" in out
    assert "never holds within [0,1]" in out


def test_the_search_tells_whether_a_task_can_be_done(capsys, tmp_path):
    file = write(tmp_path / "t.json", plan=None, witness=None)
    assert sample_script.main(["--policy", "search", "--task", file]) == 0
    out = capsys.readouterr().out
    assert "Search: found a path of" in out and "verdict: solved" in out
    file = write(tmp_path / "t.json", spec=["F[0,1] in(A)"], plan=None, witness=None)
    assert sample_script.main(["--policy", "search", "--task", file]) == 0
    out = capsys.readouterr().out
    assert "Search: no path found among" in out and "without an answer to grade: no answer" in out


def test_the_task_of_the_documents_is_solved_by_search_and_has_no_plan(capsys):
    file = str(ROOT / "docs" / "task.json")
    assert sample_script.main(["--policy", "search", "--task", file]) == 0
    assert "verdict: solved" in capsys.readouterr().out
    assert sample_script.main(["--policy", "expert", "--task", file]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "has no plan for the expert to show; give --policy search" in err


@pytest.mark.parametrize("script", [sample_script, eval_script])
def test_it_is_said_that_the_expert_plans_for_want_of_a_run(capsys, script):
    assert script.main(["--level", "L0"] + ["--tasks", "1"] * (script is eval_script)) == 0
    assert capsys.readouterr().err.splitlines()[0] == "no run with a checkpoint in runs/: the expert plans"


def test_a_call_that_could_not_be_read_is_shown_as_it_was_written(capsys):
    episode = Episode(make_task("L0", "eval", 0), seed=0)
    episode.messages = [CompactChat().parse(CompactChat()._encode("<call> plan_path A t_start 01.00 <end>")).message()]
    episode.end("turns")
    sample_script.print_episode(episode)
    assert "\n  plan_path A t_start 01.00\n" in capsys.readouterr().out


@pytest.mark.parametrize("start, word", [([0.1, 5], "workspace"), ([5, 5], "W1")])
def test_a_start_that_cannot_be_right_is_warned_of(capsys, tmp_path, start, word):
    robot = {"half_width": 0.2, "v_max": 1, "start": start}
    file = write(tmp_path / "t.json", robot=robot, obstacles={"W1": [4, 4, 6, 6]}, plan=None, witness=None)
    assert sample_script.main(["--policy", "naive", "--task", file]) == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: no path can be right") and word in err


def test_text_of_a_model_cannot_reach_the_terminal(capsys):
    episode = Episode(make_task("L0", "eval", 0), seed=0)
    arguments = {"plan_path": '{"start": "\\u001b[2J"}', "x\x1b]0;title\x07": "[" * 5000}
    calls = [{"function": {"name": name, "arguments": text}} for name, text in arguments.items()]
    episode.messages = [{"role": "prompt", "content": "P"},
                        {"role": "assistant", "content": "a\x1b[31m\r\u202e\ud800\nb", "tool_calls": calls,
                         "reasoning_content": "Hm\x1b[31m"}]
    episode.end("length")
    sample_script.print_episode(episode)
    out = capsys.readouterr().out
    assert not any(ord(c) < 32 and c != "\n" or c in "\u202e\ud800" for c in out)
    assert "a\\x1b[31m\\r\\u202e\\ud800\n  b" in out and "thinking: Hm\\x1b[31m\n" in out
    assert "without an answer to grade: length" in out


def test_eval_counts(capsys, tmp_path):
    argv = ["--policy", "expert", "--level", "L0,L1", "--tasks", "3", "--samples", "2", "--json", "r.json"]
    assert eval_script.main(argv) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["success"] == 1.0 and result["tasks"] == 6
    assert result["levels"]["L1"]["pass_at"] == {"1": 1.0, "2": 1.0}
    assert [outcome["task"] for outcome in result["outcomes"][:3]] == ["L0-eval-0", "L0-eval-0", "L0-eval-1"]
    assert capsys.readouterr().out.startswith("policy expert\nlevel")


def test_naive_fails_nearly_always(capsys):
    tasks = [make_task(level, "eval", i) for level in ("L0", "L1") for i in range(10)]
    episodes = cli.Scripted("naive").play(tasks, 1)
    assert sum(episode.reward for episode in episodes) <= 4
    assert [episode.group for episode in episodes] == list(range(20))


def test_interrupt_is_one_line(capsys):
    def stop():
        raise KeyboardInterrupt
    assert cli.run_script("eval.py", stop) == 1
    assert capsys.readouterr().err == "\neval.py: interrupted\n"


def test_a_fault_of_a_task_world_is_one_line(capsys):
    def fail():
        raise EnvFault("the task world failed\non all")
    assert cli.run_script("train.py", fail) == 1
    assert capsys.readouterr().err == "train.py: the task world failed on all\n"


def test_faults_of_ours_are_not_dressed_as_mistakes():
    def fault():
        raise ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        cli.run_script("eval.py", fault)


@pytest.fixture
def random_run() -> Path:
    """A run in runs/ whose only checkpoint is an untrained model."""
    shape = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16,
             "num_attention_heads": 1, "num_key_value_heads": 1, "rope_theta": 1000.0, "tie_word_embeddings": False}
    config = Config(name="small", architecture=shape, chat="compact", dtype="float32", device="cpu", steps=0,
                    mix={"L0": 1}, eval_mix={"L0": 3}, max_tokens=400, max_turn_tokens=40, sampler_slots=4)
    made = Run.open(config, "runs")
    policy = make_policy(config)
    made.save("sft", 1, {}, {}, lambda folder: (save_folder(policy.model, folder), policy.chat.save(folder)))
    made.close()
    return made.folder


def test_the_newest_run_is_the_default(capsys, random_run):
    assert sample_script.main([]) == 0
    out = capsys.readouterr().out
    assert "task L0-eval-0, policy runs/small" in out and "verdict: failed" in out
    results = []
    for samples in ("1", "2"):
        assert eval_script.main(["--samples", samples, "--json", "r.json"]) == 0
        results.append(json.loads(Path("r.json").read_text())["outcomes"])
    assert results[0] == results[1][::2]  # a sample's luck does not depend on what is sampled beside it
    assert [outcome["task"] for outcome in results[0]] == ["L0-eval-0", "L0-eval-1", "L0-eval-2"]
    assert "policy runs/small, temperature 1" in capsys.readouterr().out


def test_tasks_that_a_policy_cannot_read(capsys, random_run):
    assert "two decimals" in mistake(capsys, sample_script.main, "--level", "L8")


def test_a_checkpoint_that_is_not_there(capsys, random_run):
    said = mistake(capsys, eval_script.main, "--policy", str(random_run / "checkpoints/sft-000009"))
    assert "no folder 'runs/small/checkpoints/sft-000009'; beside it are sft-000001; give expert," in said


def test_a_run_without_checkpoint(capsys, random_run):
    shutil.rmtree(random_run / "checkpoints")
    assert "no checkpoint" in mistake(capsys, eval_script.main, "--policy", str(random_run))


def test_damaged_settings_are_named(capsys, random_run):
    (random_run / "config.json").write_text("{")
    assert "runs/small/config.json: cannot be read" in mistake(capsys, sample_script.main)


def run(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", ["sample.py", "eval.py"])
def test_help(script):
    done = run(script, "--help")
    assert done.returncode == 0 and "--policy" in done.stdout and f"python {script}" in done.stdout


def test_the_expert_needs_no_torch():
    code = "import sys, sample; code = sample.main(['--policy', 'expert']); sys.exit(code or 'torch' in sys.modules)"
    assert run("-c", code).returncode == 0


def test_bars_in_a_file_are_drawn_twice_a_minute():
    code = "from rl import cli; from tqdm import tqdm; cli.run_script('x', lambda: print(tqdm(total=1).mininterval))"
    assert run("-c", code).stdout == "30\n"


def test_a_closed_pipe_is_no_error():
    code = f"{sys.executable} sample.py --policy expert | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
