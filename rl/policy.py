"""A policy ready to play: model, adapter, chat format and sampler, from a config, a run folder or a model folder."""
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from model import lora
from model.checkpoint import load_adapter
from model.optim import Weights
from model.qwen import ModelConfig, Qwen
from rl import dist
from rl.chat import CompactChat, QwenChat, open_chat
from rl.config import Config, ConfigError, from_json, replace
from rl.episode import Episode
from rl.hub import fetch
from rl.rollout import new_episodes, rollout
from rl.run import Checkpoint, RunError, latest_checkpoint, read_checkpoint, read_json, read_rows, read_settings, run_of
from rl.sampler import Sampler, open_sampler
from rl.workers import open_workers


@dataclass
class Policy:
    config: Config
    chat: CompactChat | QwenChat
    model: Qwen
    adapter: lora.Adapter | None
    sampler: Sampler
    weights: Weights | None = None  # the trainer's, where they leave the GPU to the sampler
    base: str = ""  # folder or name of what is below the adapter; "": random weights

    def trained(self) -> list[torch.Tensor]:
        """The weights that learn: the adapter's, or without one all."""
        return self.adapter.parameters() if self.adapter else list(self.model.parameters())

    def upload(self) -> None:
        """Put the trainer's weights on its device; nothing to do where they stay there."""
        if self.weights:
            self.weights.upload()

    def release(self) -> None:
        """Leave the device to the sampler; nothing to do where it uses the same weights."""
        if self.weights:
            self.weights.release()

    def close(self) -> None:
        """End the sampler's engine, if it is one: the next stage starts its own, with the whole GPU."""
        if self.weights:
            self.sampler.close()

    @contextmanager
    def uploaded(self) -> Iterator[None]:
        self.upload()
        try:
            yield
        finally:
            self.release()

    def play(self, tasks: list, samples: int, seed: tuple, temperature: float | None = None,
             progress: Callable[[Episode], None] | None = None, first: int = 0) -> list[Episode]:
        """`samples` ended episodes of each task from number `first` on, a task's side by side. All luck comes from
        `seed`, task and sample. With several ranks each plays its share of the tasks and gets the episodes of all."""
        self.sampler.temperature = self.config.temperature if temperature is None else temperature
        try:
            episodes = new_episodes(tasks, samples, *seed)[first * samples:]
            own = [episode for episode in episodes if episode.group % dist.ranks() == dist.rank()]
            played = dist.gather(rollout(self.sampler, self.chat, own, self.config, progress))
            return sorted(played, key=lambda episode: (episode.group, episode.sample))
        finally:
            self.sampler.release()

    def traffic(self) -> dict[str, dict]:
        """What the samplers of all ranks counted since the last call, for a row of the log; {} if they do not count."""
        total = Counter()
        for counts in dist.gather([self.sampler.metrics()]):
            total.update(counts)
        return {"sampler": dict(total)} if total else {}


def check_machine(config: Config, folder: str | Path | None) -> Path | None:
    """The model's local `folder`, fetched if it is a name on the hub. Raises ConfigError if this machine lacks the
    model, the adapter to start from, or the GPU, or if there is no such network as config.architecture."""
    if config.adapter:
        adapter_folder(config)
    if not folder:
        random_shape(config, vocab_size=1)
    if config.device == "cuda" and not torch.cuda.is_available():
        name = f"; model = {str(folder)!r} is not fetched" * bool(folder and not Path(folder).is_dir())
        raise ConfigError(f"device = 'cuda': this machine has no CUDA device{name}; say --device=cpu, and "
                          "--model=FOLDER for a model on the disk")
    return fetch(folder) if folder else None


def check_prompts(config: Config, chat: CompactChat | QwenChat, tasks: list) -> None:
    """ConfigError if a task's prompt leaves no room for a turn: all of its episodes would end before they begin."""
    for task in tasks:
        if (tokens := len(chat.prompt(task))) >= config.max_tokens:
            raise ConfigError(f"max_tokens = {config.max_tokens}: the prompt of task {task.id!r} alone has {tokens} "
                              "tokens; give more, for the answer too")


def adapter_folder(config: Config) -> Path:
    """The folder in PEFT's format that config.adapter names: itself, or the newest checkpoint of a run folder whose
    imitation is over. Raises ConfigError."""
    folder = Path(config.adapter)
    if (folder / "checkpoints").is_dir() and (last := latest_checkpoint(folder)):
        ended = {"of": "sft", "step": last.step, "temperature": 0.0}.items()  # measured so at its end alone
        if last.stage == "sft" and not any(ended <= row.items() for row in read_rows(folder, "eval")):
            raise ConfigError(f"adapter = {config.adapter!r}: its imitation is not over, only at step {last.step}; let "
                              f"it end, or say --adapter={last.folder}")
        folder = last.folder
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"adapter = {config.adapter!r}: neither an adapter's folder in PEFT's format nor a run "
                          "folder with a checkpoint of one; train it first, or say --adapter=FOLDER")
    return folder


def random_shape(config: Config, vocab_size: int) -> ModelConfig:
    """The network that `config.architecture` describes. Raises ConfigError."""
    try:
        return ModelConfig.from_json(config.architecture | {"vocab_size": vocab_size})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"architecture: {error}") from None


def make_policy(config: Config, folder: str | Path | None = None, adapter: bool = False) -> Policy:
    """The policy with the weights of the model `folder`, or with the random ones that `config` describes if None.

    With `adapter` the weights are frozen and a LoRA is laid on them, a fresh one or config.adapter's; without, all
    weights are trainable. With vLLM the trainer's weights are in CPU memory until upload().
    """
    base, folder = str(folder or ""), check_machine(config, folder)
    open_workers(config.tool_workers, config.tool_seconds)  # before CUDA starts
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
        try:
            laid = lora.attach(model, config.lora_rank, config.lora_alpha, config.lora_targets, seed=config.seed)
        except ValueError as error:  # the model has none of these layers
            raise ConfigError(str(error)) from None
        if config.adapter:
            load_adapter(laid, adapter_folder(config))
    sampler = open_sampler(config, model, laid, chat, folder)
    weights = Weights(model, laid.parameters() if laid else [], config.device) if config.sampler == "vllm" else None
    return Policy(config, chat, model, laid, sampler, weights, base)


def resume_policy(config: Config, base: Checkpoint | None, last: Checkpoint | None, adapter: bool = False) -> Policy:
    """The policy of a run: config.model, or what its supervised stage made of it (`base`: a model, or an adapter), with
    the adapter of its newest checkpoint `last`. With `adapter` there is one in any case. RunError if the model that the
    supervised stage made is gone."""
    folder = config.model or None
    for checkpoint in filter(None, (base, last)):
        if (checkpoint.folder / "adapter_config.json").exists():
            config, adapter = replace(config, adapter=str(checkpoint.folder)), True
        else:
            folder = checkpoint.folder
    if last and not config.model and (last.folder / "adapter_config.json").exists():
        learnt_on = Path(read_json(last.folder / "adapter_config.json").get("base_model_name_or_path") or "").name
        if learnt_on != (folder.name if folder else ""):
            raise RunError(f"{last.folder.with_name(learnt_on)}: is not there, and {last.folder.name} was learnt on it;"
                           " bring it back, or train anew with --new")
    policy = make_policy(config, folder, adapter)
    if last:
        policy.sampler.load(last.step)
    return policy


def load_policy(folder: str | Path, stage: str | None = None, **changes) -> Policy:
    """The policy of a run folder (its newest checkpoint, of `stage` if given), of one of its checkpoints or of a model
    folder, with some settings changed.

    Raises ConfigError or CheckpointError in one line: no such folder, nothing in it yet, or nothing that can be loaded.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a run folder or a model folder")
    run = run_of(folder)
    if not (run / "metrics.jsonl").exists() and not (run / "checkpoints").exists():
        return make_policy(replace(Config(model=str(folder), mix={"L1": 1}, eval_mix={"L1": 1}), **changes), folder)
    config = replace(from_json(read_settings(run)), **changes)
    last = latest_checkpoint(run, stage) if run == folder else read_checkpoint(folder)
    if last is None:
        raise ConfigError(f"{folder}: has no checkpoint yet")
    return resume_policy(config, latest_checkpoint(run, "sft"), last)
