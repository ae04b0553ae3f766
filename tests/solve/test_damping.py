from __future__ import annotations

import torch

from natgrad.solve.damping import pi_weights


def test_pi_weights_of_any_number_of_factors_multiply_to_one() -> None:
    means = [torch.tensor([2.0, 3.0]), torch.tensor([0.5, 7.0]), torch.tensor([10.0, 0.1])]
    weights = pi_weights(means)
    torch.testing.assert_close(torch.stack(weights).prod(0), torch.ones(2))
    product = torch.stack(means).prod(0) ** (1 / 3)
    for weight, mean in zip(weights, means, strict=True):
        torch.testing.assert_close(weight, mean / product)


def test_pi_weights_of_a_zero_factor_are_one() -> None:
    weights = pi_weights([torch.tensor([0.0, 2.0]), torch.tensor([3.0, 2.0])])
    torch.testing.assert_close(torch.stack(weights), torch.ones(2, 2))
