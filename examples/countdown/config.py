"""Countdown in small: python train.py --config examples/countdown/config.py"""
from rl.config import Config

config = Config(
    name="countdown", about="Countdown from scratch: imitation of a hasty expert, then GRPO; a minute on one CPU core",
    env="examples.countdown.env", mix={"N2": 4000}, eval_mix={"N2": 128},
    architecture={"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1000.0,
                  "tie_word_embeddings": False},
    chat="compact", dtype="float32", device="cpu", threads=1, max_turns=8, max_tokens=128, max_turn_tokens=24,
    sft_steps=250, sft_batch=32, sft_optimizer="muon", sft_lr=4e-3, sft_muon_lr=0.03, sft_decay=0.7, sft_noise=0.5,
    sft_tasks=3000, checkpoint_seconds=120.0, lora_rank=16, steps=12, tasks_per_step=24, lr=3e-3, betas=(0.9, 0.99),
    weight_decay=0.0, micro_tokens=4096, eval_every=4,
)
