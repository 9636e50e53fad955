"""What a training run takes, before it begins: memory by phase, time and money, and what this machine lacks for it."""
import importlib.util
import json
import os
import shutil
from pathlib import Path

import torch

from model import budget
from model.checkpoint import read_config
from model.qwen import ModelConfig
from rl import dist
from rl.chat import open_chat
from rl.config import Config
from rl.policy import random_shape
from rl.run import versions

# What the expected time rests on, for the 9B on one H100; the post says the first two, and a run measures all of them
LENGTHS = {False: 7_400, True: 12_700}  # tokens of an episode, without and with thinking
POST = {"sample": 0.61, "old_logprobs": 0.09, "update": 0.28, "sync and checkpoint": 0.02}  # shares of a step's time
SAMPLED, SPEED, PEAK_SHARE, LIVE = 0.5, 1500, 0.3, 0.75  # of its tokens; tokens a second; of the card; of the episodes


def shape_of(config: Config) -> tuple[ModelConfig, str]:
    """The numbers of the network to be trained, and where they come from. Neither weights nor a GPU are asked for."""
    if config.architecture is None or config.model and (Path(config.model) / "config.json").is_file():
        return read_config(config.model), f"{config.model}/config.json"
    size = config.architecture.get("vocab_size") or open_chat(config).size
    unseen = f"; {config.model} was not looked at, as no folder of that name is here" if config.model else ""
    return random_shape(config, size), f"`architecture` in the settings{unseen}"


def show_plan(config: Config) -> None:
    """Print the memory of a GRPO step phase by phase, the expected time and cost, versions, and what is missing."""
    (shape, source), tokens = shape_of(config), max(config.max_tokens, config.micro_tokens)
    print(f"{config.name}, the network by {source}")
    if config.device == "cpu":
        print(f"{budget.parameters(shape):,} parameters in {config.dtype}; for a CPU no memory or time is planned")
    else:
        print(budget.table(shape, config.lora_rank, config.lora_targets, tokens, config.max_tokens, config.head_chunk,
                           config.gpu_memory, asleep=config.sleep_level == 1))
        print("\n".join(["", *prospects(config, shape)]))
    print("\n".join(["", f"versions: {json.dumps(versions())}", "missing here:",
                     *(f"  {line}" for line in missing(config, shape) or ["nothing"])]))


def prospects(config: Config, shape: ModelConfig) -> list[str]:
    """Expected time and cost of the GRPO steps on one H100, with all that the figures assume."""
    if not config.steps:
        return ["no time is foretold: the assumptions are about GRPO"]
    n, length = config.tasks_per_step * config.samples, LENGTHS[config.thinking]
    forward, peak = budget.forward_flops(shape, [length] * n, int(n * length * SAMPLED)), config.peak_tflops or 989
    learnt = forward * LIVE / (peak * 1e12 * PEAK_SHARE)  # seconds of one pass
    passes = {"all": 1.0, "second": 1 - 1 / config.optimizer_steps, "sampler": 0.0}[config.old_logprobs]
    seconds = {"sample": n * length * SAMPLED / SPEED, "old_logprobs": passes * learnt, "update": 3 * learnt}
    seconds["sync and checkpoint"] = 0.02 * sum(seconds.values())
    step, measured = sum(seconds.values()), sum(config.eval_mix.values()) * length * SAMPLED / SPEED
    times = 2 + (config.steps // config.eval_every if config.eval_every else 0)
    hours, price = (config.steps * step + times * measured) / 3600, config.price_per_hour
    cost = f"${0.8 * hours:,.0f}-{2 * hours:,.0f} at $0.8-2"
    if price:
        cost = f"${hours * price:,.0f} at ${price:g} an hour"
    shares = [f"{name} {value:,.0f} s ({value / step:.0%}; in the post {POST[name]:.0%})"
              for name, value in seconds.items()]
    return [f"expected on one H100: a step {step / 60:.0f} min: {', '.join(shares)}",
            f"  {config.steps} steps and {times} measurements of {measured / 60:.0f} min: {hours:.0f} hours, {cost}",
            f"  assumed: {length:,} tokens an episode (the post's median), {SAMPLED:.0%} of them sampled, {SPEED:,} a "
            f"second; {LIVE:.0%} of the episodes learnt from, at {PEAK_SHARE:.0%} of {peak:g} TFLOPS, three passes an "
            "update; no interruptions"]


def missing(config: Config, shape: ModelConfig) -> list[str]:
    """What the real run needs and this machine does not have, each with the remedy."""
    def absent(*names: str) -> list[str]:
        return [name for name in names if importlib.util.find_spec(name) is None]

    lines = [f"package {name}: pip install -r requirements.txt" for name in absent("transformers", "matplotlib")]
    if config.device == "cuda":
        lines += [f"package {name}: pip install -r requirements-gpu.txt" for name in absent("fla")]
        if not torch.cuda.is_available():
            lines.append("a CUDA device: run it where `nvidia-smi` shows one of 80 GB")
        sizes = budget.host(shape, config.lora_rank, config.lora_targets, asleep=config.sleep_level == 1)
        pinned = sum(sizes.values()) * dist.ranks()
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if memory < pinned:
            lines.append(f"main memory: {pinned / 1e9:.0f} GB are pinned for {dist.ranks()} GPU"
                         f"{'s' * (dist.ranks() > 1)}, and here are {memory / 1e9:.0f}")
    if config.sampler == "vllm":
        lines += [f"package {name}: pip install -r requirements-gpu.txt" for name in absent("vllm")]
    if config.model and not Path(config.model).is_dir():
        size, free = 2 * budget.parameters(shape) / 1e9, shutil.disk_usage(".").free / 1e9
        lines.append(f"model {config.model}, {size:.0f} GB (free here: {free:.0f}), unless it is in the cache: the run "
                     f"fetches it, or `hf download {config.model}`")
    if config.adapter and not Path(config.adapter).is_dir():
        lines.append(f"adapter {config.adapter}: python train.py --config sft.py, or --adapter=FOLDER")
    return lines
