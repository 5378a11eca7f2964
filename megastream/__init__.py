"""megastream: streams the weights of a Megatron MoE trainer into a running vLLM engine."""

__version__ = "0.1.0"
