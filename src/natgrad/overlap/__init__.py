"""Decompositions off the critical path: where they are made, when they are asked for, and when they are taken over."""
