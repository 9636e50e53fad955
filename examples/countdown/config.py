"""Countdown on one CPU core: python train.py --config examples/countdown/config.py"""
from rl.config import Config

config = Config(
    name="countdown", about="Countdown from scratch: imitation of the expert, then GRPO", env="examples.countdown.env",
    architecture={"model_type": "qwen3", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3,
                  "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "rope_theta": 1000.0,
                  "tie_word_embeddings": False},
    chat="compact", dtype="float32", device="cpu", threads=1, mix={"N3": 5000}, eval_mix={"N3": 256},
    max_turns=10, max_tokens=240, max_turn_tokens=24, max_turn_calls=1,
    sft_steps=350, sft_batch=32, sft_optimizer="muon", sft_lr=4e-3, sft_muon_lr=0.03, sft_decay=0.7, sft_noise=0.25,
    sft_tasks=8_000, lora_rank=16, steps=24, tasks_per_step=24, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0,
    micro_tokens=4096, eval_every=6,
)
