"""The main run after distillation: GRPO goes on from an adapter that has imitated a teacher (configs/sft.py).

The post's teacher solved 2,411 of some 2,800 tasks; imitating them took as long as two or three steps of RL, and RL
then reached 0.90 of the held-out set at step 30, where the run from the published model needed about 70.
"""
from configs.l8 import config as l8
from rl.config import replace

config = replace(
    l8,
    name="l8_distilled",
    about="GRPO on Qwen3.5-9B with tools, after imitation of a teacher; one H100 80 GB",
    adapter="runs/sft",  # what that run came to, or a folder in PEFT's format of the same rank and alpha; to begin with
    steps=40,  # as there
)
