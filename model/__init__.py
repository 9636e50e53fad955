"""The network in plain PyTorch. Knows nothing of tasks or rewards."""
