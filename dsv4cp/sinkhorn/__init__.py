"""Sinkhorn normalisation of hyper-connection matrices."""
