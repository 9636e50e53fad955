"""The learning: episodes, samplers, GRPO, run folders. Knows the task world and the network."""
