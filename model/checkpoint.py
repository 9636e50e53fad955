"""Hugging Face folders in and out: models (config.json, safetensors, sharded or not) and adapters in PEFT's format.

Every file is written under a temporary name, flushed to the disk and renamed: a reader sees all of it or nothing.
"""

import json
import os
from collections.abc import Iterator
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


class CheckpointError(ValueError):
    """A folder that cannot be loaded, with the reason in one line."""


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    _settle(temporary, path)


def write_safetensors(tensors: dict[str, Tensor], path: str | Path) -> None:
    """Write a whole safetensors file or nothing. The tensors may lie anywhere and be views."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary, {"format": "pt"})
    _settle(temporary, path)


def _settle(temporary: Path, path: Path) -> None:
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


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


def _files(folder: Path) -> list[Path]:
    """The weight files of a folder."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if not (folder / "model.safetensors.index.json").exists():
        raise CheckpointError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    names = _read_json(folder / "model.safetensors.index.json").get("weight_map", {})
    missing = sorted({name for name in names.values() if not (folder / name).exists()})
    if missing:
        raise CheckpointError(f"{folder}: {missing[0]} is named in the index but is not there")
    return [folder / name for name in sorted(set(names.values()))]


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
    config, files = read_config(folder), _files(folder)
    try:
        shapes = dict(item for file in files for item in _shapes(file))
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if len(found := [p for p in PREFIXES if p + "embed_tokens.weight" in shapes]) == 1:
        config = replace(config, prefix=found[0])
    with torch.device("meta"):
        model = Qwen(config)
    wanted = {config.full_name(name): name for name, _ in model.named_parameters()}
    _compare(folder, shapes, {full: list(model.get_parameter(name).shape) for full, name in wanted.items()}, config)
    for file in files:
        with safe_open(file, "pt") as tensors:
            for full in wanted.keys() & set(tensors.keys()):
                module, _, leaf = wanted[full].rpartition(".")
                kind = torch.float32 if leaf == "A_log" else dtype
                fresh = tensors.get_tensor(full).to(device, kind, copy=True)  # the file's own memory is only mapped
                setattr(model.get_submodule(module), leaf, nn.Parameter(fresh))
    return model


def _shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a dict)
            yield name, tensors.get_slice(name).get_shape()


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
        part = {"model." + n.removeprefix(model.config.prefix): t for n, t in (next(tensors) for _ in shard)}
        part = {("lm_head.weight" if n == "model.lm_head.weight" else n): t for n, t in part.items()}
        write_safetensors(part, folder / file)
        index |= dict.fromkeys(part, file)
    if len(names) > 1:
        total = sum(p.numel() for p in model.parameters()) * dtype.itemsize
        _write_json({"metadata": {"total_size": total}, "weight_map": index}, folder / "model.safetensors.index.json")
    _write_json(model.config.to_json() | {"dtype": str(dtype).removeprefix("torch.")}, folder / "config.json")


def _write_json(data: dict, path: Path) -> None:
    write_bytes(path, (json.dumps(data, indent=2) + "\n").encode())


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
    """Fill the adapter from a folder in PEFT's format. CheckpointError if rank, alpha, names or shapes differ."""
    folder = Path(path)
    config = _read_json(folder / "adapter_config.json")
    for key, own in (("r", adapter.rank), ("lora_alpha", adapter.alpha)):
        if config.get(key) != own:
            raise CheckpointError(f"{folder}: {key} is {config.get(key)}, but the adapter here has {own}")
    start = "base_model.model." + adapter.prefix
    try:
        stored = load_file(folder / "adapter_model.safetensors")
        adapter.load({name.removeprefix(start): tensor for name, tensor in stored.items()})
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
