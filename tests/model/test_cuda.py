"""What a GPU would refuse in the code that only runs on one: tensors on two devices, dtypes, the kernels' demands."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kind", ["kernels", "plain"])
def test_learner_and_sampler_on_pretended_cuda(kind):
    script = Path(__file__).with_name("pretend_cuda.py")
    done = subprocess.run([sys.executable, str(script), kind], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
