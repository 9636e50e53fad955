"""A policy ready to play: model, adapter, chat format and sampler, from a config, a run folder or a model folder."""
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model import lora
from model.checkpoint import load_adapter
from model.qwen import ModelConfig, Qwen
from rl.chat import CompactChat, QwenChat, open_chat
from rl.config import Config, ConfigError, from_json, replace
from rl.episode import Episode
from rl.rollout import new_episodes, rollout
from rl.run import latest_checkpoint, read_settings
from rl.sampler import Sampler, open_sampler
from stl.world import Task


@dataclass
class Policy:
    config: Config
    chat: CompactChat | QwenChat
    model: Qwen
    adapter: lora.Adapter | None
    sampler: Sampler

    def play(self, tasks: list[Task], samples: int, seed: tuple, temperature: float | None = None,
             progress: Callable[[Episode], None] | None = None) -> list[Episode]:
        """`samples` ended episodes of each task, a task's side by side. All luck comes from `seed`, task and sample."""
        self.sampler.temperature = self.config.temperature if temperature is None else temperature
        try:
            return rollout(self.sampler, self.chat, new_episodes(tasks, samples, *seed), self.config, progress)
        finally:
            self.sampler.release()

    def traffic(self) -> dict[str, dict]:
        """What the sampler counted since the last call, for a row of the log; nothing if it does not count."""
        counts = self.sampler.metrics()
        return {"sampler": counts} if counts else {}


def check_machine(config: Config, folder: str | Path | None) -> None:
    """Raise ConfigError if this machine lacks the model `folder` or the GPU."""
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"model = {str(folder)!r}: there is no such folder; download the model there, or say "
                          "--model=FOLDER")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': this machine has no CUDA device; say --device=cpu")


def random_shape(config: Config, vocab_size: int) -> ModelConfig:
    """The network that `config.architecture` describes. Raises ConfigError."""
    try:
        return ModelConfig.from_json(config.architecture | {"vocab_size": vocab_size})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"architecture: {error}") from None


def make_policy(config: Config, folder: str | Path | None = None, adapter: bool = False) -> Policy:
    """The policy with the weights of the model `folder`, or with the random ones that `config` describes if None.

    With `adapter` the weights are frozen and a fresh LoRA is laid on them; without, all weights are trainable.
    """
    check_machine(config, folder)
    if config.threads:
        torch.set_num_threads(config.threads)
    chat = open_chat(config, folder)
    dtype = getattr(torch, config.dtype)
    device = "cpu" if config.sampler == "vllm" else config.device  # the engine starts while the GPU is empty
    if folder:
        model = Qwen.from_folder(folder, dtype=dtype, device=device)
    else:
        model = Qwen.random(random_shape(config, chat.size), config.seed).to(device, dtype)
    model.gradient_checkpointing = config.device == "cuda"  # all layers' activations at 32k tokens fit on no card
    laid = None
    if adapter:
        laid = lora.attach(model, config.lora_rank, config.lora_alpha, config.lora_targets, seed=config.seed)
    sampler = open_sampler(config, model, laid, chat, folder)
    model.to(config.device)
    for p in laid.parameters() if laid else ():
        p.data = p.data.to(config.device)
    return Policy(config, chat, model, laid, sampler)


def load_policy(folder: str | Path, stage: str | None = None, **changes) -> Policy:
    """The policy of a run folder (its newest checkpoint, of `stage` if given) or of a model folder, with some settings
    changed.

    Raises ConfigError or CheckpointError in one line: no such folder, nothing in it yet, or nothing that can be loaded.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a run folder or a model folder")
    if not (folder / "metrics.jsonl").exists() and not (folder / "checkpoints").exists():
        return make_policy(replace(Config(model=str(folder), mix={"L1": 1}, eval_mix={"L1": 1}), **changes), folder)
    config = replace(from_json(read_settings(folder)), **changes)
    last, base = latest_checkpoint(folder, stage), latest_checkpoint(folder, "sft")
    if last is None:
        raise ConfigError(f"{folder}: has no checkpoint yet")
    policy = make_policy(config, base.folder if base else config.model, adapter=last.stage == "grpo")
    if last.stage == "grpo":
        load_adapter(policy.adapter, last.folder)
        policy.sampler.load(last.step)
    return policy
