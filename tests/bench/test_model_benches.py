"""The network's benchmarks run, in small; no figure is asserted."""

import subprocess
import sys

import pytest


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpu_bench_runs_on_a_cpu():
    out = run("bench/gpu.py", "--small", "--rank", "4", "--rounds", "1")
    assert out.count("   ok\n") == 2 and "all with gradients: True" in out


def test_gpu_bench_names_the_missing_device():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    done = subprocess.run([sys.executable, "bench/gpu.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no CUDA device" in done.stderr


def test_comparison_with_transformers_and_peft():
    out = run("bench/model.py", "--width", "64", "--rows", "3", "--scale", "512", "--rounds", "1")
    assert out.count("transformers + peft") == 2
