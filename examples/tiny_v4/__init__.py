"""A small DeepSeek-V4-style language model on dsv4cp.torch_ops: read config, then layers, attention, model."""
