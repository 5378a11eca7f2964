"""Checkpoints from one form of files to another: Hugging Face, Megatron's two, and vLLM's `sharded_state`."""
