"""Eigendecompositions and inverses of factors, with damping, in stacks, surviving failures."""
