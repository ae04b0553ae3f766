"""Benchmarks of natgrad; run them from the repository root with ``python -m benchmarks.<name>``."""
