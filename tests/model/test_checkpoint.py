"""Folders: loaded as saved by transformers, exports loaded back by transformers and peft, and clear refusals."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model import checkpoint
from model.checkpoint import CheckpointError, load_adapter, save_adapter, save_folder, write_safetensors
from model.lora import attach
from model.qwen import ModelConfig, Qwen

IDS, CU_SEQLENS = torch.arange(70), torch.tensor([0, 70])


def logits(model):
    with torch.no_grad():
        return model.head(model(IDS, CU_SEQLENS)) if isinstance(model, Qwen) else model(IDS[None]).logits[0]


def adapted(folder, seed=0):
    model = Qwen.from_folder(folder, dtype=torch.float32)
    adapter = attach(model, rank=4, alpha=8)
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter.tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model, adapter


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-wrapped"])
def test_sharded_folder(reference, kind, tmp_path):
    theirs, folder = reference(kind)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    sharded, whole = (Qwen.from_folder(f, torch.float32) for f in (tmp_path, folder))
    assert torch.equal(logits(sharded), logits(whole))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen3.5", "qwen3.5-tied", "qwen3.5-wrapped", "llama"])
@pytest.mark.parametrize("shard", [4 << 30, 50_000])
def test_merged_folder_is_loaded_by_transformers(reference, kind, shard, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard)
    model, adapter = adapted(reference(kind)[1])
    save_folder(model, tmp_path, adapter)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == 50_000)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and theirs.dtype == torch.float32
    assert (logits(theirs) - logits(model)).abs().max() < 1e-4
    again = Qwen.from_folder(tmp_path, torch.float32)
    assert (logits(again) - logits(model)).abs().max() < 1e-4
    assert (logits(again) - logits(Qwen.from_folder(reference(kind)[1], torch.float32))).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5", "qwen3.5-wrapped"])
def test_adapter_folder_is_loaded_by_peft_and_by_us(reference, kind, tmp_path):
    theirs, folder = reference(kind)
    model, adapter = adapted(folder)
    save_adapter(adapter, tmp_path, str(folder))
    loaded = peft.PeftModel.from_pretrained(type(theirs).from_pretrained(folder), tmp_path)
    assert (logits(loaded) - logits(model)).abs().max() < 1e-4
    other, fresh = adapted(folder, seed=1)
    load_adapter(fresh, tmp_path)
    assert torch.equal(logits(other), logits(model))
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert all(("language_model" in name) == ("wrapped" in kind) for name in names)


def test_adapter_that_does_not_fit(reference, tmp_path):
    model, adapter = adapted(reference("qwen3")[1])
    save_adapter(adapter, tmp_path, "base")
    for rank, alpha, message in [(8, 8, "r is 4, but the adapter here has 8"), (4, 4, "lora_alpha is 8")]:
        with pytest.raises(CheckpointError, match=message):
            load_adapter(attach(model, rank, alpha), tmp_path)
    with pytest.raises(CheckpointError, match="adapter tensor layers.0.mlp.down_proj.lora_A.weight is unexpected"):
        load_adapter(attach(model, 4, 8, ["q_proj"]), tmp_path)
    with pytest.raises(CheckpointError, match="there is no adapter_config.json"):
        load_adapter(adapter, tmp_path / "nowhere")


@pytest.mark.parametrize(("extra", "message"), [
    ({}, None), ({"lora_dropout": 0.1, "rank_pattern": {}, "init_lora_weights": "gaussian"}, None),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    ({"use_rslora": True}, "use_rslora True"), ({"use_dora": True}, "use_dora True"),
    ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern {'q_proj': 64}"), ({"rank_pattern": {"q_proj": 2}}, "rank_patt"),
    ({"layers_to_transform": [1]}, r"layers_to_transform \[1\]"), ({"layers_to_transform": 0}, "layers_to_transform 0"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_sa"),
    ({"bias": "all"}, "bias 'all' is not supported, only 'none'"), ({"init_lora_weights": "pissa"}, "changes the mod"),
])
def test_adapters_of_peft_are_computed_as_peft_does_or_refused(reference, tmp_path, extra, message):
    theirs, folder = reference("qwen3")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **extra)
    theirs = peft.get_peft_model(copy.deepcopy(theirs), config).eval()
    for name, p in theirs.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    theirs.save_pretrained(tmp_path)
    model = Qwen.from_folder(folder, torch.float32)
    adapter = attach(model, 4, 8, ["q_proj", "down_proj"])
    before = logits(model)
    if message:
        with pytest.raises(CheckpointError, match=message) as error:
            load_adapter(adapter, tmp_path)
        assert str(error.value).startswith(str(tmp_path)) and torch.equal(logits(model), before)
    else:
        load_adapter(adapter, tmp_path)
        assert (logits(theirs) - logits(model)).abs().max() < 1e-4 < (logits(model) - before).abs().max()


@pytest.mark.parametrize("extra", [{"peft_type": "IA3"}, {"fan_in_fan_out": True}])
def test_adapters_of_other_kinds_are_refused(reference, tmp_path, extra):
    adapter = adapted(reference("qwen3")[1])[1]
    save_adapter(adapter, tmp_path, "base")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | extra))
    with pytest.raises(CheckpointError, match=f"{next(iter(extra))} .* is not supported"):
        load_adapter(adapter, tmp_path)


def edited(folder, tmp_path, config=None, tensors=None):
    """A copy of a folder with changed config.json and tensors; None removes."""
    data = json.loads((folder / "config.json").read_text()) | (config or {})
    weights = load_file(folder / "model.safetensors") | (tensors or {})
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    save_file({k: v for k, v in weights.items() if v is not None}, tmp_path / "model.safetensors")
    return tmp_path


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {Q: None}, f"tensors missing: {Q}$"),
        ({}, {Q.replace("weight", "bias"): torch.zeros(2)}, "tensors that qwen3 does not have: .*q_proj.bias"),
        ({}, {Q: torch.zeros(3, 48)}, rf"{Q} has shape \[3, 48\], but config.json asks for \[64, 48\]"),
        ({"num_hidden_layers": 3, "layer_types": None}, {}, "tensors missing: .* and 8 more"),
        ({"model_type": "mixtral"}, {}, "model_type 'mixtral' is not supported, only qwen3, qwen3_5_text, llama"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, {}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, {}, "rope_type 'linear' is not supported"),
        ({"use_sliding_window": True}, {}, "use_sliding_window True is not supported"),
        ({"attention_bias": True}, {}, "attention_bias True is not supported"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "layer_types must name full_attention or linear"),
        ({"layer_types": ["full_attention"]}, {}, "for each layer; they are .'full_attention'.$"),
        ({"hidden_size": None, "vocab_size": None}, {}, "vocab_size None: must be a whole number from 1"),
        ({"hidden_size": "32"}, {}, "hidden_size '32': must be a whole number from 1"),
        ({"vocab_size": 10**18}, {}, "vocab_size 1000000000000000000: must be"),
        ({"num_attention_heads": 0, "head_dim": None}, {}, "num_attention_heads 0: must be"),
        ({"rope_parameters": {"partial_rotary_factor": 3.0}}, {}, "partial_rotary_factor 3.0"),
        ({"rope_parameters": {"rope_theta": 0}}, {}, "rope_theta 0"),
        ({"num_attention_heads": 3}, {}, "num_attention_heads 3: must be a multiple of num_key_value_heads .2"),
        ({"intermediate_size": -8}, {}, "intermediate_size -8: must be"),
        ({"num_hidden_layers": True, "layer_types": None}, {}, "num_hidden_layers True: must be"),
        ({"rms_norm_eps": "x"}, {}, "rms_norm_eps 'x': must be a number"),
        ({"head_dim": 15}, {}, "head_dim 15: .* an even number"),
        ({"layer_types": ["full_attention", "linear_attention"]}, {}, "linear_num_key_heads 0: must be"),
    ],
)
def test_refusals_name_the_cause_in_one_line(reference, tmp_path, config, tensors, message):
    folder = edited(reference("qwen3")[1], tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        Qwen.from_folder(folder)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)


def test_parts_that_the_decoder_does_not_need_are_passed_over(reference, tmp_path):
    extra = {"mtp.fc.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    folder = edited(reference("qwen3")[1], tmp_path, {}, extra)
    assert torch.equal(logits(Qwen.from_folder(folder)), logits(Qwen.from_folder(reference("qwen3")[1])))


def test_broken_folders(reference, tmp_path):
    with pytest.raises(CheckpointError, match="there is no config.json"):
        Qwen.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a readable JSON file"):
        Qwen.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes((reference("qwen3")[1] / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        Qwen.from_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError):
        Qwen.from_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        Qwen.from_folder(tmp_path)
    for index in ([], {}, {"weight_map": ["x"]}, {"weight_map": None}, {"weight_map": {"a": 5}}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"index.json: (must hold a JSON object|weight_map must name)"):
            Qwen.from_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match="gone.safetensors"):
        Qwen.from_folder(tmp_path)


def test_weights_that_a_file_keeps_are_not_shared_with_it(reference, tmp_path):
    """The model stays as it was when its file is overwritten."""
    folder = edited(reference("qwen3")[1], tmp_path)
    model = Qwen.from_folder(folder, torch.float32)
    before = logits(model)
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(20_000)
        file.write(b"\x7f" * 50_000)
    assert torch.equal(logits(model), before)


def test_a_log_stays_in_float32(reference):
    model = Qwen.from_folder(reference("qwen3.5")[1])
    kinds = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kinds == {"A_log"}


def test_config_survives_its_json():
    config = ModelConfig(11, 8, 8, 4, 2, 1, 4, "qwen3_5_text", eos_token_id=[1, 2], partial_rotary_factor=0.5)
    config = replace(config, layer_types=("linear_attention", "full_attention") * 2, linear_num_key_heads=1,
                     linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=4)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors({"a": torch.arange(6).view(2, 3).T}, path)
    with pytest.raises(AttributeError):
        write_safetensors({"a": None}, path)
    assert torch.equal(load_file(path)["a"], torch.arange(6).view(2, 3).T)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


MEASURE = """
import sys
from bench.logprobs import memory  # imports torch
from model.qwen import Qwen
before = memory("VmRSS")
Qwen.from_folder(sys.argv[1])
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's figures")
def test_loading_holds_no_second_copy(tmp_path):
    """In a fresh process, 1 GB: at most one tensor more than the model, mapped pages of the file counted."""
    config = ModelConfig(65536, 1024, 3072, 28, 8, 4, 128)
    model = Qwen.random(config, dtype=torch.bfloat16)
    save_folder(model, tmp_path)
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    command, root = [sys.executable, "-c", MEASURE, str(tmp_path)], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    print(f"{sum(sizes):,} bytes of weights, {int(done.stdout):,} bytes of extra peak memory")
    assert int(done.stdout) < sum(sizes) + max(sizes) + 50e6
