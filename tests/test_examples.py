"""Every example runs and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "plain.py": ["sklearn"],
    "lightning_digits.py": ["sklearn", "lightning"],
    "accelerate_digits.py": ["sklearn", "accelerate"],
    "trainer_text.py": ["transformers", "accelerate"],
    "your_own_script.py": ["sklearn"],
    "helpers_digits.py": ["sklearn"],
}
UNDER = {"helpers_digits.py": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]}
LEAVES = {"your_own_script.py": ["runs"]}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_example_learns(name, tmp_path):
    for package in NEEDS[name]:
        pytest.importorskip(package)
    # Threads that wait for each other take most of the time of such small models.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *UNDER.get(name, []), str(EXAMPLES / name), "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^loss ([\d.]+) → ([\d.]+)", done.stdout, re.MULTILINE)
    assert losses, done.stdout
    for first, last in losses:
        assert float(last) < float(first) / 2
    left = [path.name for path in tmp_path.iterdir()]
    assert left == LEAVES.get(name, []), "an example leaves nothing behind that it does not say"
