"""Qwen3.5-9B learns from a teacher's conversations, which sample.py --collect has put into data/distill.jsonl.

An adapter is trained, and l8_distilled.py goes on from it. The same settings hold for the teacher: prompt, tools and
length of an episode are the student's. On one H100 it takes about as long as two or three steps of RL.

    python sample.py --collect data/distill.jsonl --tasks distill     by the expert; by a model with the options below
    python train.py --config sft.py
    python train.py --config l8_distilled.py

    --policy api --teacher_url=URL --teacher_model=NAME --teacher_prices="(0.3, 0.03, 0.5)" --teacher_max_cost=20
        with dollars a million tokens of uncached input, cached input and output, by the provider's list of the day
"""
from configs.l8 import config as l8
from rl.config import replace

config = replace(
    l8,
    name="sft",
    about="imitation of a teacher's conversations by Qwen3.5-9B; one H100, about the time of three steps of l8.py",
    sft_file="data/distill.jsonl",
    sft_epochs=2,  # not said in the post, like all that follows
    sft_batch=32,  # conversations: 150 optimizer steps with the post's 2,411
    sft_lr=1e-4,  # ten times RL's: each token has its own target here
    sft_warmup=10,
    sft_decay=0.9,  # linear to zero over the rest
    sft_held_out=64,
    sft_eval_every=0,  # held-out success costs more than the training: only at the end
    sft_patience=0,  # two epochs are too few to wait for a rise
    steps=0,
    # The teacher: name and address on the command line, the prices of your provider here or there
    teacher_requests=64,
)
