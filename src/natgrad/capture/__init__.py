"""Finds where each parameter is used, in the autograd graph of a forward pass."""
