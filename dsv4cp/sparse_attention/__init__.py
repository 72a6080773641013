"""Sparse attention over a shared key/value latent with a sink."""
