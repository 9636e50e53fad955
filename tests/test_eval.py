"""eval.py on a model folder with an adapter of another shape, and the ladder against the published table."""
import json

import pytest
import torch

import eval as eval_script
from model import lora
from model.checkpoint import save_adapter, save_folder
from model.qwen import ModelConfig, Qwen
from rl import cli
from rl.episode import Episode
from rl.report import breakdown, summarize, table
from stl.levels import make_task
from stl.monitor import Verdict

SHAPE = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16,
         "num_attention_heads": 1, "num_key_value_heads": 1, "rope_theta": 1000.0, "tie_word_embeddings": False}
QUICK = ["--level", "L1", "--tasks", "1", "--max_turn_tokens=4", "--max_tokens=8192", "--sampler_slots=2",
         "--dtype=float32"]


@pytest.fixture
def model(qwen_folder, tmp_path, monkeypatch):
    """A model folder, and in it the folder `adapter`; the working folder has no runs."""
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    network = Qwen.random(ModelConfig.from_json(SHAPE | {"vocab_size": len(tokenizer)}))
    torch.nn.init.normal_(network.lm_head.weight)
    save_folder(network, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    laid = lora.attach(network, rank=3, alpha=5.0, targets=("q_proj", "down_proj"), seed=1)
    for term in laid.terms.values():
        torch.nn.init.normal_(term.b)
    save_adapter(laid, tmp_path / "model" / "adapter", "")
    return laid


def outcomes(*argv: str) -> dict:
    assert eval_script.main(["--model", "model", *QUICK, "--json", "r.json", *argv]) == 0
    with open("r.json") as file:
        return json.load(file)


def test_a_model_folder_is_measured_with_any_adapter(model, capsys):
    plain = outcomes("--tools", "off", "--samples", "2")
    assert plain["tools"] is False and plain["adapter"] is None and plain["histogram"] == [1, 0, 0]
    printed = capsys.readouterr().out
    assert "policy model, temperature 1, without tools" in printed and "groups by successes 0, 1, 2" in printed
    assert plain["outcomes"] == outcomes("--tools", "off", "--samples", "2")["outcomes"]

    args = cli.Parser("eval.py", "")
    for flag in ("--policy", "--model", "--adapter", "--tools", "--sampler"):
        args.add_argument(flag)
    opened = cli.open_model(args.parse(["--model", "model", "--adapter", "model/adapter", *QUICK[4:]]))
    assert opened.config.tools and opened.config.max_turn_tokens == 4 and opened.config.max_turns == 40
    assert (opened.adapter.rank, opened.adapter.alpha) == (3, 5.0)
    stored = model.tensors()
    assert stored.keys() == opened.adapter.tensors().keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in opened.adapter.tensors().items())


@pytest.mark.parametrize("argv, said", [
    (["--model", "absent/model"], "absent/model"),
    (["--model", "model", "--adapter", "absent"], "neither an adapter's folder"),
    (["--model", "model", "--policy", "expert"], "in place of --policy"),
    (["--adapter", "model/adapter"], "in place of --policy"),
    (["--policy", "expert", "--tools", "off"], "not for expert"),
    (["--policy", "expert", "--max_tokens=100"], "unrecognized"),
    (["--model", "model", "--max_token=100"], "did you mean max_tokens"),
    (["--model", "model", *QUICK, "--max_tokens=16"], "max_tokens = 16: the prompt of task 'L1-eval-0' alone has"),
])
def test_mistakes_are_named(model, capsys, monkeypatch, argv, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        code = eval_script.main(argv)
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1, error


def test_the_ladder_is_that_of_the_published_table():
    """L8 in the first five steps: 0.33 of the samples succeed, of 79 groups 0.30 fail, 0.62 are mixed, 0.08 succeed."""
    task, episodes, group = make_task("L8", "eval", 0), [], 0
    for successes, groups in enumerate((24, 14, 8, 10, 1, 3, 8, 5, 6)):
        for _ in range(groups):
            for sample in range(8):
                episodes.append(Episode(task, 0, group, sample))
                episodes[-1].end("answer", Verdict(sample < successes, [], [], ""))
            group += 1
    text = table(summarize(episodes))
    assert text.splitlines()[1].split()[:5] == ["L8", "79", "632", "210", "0.33"]
    found = {title: rows["L8"] for title, rows in breakdown(summarize(episodes)).items() if title.startswith("groups")}
    assert list(found.values()) == ["79: 0.30, 0.62, 0.08", "24 14 8 10 1 3 8 5 6"] and all(
        f"\n{title}\n  L8 " in text and row in text for title, row in found.items())
