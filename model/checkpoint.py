"""Hugging Face folders in and out: models (config.json, safetensors, sharded or not) and adapters in PEFT's format.

Every file is written under a temporary name, flushed to the disk and renamed: a reader sees all of it or nothing.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model.lora import Adapter, merged
from model.qwen import ModelConfig, Qwen

SHARD_BYTES = 4 << 30
# Parts of a checkpoint that the text decoder has no use for: the vision tower, multi-token prediction, rotary tables.
IGNORED = ("model.visual.", "visual.", "mtp.")
PREFIXES = ("model.", "model.language_model.")
# Fields of an adapter_config.json that would make another adapter than the one computed here, unless they are empty or
# have the value given here.
PLAIN = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys((
    "use_rslora", "use_dora", "use_qalora", "alpha_pattern", "rank_pattern", "fan_in_fan_out", "layers_to_transform",
    "layer_replication", "modules_to_save", "lora_bias", "trainable_token_indices", "target_parameters",
    "alora_invocation_tokens", "kasa_config", "monteclora_config", "use_bdlora"))
BASE_CHANGES = ("pissa", "olora", "corda", "loftq")  # ways to begin an adapter that change the weights below it


class CheckpointError(ValueError):
    """A folder that cannot be loaded, with the reason in one line."""


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary name to write to; what was written is then flushed and takes the name `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    yield temporary
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_safetensors(tensors: dict[str, Tensor], path: str | Path) -> None:
    """Write a whole safetensors file or nothing. The tensors may lie anywhere and be views."""
    with _whole(Path(path)) as temporary:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary, {"format": "pt"})


def _write_json(data: dict, path: Path) -> None:
    with _whole(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: there is no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return data


def _contents(folder: Path) -> dict[str, tuple[Path, list[int]]]:
    """File and shape of each tensor of a model folder."""
    files, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    if not files[0].is_file():
        if not index.exists():
            raise CheckpointError(f"{folder}: neither {files[0].name} nor {index.name} is there")
        try:
            files = [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
        except (LookupError, AttributeError, TypeError):
            raise CheckpointError(f"{index}: weight_map must name the file of each tensor") from None
    contents = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: is named in the index but is not there")
        try:
            with safe_open(file, "pt") as tensors:
                contents |= {n: (file, tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: {error}") from None
    return contents


def _some(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def read_config(path: str | Path) -> ModelConfig:
    """What config.json in a Hugging Face folder says. CheckpointError names what is not supported."""
    data = _read_json(Path(path) / "config.json")
    try:
        return ModelConfig.from_json(data)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def load_folder(path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> Qwen:
    """A Qwen from a Hugging Face folder; tensors are read, converted and placed one by one.

    A_log stays in float32, as it enters an exponential. CheckpointError names missing and unexpected tensors, wrong
    shapes and unsupported fields of config.json."""
    folder = Path(path)
    config, contents = read_config(folder), _contents(folder)
    if len(found := [p for p in PREFIXES if p + "embed_tokens.weight" in contents]) == 1:
        config = replace(config, prefix=found[0])
    with torch.device("meta"):
        model = Qwen(config)
    wanted = {config.full_name(name): name for name, _ in model.named_parameters()}
    shapes = {full: list(model.get_parameter(name).shape) for full, name in wanted.items()}
    _compare(folder, {full: shape for full, (_, shape) in contents.items()}, shapes, config)
    for full, name in wanted.items():
        module, _, leaf = name.rpartition(".")
        kind = torch.float32 if leaf == "A_log" else dtype
        with safe_open(contents[full][0], "pt") as tensors:  # opened for each: till closed, what was read stays mapped
            fresh = tensors.get_tensor(full).to(device, kind, copy=True)
        setattr(model.get_submodule(module), leaf, nn.Parameter(fresh))
    return model


def _compare(folder: Path, found: dict, wanted: dict, config: ModelConfig) -> None:
    if missing := wanted.keys() - found.keys():
        raise CheckpointError(f"{folder}: tensors missing: {_some(missing)}")
    ignored = {n for n in found if n.startswith(IGNORED) or n.endswith("rotary_emb.inv_freq")}
    ignored |= {"lm_head.weight"} if config.tie_word_embeddings else set()
    if extra := found.keys() - wanted.keys() - ignored:
        raise CheckpointError(f"{folder}: tensors that {config.model_type} does not have: {_some(extra)}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(f"{folder}: {name} has shape {found[name]}, but config.json asks for {shape}")


def save_folder(
    model: Qwen, path: str | Path, adapter: Adapter | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the text model, with the adapter merged in if one is given, as a folder that transformers loads.

    `dtype` None keeps the model's. Large models are written shard by shard, so that one shard is held at a time."""
    folder, dtype = Path(path), dtype or model.embed_tokens.weight.dtype
    text = replace(model.config, prefix="model.")
    folder.mkdir(parents=True, exist_ok=True)
    shards, size = [[]], 0
    for name, p in model.named_parameters():
        size += p.numel() * dtype.itemsize
        if size > SHARD_BYTES and shards[-1]:
            shards, size = [*shards, []], p.numel() * dtype.itemsize
        shards[-1].append(name)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    tensors, index = merged(model, adapter, dtype), {}
    for shard, file in zip(shards, names if len(names) > 1 else ["model.safetensors"], strict=True):
        part = {text.full_name(name): tensor for name, (_, tensor) in zip(shard, tensors, strict=False)}
        write_safetensors(part, folder / file)
        index |= dict.fromkeys(part, file)
    if len(names) > 1:
        total = sum(p.numel() for p in model.parameters()) * dtype.itemsize
        _write_json({"metadata": {"total_size": total}, "weight_map": index}, folder / "model.safetensors.index.json")
    _write_json(text.to_json() | {"dtype": str(dtype).removeprefix("torch.")}, folder / "config.json")


def save_adapter(adapter: Adapter, path: str | Path, base_name: str, dtype: torch.dtype = torch.float32) -> None:
    """Write a folder in PEFT's format, for peft and vLLM. `base_name`: the folder or name of the base model."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{adapter.prefix}{n}": t.to(dtype) for n, t in adapter.tensors().items()}
    write_safetensors(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name, "r": adapter.rank}
    config |= {"lora_alpha": adapter.alpha, "lora_dropout": 0.0, "bias": "none", "inference_mode": True}
    kinds = sorted({name.rpartition(".")[2] for name in adapter.terms})
    _write_json(config | {"target_modules": kinds}, folder / "adapter_config.json")


def load_adapter(adapter: Adapter, path: str | Path) -> None:
    """Fill the adapter from a folder in PEFT's format. CheckpointError if rank, alpha, names or shapes differ, or if it
    is of a form that is not computed here."""
    folder = Path(path)
    config = _read_json(folder / "adapter_config.json")
    for key, only in PLAIN.items():
        if (value := config.get(key)) is not False and value not in (None, "", [], {}, only):  # 0 is a layer's number
            raise CheckpointError(f"{folder}: {key} {value!r} is not supported" + f", only {only!r}" * bool(only))
    if str(begun := config.get("init_lora_weights")).startswith(BASE_CHANGES):
        raise CheckpointError(f"{folder}: init_lora_weights {begun!r} is not supported, as it changes the model too")
    for key, own in (("r", adapter.rank), ("lora_alpha", adapter.alpha)):
        if config.get(key) != own:
            raise CheckpointError(f"{folder}: {key} is {config.get(key)}, but the adapter here has {own}")
    start = "base_model.model." + adapter.prefix
    try:
        stored = load_file(folder / "adapter_model.safetensors")
        adapter.load({name.removeprefix(start): tensor for name, tensor in stored.items()})
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
