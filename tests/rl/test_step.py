"""One GRPO step of train.py: what is drawn and learnt from, the order of its phases, what it costs."""
import json
from types import SimpleNamespace

import pytest
import torch

import train
from model import budget
from model.qwen import ModelConfig
from rl.config import load_config, replace
from rl.ledger import Clock, Ledger, against_plan, flops
from rl.report import step_line
from rl.rollout import new_episodes
from rl.sampler import make_seed
from rl.tasks import training_tasks

CONFIG = load_config("tiny.py", ["--mix={'L0': 40, 'L1': 40}", "--tasks_per_step=4", "--samples=3", "--max_drawn=14",
                                 "--optimizer_steps=2", "--dynamic_sampling=true"])
SHAPE = ModelConfig.from_json(CONFIG.architecture | {"vocab_size": 50})


class Player:
    """A policy whose groups are mixed with probability `mixed`, decided by the task and the key; it keeps a diary."""

    adapter = weights = None

    def __init__(self, mixed=0.5):
        self.mixed, self.diary, self.model, self.sampler = mixed, [], SimpleNamespace(config=SHAPE), self

    def play(self, tasks, samples, key, progress=None, first=0):
        self.diary.append(f"play {len(tasks) - first}")
        episodes = new_episodes(tasks, samples, *key)[first * samples:]
        for episode in episodes:
            mixed = make_seed(*key, episode.task.id) % 1000 < 1000 * self.mixed
            episode.append([1, 2, 3])
            episode.append([4] * (2 + episode.sample), [-0.5] * (2 + episode.sample))
            episode.end("answer")
            episode.reward = float(mixed and episode.sample == 0)
        return episodes

    def upload(self):
        self.diary.append("upload")

    def release(self):
        self.diary.append("release")

    def load(self, version):
        self.diary.append(f"load {version}")

    def traffic(self):
        return {}


class Pupil:
    """A learner that notes what it is given."""

    def __init__(self, diary):
        self.diary, self.batches, self.firsts = diary, [], []

    def live(self, episodes, gains):
        return [i for i, gain in enumerate(gains) if gain]

    def old_logprobs(self, batch, gains):
        self.diary.append("old")
        return [torch.zeros(e.sampled) for e in batch]

    def grpo_step(self, batch, gains, old, first=False):
        self.diary.append("update")
        self.batches.append((batch, gains, old))
        self.firsts.append(first)
        return {}


class Disk:
    def read_episodes(self, step):
        return None

    def write_episodes(self, step, episodes):
        self.episodes = episodes


def step_of(config, policy, step=1):
    pupil, disk = Pupil(policy.diary), Disk()
    row = train.grpo_step(config, disk, policy, pupil, step, Clock())
    return row, pupil, disk


# which groups


def test_tasks_are_drawn_until_enough_groups_are_mixed():
    row, pupil, disk = step_of(CONFIG, Player(), step=2)
    groups = [disk.episodes[i:i + 3] for i in range(0, len(disk.episodes), 3)]
    drawn = [group[0].task.id for group in groups]
    assert drawn == [task.id for task in training_tasks(CONFIG, 1, CONFIG.max_drawn)][:len(drawn)] and len(drawn) > 4
    assert [group[0].group for group in groups] == list(range(len(groups)))
    mixed = [group[0].task.id for group in groups if group[0].reward]
    learnt = {e.task.id for batch, _, _ in pupil.batches for e in batch}
    assert learnt == set(mixed[:4]), "the first four mixed groups in the order drawn"
    assert sum(row["kept"].values()) == 4 and sum(f["tasks"] for f in row["levels"].values()) == len(drawn)
    assert all(gain for _, gains, _ in pupil.batches for gain in gains)
    assert row["reward"] == pytest.approx(len(mixed) / len(disk.episodes)), "over all that was drawn"


@pytest.mark.parametrize("mixed, drawn, kept", [(0.0, 14, 0), (1.0, 4, 4), (0.1, 14, None)])
def test_the_cap_on_drawn_tasks(mixed, drawn, kept):
    row, pupil, disk = step_of(CONFIG, Player(mixed))
    assert row["tasks"] == drawn and len(disk.episodes) == 3 * drawn
    assert len(pupil.batches) == 2
    found = sum(row["kept"].values())
    assert found == (len({e.group for e in disk.episodes if e.reward}) if kept is None else kept)


def test_a_task_that_comes_again_has_other_luck():
    """Also in a later round of dynamic sampling; the seeds of distinct tasks come from task and sample alone."""
    _, _, disk = step_of(replace(CONFIG, mix={"L0": 3}, max_drawn=14), Player(0.0))
    drawn = [disk.episodes[i:i + 3] for i in range(0, len(disk.episodes), 3)]
    assert len({group[0].task.id for group in drawn}) == 3 and len(drawn) == 14
    assert len({e.seed for e in disk.episodes}) == len(disk.episodes)
    seen = set()
    for group in drawn:
        plain = [make_seed(CONFIG.seed, "grpo", 1, group[0].task.id, sample) for sample in range(3)]
        assert ([e.seed for e in group] == plain) == (group[0].task.id not in seen)
        seen.add(group[0].task.id)


def test_what_a_step_draws_depends_on_seed_and_step_alone():
    first = [e.task.id for e in step_of(CONFIG, Player(), step=3)[2].episodes]
    for step in (1, 2):
        step_of(CONFIG, Player(), step)
    assert [e.task.id for e in step_of(CONFIG, Player(), step=3)[2].episodes] == first
    assert not set(first) & {e.task.id for e in step_of(CONFIG, Player(), step=2)[2].episodes}


def test_without_dynamic_sampling_every_group_counts():
    row, pupil, disk = step_of(replace(CONFIG, dynamic_sampling=False), policy := Player())
    assert len(disk.episodes) == 12 and sum(len(batch) for batch, _, _ in pupil.batches) == 12
    assert "kept" not in row and policy.diary[0] == "play 4" and "play" not in policy.diary[1]


def test_episodes_of_a_broken_grader_are_not_kept():
    """Once it is mended, the same command makes them again."""
    policy, disk = Player(), Disk()
    policy.play = lambda *args, **more: [setattr(e, "ending", "error") or e.messages.append({"content": "it"}) or e
                                         for e in Player.play(policy, *args, **more)]
    with pytest.raises(RuntimeError, match="the task world failed on"):
        train.grpo_step(CONFIG, disk, policy, Pupil([]), 1, Clock())
    assert not hasattr(disk, "episodes")


# the phases


@pytest.mark.parametrize("old_logprobs, recomputed", [("all", 2), ("second", 1), ("sampler", 0)])
def test_the_gpu_changes_hands(old_logprobs, recomputed):
    """The trainer's weights come after sampling, and are gone before the sampler gets the new ones."""
    policy = Player(1.0)
    row, pupil, _ = step_of(replace(CONFIG, old_logprobs=old_logprobs), policy)
    assert policy.diary == ["play 4", "upload", *["old"] * recomputed, "update", "update", "release", "load 1"]
    assert list(row["time"]) == ["sample", "handover", "old_logprobs", "update", "sync"]
    assert pupil.firsts == [True, False]
    olds = [old for _, _, old in pupil.batches]
    assert (olds[0] is None) == (old_logprobs == "second") and olds[1] is not None
    if old_logprobs == "sampler":
        assert all(o.tolist() == [-0.5] * e.sampled for b, _, old in pupil.batches for e, o in zip(b, old, strict=True))


def test_the_line_of_a_step():
    """Figures of the update are means over the optimizer batches that had one."""
    row, _, _ = step_of(CONFIG, Player(1.0))
    row["learner"] = [{"entropy": 0.5, "clip_low": 0.1, "clip_high": 0.2, "mismatch_mean": 1e-3}, {"skipped": 1}]
    assert "turns (answer " in (line := step_line(row))
    assert "entropy 0.500  clipped 0.100/0.200  mismatch 1.0e-03  sample " in line
    row["learner"] = [{"skipped": 1}] * 2
    assert ")  no mixed group, no update  sample " in step_line(row) and "entropy" not in step_line(row)


# what it costs


def test_flops_and_tokens_of_a_step():
    policy = Player(0.5)
    row, pupil, disk = step_of(replace(CONFIG, old_logprobs="second"), policy)

    def forward(episodes):
        return budget.forward_flops(SHAPE, [len(e.ids) for e in episodes], sum(sum(e.mask) for e in episodes))

    batches = [batch for batch, _, _ in pupil.batches]
    assert row["flops"] == {"sample": forward(disk.episodes), "old_logprobs": forward(batches[1]),
                            "update": 2 * (forward(batches[0]) + forward(batches[1]))}
    assert row["sampled"] == sum(e.sampled for e in disk.episodes)
    assert row["trained"] == sum(e.sampled for batch in batches for e in batch)
    assert flops(SHAPE, [], batches, "all")["old_logprobs"] == forward(batches[0]) + forward(batches[1])
    assert flops(SHAPE, [], batches, "sampler")["old_logprobs"] == 0


def test_memory_is_compared_with_the_plan():
    config = load_config("l8.py")
    shape = ModelConfig.from_json(config.architecture)
    planned = budget.plan(shape, config.lora_rank, config.lora_targets, 32768, config.head_chunk, resident=True,
                          kernel=False)["update"]
    whole = (budget.CARD - planned["free"] - budget.CONTEXT) / 2**30
    words = against_plan(config, shape, {"sample": 1, "update": 50 * 2**30})
    assert words == f"GPU memory in GiB, at most, and as planned: update 50.0 ({whole:.1f})"


def test_the_ledger_adds_up_over_processes(tmp_path, monkeypatch):
    clock = iter([0.0, 1800.0, 1800.0, 5400.0, 10_000.0, 10_400.0, 10_900.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    config = replace(CONFIG, price_per_hour=2.0, peak_tflops=2.0)
    row = {"sampled": 70, "trained": 30, "flops": {"sample": 4 * 10**12, "update": 10**13, "old_logprobs": 0}}
    phases = {"sample": 10.0, "update": 20.0, "old_logprobs": 0.0}
    ledger = Ledger(tmp_path, config)
    ledger.enter({}, {"evaluate": 5.0})
    assert ledger.step(row | {"time": phases}).strip() == (
        "70 tokens sampled, 30 trained; of the peak: sample 20% update 25%; the run so far: 0.50 hours, "
        "$1.00 at $2 an hour")
    Ledger(tmp_path, config)  # a process that is killed before it enters anything
    again = Ledger(tmp_path, replace(config, price_per_hour=4.0))
    again.enter({"trained": 5}, {"imitation": 1.0})
    assert json.loads((tmp_path / "cost.json").read_text())["trained"] == 35
    again.enter(row, phases)
    assert json.loads((tmp_path / "cost.json").read_text()) == again.sums == {
        "seconds": 2700.0, "money": 2.0, "sampled": 140, "trained": 65,
        "flops": {"sample": 8 * 10**12, "update": 2 * 10**13, "old_logprobs": 0},
        "phases": {"evaluate": 5.0, "sample": 20.0, "update": 40.0, "old_logprobs": 0.0, "imitation": 1.0}}
