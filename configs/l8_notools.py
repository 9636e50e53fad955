"""The control of the main run: no tools, so that the model has to do geometry and timing in its head.

In the post it learnt nothing: 0.06 of the held-out set before and after, since nearly all groups failed as a whole.
"""
from configs.l8 import config as l8
from rl.config import replace

config = replace(
    l8,
    name="l8_notools",
    about="GRPO on Qwen3.5-9B without tools, the control; one H100 80 GB",
    tools=False,
    max_turn_tokens=32768,  # not said; a message without a call is the last one, so that it may be the whole episode
    steps=28,  # there it was stopped after so many
)
