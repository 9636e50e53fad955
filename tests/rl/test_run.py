"""The run folder: locks, resume, cut files, checkpoints that are complete or not there, episodes to the bit."""
import gzip
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from model.checkpoint import write_safetensors
from rl import run as run_module
from rl.config import Config, from_json
from rl.episode import Episode
from rl.run import (
    Run,
    RunError,
    best_checkpoint,
    latest_checkpoint,
    newest_run,
    read_checkpoint,
    read_rows,
    read_settings,
    run_of,
)
from stl.monitor import check
from stl.world import Task

ROOT = Path(__file__).resolve().parents[2]
TASK = Task.from_json({"id": "t", "workspace": [0, 0, 9, 9], "robot": {"half_width": 0.2, "v_max": 1, "start": [1, 1]},
                       "obstacles": {}, "regions": {"A": [4, 4, 6, 6]}, "spec": ["F[0,20] in(A)"]})


def settings(**changes) -> Config:
    values = {"name": "tiny", "model": "m", "mix": {"L0": 4}, "eval_mix": {"L0": 2}, "keep_checkpoints": 2}
    return Config(**values | changes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_run_records_its_settings_and_versions(tmp_path):
    run = Run.open(settings(), tmp_path)
    assert run.folder == tmp_path / "tiny" and not run.finished and run.latest() is None and run.rows() == []
    assert from_json(read_settings(run.folder)) == settings()
    versions = json.loads((run.folder / "versions.json").read_text())
    assert versions["packages"]["torch"] == torch.__version__ and versions["python"].startswith("3.")


def test_one_process_at_a_time(tmp_path):
    run = Run.open(settings(), tmp_path)
    with pytest.raises(RunError, match="another process"):
        Run.open(settings(), tmp_path)
    run.close()
    Run.open(settings(), tmp_path).close()


def test_resume_takes_the_newest_run_and_new_begins_another(tmp_path):
    folders = []
    for new in (False, False, True, False, True):
        run = Run.open(settings(), tmp_path, new=new)
        folders.append(run.folder.name)
        run.close()
    assert folders == ["tiny", "tiny", "tiny-2", "tiny-2", "tiny-3"]
    (tmp_path / "tiny-other").mkdir()
    assert Run.open(settings(), tmp_path).folder.name == "tiny-3"


def test_names_that_end_in_a_number_are_runs_of_their_own(tmp_path):
    for name, new, folder in (("brk", False, "brk"), ("brk-2", False, "brk-2"), ("brk", False, "brk"),
                              ("brk", True, "brk-3"), ("brk", False, "brk-3"), ("brk-3", False, "brk-3-2"),
                              ("brk-2", True, "brk-2-2"), ("brk-2", False, "brk-2-2")):
        run = Run.open(settings(name=name), tmp_path, new=new)
        assert run.folder.name == folder
        run.close()
    (tmp_path / "brk-3/config.json").write_text("[1]")
    with pytest.raises(RunError, match="brk-3/config.json: cannot be read"):  # rather than the one before
        Run.open(settings(name="brk"), tmp_path)
    (tmp_path / "brk-4").mkdir()
    Run.open(settings(name="brk"), tmp_path, new=True).close()
    assert (tmp_path / "brk-5/config.json").exists() and not any((tmp_path / "brk-4").iterdir())


def test_copies_that_a_user_keeps_are_passed_over(tmp_path):
    run = Run.open(settings(keep_checkpoints=1), tmp_path)
    checkpoint = run.save("grpo", 1, {}, {"step": 1}).folder
    shutil.copytree(checkpoint, kept := checkpoint.with_name("grpo-000001-keep"))
    shutil.copytree(checkpoint, checkpoint.with_name("grpo-best"))
    for name in ("step-000003.jsonl.gz", "step-000003-keep.jsonl.gz", "step-best.jsonl.gz"):
        (run.folder / "episodes" / name).touch()
    run.log({"stage": "eval", "of": "grpo", "step": 2, "temperature": 1.0, "success": 1.0})
    run.save("grpo", 2, {}, {"step": 2})
    assert names(run.folder / "checkpoints") == ["grpo-000001-keep", "grpo-000002", "grpo-best"]
    assert best_checkpoint(run.folder) == run.latest().folder == checkpoint.with_name("grpo-000002")
    run.close()
    Run.open(settings(keep_checkpoints=1, lr=0.5), tmp_path, force=True).close()
    assert names(run.folder / "episodes") == ["step-000003-keep.jsonl.gz", "step-best.jsonl.gz"]
    assert run_of(kept) == run.folder and read_checkpoint(kept).state == {"step": 1}  # it can be measured, too
    assert run_of(checkpoint.with_name("grpo-best")) == checkpoint.with_name("grpo-best")


def test_changed_settings_are_refused_by_name(tmp_path):
    Run.open(settings(), tmp_path).close()
    with pytest.raises(RunError, match=r"samples 8 -> 4, lr 1e-05 -> 0.5"):
        Run.open(settings(lr=0.5, samples=4), tmp_path)
    Run.open(settings(), tmp_path).close()  # the refusal let go of the folder


def test_settings_that_change_no_result_and_those_of_newer_code_are_no_reason_to_refuse(tmp_path):
    Run.open(settings(), tmp_path).close()
    file = tmp_path / "tiny/config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items()
                                if key not in ("env", "teacher_prices")}))
    Run.open(settings(about="the same", price_per_hour=1.5), tmp_path).close()
    assert from_json(read_settings(tmp_path / "tiny")) == settings(about="the same", price_per_hour=1.5)
    with pytest.raises(RunError, match="env .rl.stl_env. -> .examples.countdown.env."):
        Run.open(settings(env="examples.countdown.env", mix={"N2": 2}, eval_mix={"N2": 2}), tmp_path)


def test_force_goes_on_with_new_settings(tmp_path):
    run = Run.open(settings(), tmp_path)
    run.save("grpo", 3, {}, {})
    for step in (3, 4):
        run.write_episodes(step, [])
    run.finish()
    run.close()
    run = Run.open(settings(steps=160), tmp_path, force=True)
    assert not run.finished and read_settings(run.folder)["steps"] == 160
    assert names(run.folder / "episodes") == ["step-000003.jsonl.gz"]  # 4: sampled under the old ones, not learnt
    run.finish()
    run.close()
    assert Run.open(settings(steps=160), tmp_path, force=True).finished  # nothing changed


def test_a_run_folder_that_cannot_be(tmp_path):
    (tmp_path / "tiny").write_text("a file")
    with pytest.raises(RunError, match="cannot make the run folder"):
        Run.open(settings(), tmp_path)
    with pytest.raises(RunError, match="config.json: cannot be read .*No such file"):
        read_settings(tmp_path)
    for text, words in (("[1]", "holds no JSON object"), ("{", "cannot be read .Expecting")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RunError, match=f"config.json: .*{words}"):
            read_settings(tmp_path)


@pytest.mark.parametrize("cut", [b'{"stage": "gr', b"{", b"\x00\x00"])
def test_a_cut_last_line_is_dropped(tmp_path, cut):
    run = Run.open(settings(), tmp_path)
    run.log({"stage": "grpo", "step": 1})
    run.close()
    with open(run.folder / "metrics.jsonl", "ab") as file:
        file.write(cut)
    assert len(read_rows(run.folder)) == 1  # a reader beside the run does not stumble
    run = Run.open(settings(), tmp_path)
    run.log({"stage": "grpo", "step": 2})
    assert [row["step"] for row in run.rows("grpo")] == [1, 2] and run.rows("sft") == []


def test_a_broken_line_inside_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"stage": "sft", "step": 1}\nnonsense\n')
    with pytest.raises(RunError, match="metrics.jsonl"):
        read_rows(tmp_path)
    for line in ("[]", "7", '{"step": 2}', '{"stage": "sft"}', '{"stage": "eval", "step": 2, "of": "sft"}'):
        (tmp_path / "metrics.jsonl").write_text('{"stage": "sft", "step": 1}\n' + line + "\n")
        with pytest.raises(RunError, match="metrics.jsonl: a line is no row of metrics .*; mend or delete it"):
            read_rows(tmp_path)


def test_rewind_drops_what_will_be_done_again(tmp_path):
    run = Run.open(settings(), tmp_path)
    rows = [{"stage": "eval", "step": 0, "of": "sft", "temperature": 1}, *({"stage": "sft", "step": i} for i in (1, 2)),
            {"stage": "eval", "step": 2, "of": "sft", "temperature": 1}, {"stage": "grpo", "step": 1},
            {"stage": "eval", "step": 1, "of": "grpo", "temperature": 1}, {"stage": "grpo", "step": 2}]
    for row in rows:
        run.log(row)
    for stage, step, left in (("grpo", 2, 7), ("grpo", 1, 6), ("sft", 2, 4), ("sft", 1, 2), ("sft", 0, 1)):
        run.rewind(stage, step)
        assert run.rows() == rows[:left]


def test_checkpoints_come_back_to_the_bit_and_old_ones_go(tmp_path):
    run = Run.open(settings(), tmp_path)
    weights = {"b": torch.randn(3, 4), "a": torch.tensor([1e-30, -0.0], dtype=torch.bfloat16)}
    run.save("sft", 7, {"model": weights}, {"data": "x"}, lambda folder: (folder / "vocab.json").write_bytes(b"{}"))
    for step in (9, 10, 11):
        run.save("grpo", step, {"adapter": {"a": torch.full((2,), float(step))}}, {"step": step})
    assert names(run.folder / "checkpoints") == ["grpo-000010", "grpo-000011", "sft-000007"]
    base, last = run.latest("sft"), run.latest()
    assert (last.stage, last.step, last.state) == ("grpo", 11, {"step": 11}) and run.latest("grpo") == last
    assert base.state == {"data": "x"} and (base.folder / "vocab.json").read_bytes() == b"{}"
    loaded = base.tensors("model")
    assert all(torch.equal(loaded[k].view(torch.uint8), weights[k].view(torch.uint8)) for k in weights)
    run.save("grpo", 11, {"adapter": {"a": torch.zeros(2)}}, {"step": 12})  # again: the new one counts
    assert run.latest().state == {"step": 12} and not run.latest().tensors("adapter")["a"].any()


def test_an_interrupted_save_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    run = Run.open(settings(), tmp_path)
    run.save("grpo", 1, {"adapter": {"a": torch.ones(1)}}, {})
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.save("grpo", 2, {"adapter": {"a": torch.ones(1)}}, {})
    assert latest_checkpoint(run.folder).step == 1
    run.close()
    run = Run.open(settings(), tmp_path)
    assert names(run.folder / "checkpoints") == ["grpo-000001"]
    run.save("grpo", 2, {}, {})
    assert run.latest().step == 2


def test_a_file_is_as_before_or_complete(tmp_path, monkeypatch):
    path = tmp_path / "f"
    run_module.write_file(path, b"before")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(RunError, match="disk full"):
        run_module.write_file(path, b"after")
    assert path.read_bytes() == b"before"


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path):
    run = Run.open(settings(keep_checkpoints=1), tmp_path)
    for step, success in enumerate((0.5, 0.8, 0.8, 0.6, 0.7), 1):
        run.save("grpo", step, {}, {})
        run.log({"stage": "eval", "of": "grpo", "step": step, "temperature": 1.0, "success": success})
        run.log({"stage": "eval", "of": "grpo", "step": step, "temperature": 0.0, "success": 1 - success})
    assert names(run.folder / "checkpoints") == ["grpo-000003", "grpo-000005"]
    assert best_checkpoint(run.folder) == run.folder / "checkpoints" / "grpo-000003"
    assert best_checkpoint(run.folder, "sft") is None
    run.log({"stage": "eval", "of": "grpo", "step": 5, "temperature": 0.9, "success": 0.9})
    run.finish()
    assert names(run.folder / "checkpoints") == ["grpo-000005"]


@pytest.mark.parametrize("file, left", [
    ("adapter_model.safetensors", -5), ("trainer/optimizer.safetensors", -5), ("state.json", -5),
    ("adapter_model.safetensors", None), ("trainer/optimizer.safetensors", None)])
def test_a_cut_checkpoint_costs_its_step_only(tmp_path, capsys, file, left):
    """Cut by some bytes, or wholly missing (None)."""
    def damage(path):
        path.unlink() if left is None else path.write_bytes(path.read_bytes()[:left])

    def fill(folder):
        write_safetensors({"a": torch.ones(9)}, folder / "adapter_model.safetensors")

    run = Run.open(settings(), tmp_path)
    for stage, step in (("sft", 9), ("grpo", 1), ("grpo", 2)):
        run.save(stage, step, {"optimizer": {"a": torch.ones(9)}}, {"step": step}, fill)
    run.close()
    damage(run.folder / "checkpoints" / "grpo-000002" / file)
    run = Run.open(settings(lr=0.5), tmp_path, force=True)  # which also looks at the last checkpoint
    assert run.latest().step == 1 and "damaged-grpo-000002" in capsys.readouterr().out
    run.close()
    damage(run.folder / "checkpoints" / "sft-000009" / file)
    with pytest.raises(RunError, match="sft-000009: cannot be read .*--new"):
        Run.open(settings(lr=0.5), tmp_path)


def test_a_checkpoint_that_was_overwritten(tmp_path, capsys):
    """As long as it was, but not what it was; and one that says no sizes."""
    for name, files in (("zeros", None), ("old", {})):
        run = Run.open(settings(name=name), tmp_path)
        for step in (1, 2):
            run.save("sft", step, {"optimizer": {"a": torch.ones(9)}}, {})
        path = run.latest().folder / "trainer/optimizer.safetensors"
        path.write_bytes(bytes(path.stat().st_size))
        if files is not None:
            (run.latest().folder / "state.json").write_text(json.dumps({"files": files}))
        run.close()
        assert Run.open(settings(name=name), tmp_path).latest().step == 1
        assert "damaged-sft-000002" in capsys.readouterr().out


def test_episodes_that_were_cut(tmp_path):
    run = Run.open(settings(), tmp_path)
    episode = Episode(TASK, seed=1)
    episode.end("tokens")
    run.write_episodes(1, [episode])
    packed = run.folder / "episodes" / "step-000001.jsonl.gz"
    assert json.loads(gzip.decompress(packed.read_bytes()))["ending"] == "tokens"
    assert run.read_episodes(1) == [episode]
    whole = packed.read_bytes()
    for line in ("[]", "{}", '"x"', json.dumps({**episode.to_json(), "more": 1}),
                 json.dumps({key: value for key, value in episode.to_json().items() if key != "verdict"})):
        packed.write_bytes(gzip.compress(line.encode()))
        with pytest.raises(RunError, match="step-000001.jsonl.gz: cannot be read .*delete it"):
            run.read_episodes(1)
    packed.write_bytes(whole[:-9])
    with pytest.raises(RunError, match="step-000001.jsonl.gz: cannot be read .*delete it"):
        run.read_episodes(1)


FULL = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
from test_run import settings
from rl import cli
from rl.run import Run

def work():
    run = Run.open(settings(keep_checkpoints=9), ".")
    step = last.step if (last := run.latest()) else 0
    run.rewind("grpo", step)
    while step < {steps}:
        step += 1
        run.log({{"stage": "grpo", "step": step}})
        run.save("grpo", step, {{"optimizer": {{"a": torch.full((30_000,), float(step))}}}}, {{"step": step}})

sys.exit(cli.run_script("train.py", work))
"""


def test_a_full_disk_costs_no_checkpoint(tmp_path):
    """A disk of 1 MB, in a mount namespace of its own, fills up in the middle of a checkpoint; then there is room."""
    def script(steps):
        code = FULL.format(root=str(ROOT), tests=str(Path(__file__).parent), steps=steps)
        return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"

    disk = shlex.quote(str(tmp_path))
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    commands = [f"mount -t tmpfs -o size=1m tmpfs {disk}", f"cd {disk}", script(99), "echo code $?", script(99),
                "echo code $?", "ls tiny/checkpoints", f"mount -o remount,size=9m {disk}", script(12), "echo code $?",
                "ls tiny/checkpoints", "cat tiny/metrics.jsonl"]
    done = subprocess.run(["unshare", "-rm", "sh", "-c", "\n".join(commands)], capture_output=True, text=True)
    first, second = done.stderr.splitlines()
    assert "grpo-00000" in first and all("No space left on device" in line for line in (first, second)), done.stderr
    output = done.stdout.splitlines()
    codes = [line for line in output if line.startswith("code")]
    assert codes == ["code 2", "code 2", "code 0"]
    before = [line for line in output[2:output.index("code 0")] if line.startswith("grpo")]
    assert before and [f"grpo-{i:06d}" for i in range(1, len(before) + 1)] == before
    assert [json.loads(line)["step"] for line in output[-12:]] == list(range(1, 13))
    assert f"grpo-{12:06d}" in output


def test_newest_run(tmp_path):
    assert newest_run(tmp_path) is None and newest_run(tmp_path / "absent") is None
    for age, name in ((300, "b"), (100, "a"), (200, "c"), (0, "no-checkpoint")):
        run = Run.open(settings(name=name), tmp_path)
        if age:
            folder = run.save("sft", 1, {}, {}).folder
            os.utime(folder, (time.time() - age,) * 2)
    assert newest_run(tmp_path) == tmp_path / "a"


@limits(max_examples=20, deadline=None)
@given(logprobs=st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False), max_size=5),
       content=st.text(max_size=20))
def test_episodes_come_back_to_the_bit(tmp_path_factory, logprobs, content):
    run = SimpleNamespace(folder=tmp_path_factory.mktemp("run"))
    (run.folder / "episodes").mkdir()
    run._episodes = lambda step: Run._episodes(run, step)
    episode = Episode(TASK, seed=2**62 + 1, group=3, sample=4, version=5, turns=2)
    episode.messages = [{"role": "assistant", "content": content}]
    episode.append([1, 2])
    episode.append(list(range(len(logprobs))), logprobs)
    episode.end("answer", check(TASK, [[0, 1, 1], [2, 8.9, 9]]))
    cut = Episode(TASK, seed=1)
    cut.end("tokens")
    assert Run.read_episodes(run, 12) is None
    Run.write_episodes(run, 12, [episode, cut])
    assert Run.read_episodes(run, 12) == [episode, cut]


WORKER = """
import sys, torch
from rl.run import Run
sys.path.insert(0, {tests!r})
from test_run import settings
run = Run.open(settings(steps=10**6), {root!r})
last = run.latest()
step = last.step if last else 0
run.rewind("grpo", step)
print("going", flush=True)
while True:
    step += 1
    run.log({{"stage": "grpo", "step": step}})
    run.save("grpo", step, {{"adapter": {{"a": torch.full((1000,), float(step))}}}}, {{"step": step}})
"""


def test_kill_at_any_time_and_go_on(tmp_path):
    code = WORKER.format(tests=str(Path(__file__).parent), root=str(tmp_path))
    reached = 0
    for pause in (0.05, 0.2):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"going\n"
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
        last = latest_checkpoint(tmp_path / "tiny")
        if last:
            assert last.state == {"step": last.step} and (last.tensors("adapter")["a"] == last.step).all()
            assert last.step >= reached
            reached = last.step
        steps = [row["step"] for row in read_rows(tmp_path / "tiny")]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) - reached in (0, 1)
    assert reached > 0
