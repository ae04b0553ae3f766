"""Replaces gradients by damped natural gradients and bounds the step."""
