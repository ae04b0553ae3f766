"""Turns the activations and derivatives of each use into sums over rows, for the empirical, sampled or exact Fisher."""
