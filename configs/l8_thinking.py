"""The main run in thinking mode, which the post only measured before training: 0.51 of 240 tasks, and 0.60 without it,
with 1.7 times the tokens and at most 24 turns and 16k tokens, which penalises the longer mode."""
from configs.l8 import config as l8
from rl.config import replace

config = replace(
    l8,
    name="l8_thinking",
    about="GRPO on Qwen3.5-9B with tools and thinking; one H100 80 GB",
    thinking=True,
    max_turn_tokens=16384,  # ours: thoughts count as part of a turn
)
