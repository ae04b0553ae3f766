"""Every parameter of every model is covered, and by what: the table is pinned."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from natgrad import KFAC, models
from natgrad.blocks.registry import Registry
from natgrad.capture.cases import Batch
from natgrad.capture.choices import Choices
from natgrad.capture.graph import Walk
from natgrad.capture.recipes import Recipes
from natgrad.precondition.preconditioner import Preconditioner
from natgrad.report import Report, build_report


def report_of(model: nn.Module, x: torch.Tensor, **options: Any) -> Report:
    """What K-FAC would do with a model, from a pass on the meta device: full sizes, no memory, no arithmetic."""
    parameters = dict(model.named_parameters())
    output = model(x)
    choices = Choices(**{"doubly_factored_above": 4096, **options})
    findings = Recipes(choices).find(Walk([output]), parameters, Batch(x.shape[:1]), known={})
    registry = Registry(parameters, max_factor_size=16384, max_vector_size=256)
    registry.assign(findings.uses)
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    reasons = dict.fromkeys(parameters, "not found") | findings.unrecognised
    return build_report(sizes, registry, Preconditioner("eigen", "joint"), reasons, "")


def table(report: Report) -> dict[str, int]:
    return dict(Counter("with its weight" if line.block.startswith("with ") else line.block for line in report))


IMAGE, SMALL = (2, 3, 224, 224), (2, 3, 32, 32)


def residual(layers: int) -> dict[str, int]:
    return {"convolution": layers, "norm gain": layers, "norm bias": layers, "linear": 1, "with its weight": 1}


def flattened(convolutions: int) -> dict[str, int]:
    """AlexNet and VGG: the first linear layer has three factors, and its bias a block of its own."""
    return {
        "convolution": convolutions,
        "linear, doubly factored": 1,
        "bias": 1,
        "linear": 2,
        "with its weight": convolutions + 2,
    }


# name → options, input shape, parameters by kind of block, bytes of all factors
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, int], int]] = {
    "cifar_convnet": ({}, SMALL, {"convolution": 3, "linear": 1, "with its weight": 4}, 9383388),
    "resnet20": ({}, SMALL, residual(19), 9617144),
    "resnet32": ({}, SMALL, residual(31), 16842488),
    "resnet44": ({}, SMALL, residual(43), 24067832),
    "resnet56": ({}, SMALL, residual(55), 31293176),
    "resnet110": ({}, SMALL, residual(109), 63807224),
    "resnet18": ({}, IMAGE, residual(20), 383515304),
    "resnet34": ({}, IMAGE, residual(36), 756423336),
    "resnet50": ({}, IMAGE, residual(53), 625224360),
    "resnet101": ({}, IMAGE, residual(104), 1160137384),
    "resnet152": ({}, IMAGE, residual(155), 1600662184),
    "alexnet": ({}, IMAGE, flattened(5), 365842328),
    "vgg16": ({}, IMAGE, flattened(13), 782716668),
    "googlenet": (
        {"batch_norm": False},
        IMAGE,
        {"convolution": 57, "linear": 1, "with its weight": 58},
        113808604,
    ),
    "googlenet, batch norm": ({"batch_norm": True}, IMAGE, residual(57), 120206248),
    "autoencoder": ({}, (2, 784), {"linear": 8, "with its weight": 8}, 25958992),
    "gpt": (
        {},
        (2, 16),
        {"linear": 49, "embedding": 1, "norm gain": 25, "norm bias": 25, "with its weight": 48},
        1310485320,
    ),
    "vit": (
        {},
        IMAGE,
        {
            "token": 1,
            "bias": 1,
            "convolution": 1,
            "linear": 49,
            "norm gain": 25,
            "norm bias": 25,
            "with its weight": 50,
        },
        1314699720,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_a_block(name: str) -> None:
    options, shape, expected, size = CASES[name]
    with torch.device("meta"):
        model = models.build(name.split(",")[0], **options)
        x = torch.zeros(shape, dtype=torch.long) if name == "gpt" else torch.zeros(shape)
    report = report_of(model, x)
    assert all(line.covered for line in report), str(report)
    assert table(report) == expected
    assert report.bytes == size


def test_lines_that_are_worth_reading() -> None:
    with torch.device("meta"):
        alexnet, gpt, googlenet = models.AlexNet(), models.GPT(), models.GoogLeNet(batch_norm=False)
        reports = [
            report_of(alexnet, torch.zeros(IMAGE)),
            report_of(gpt, torch.zeros(2, 16, dtype=torch.long)),
            report_of(googlenet, torch.zeros(IMAGE)),
        ]
    first = next(line for line in reports[0] if line.block == "linear, doubly factored")
    assert first.factors == "A 256² · A 36² · G 4096²"
    tied = next(line for line in reports[1] if "orientations" in line.factors)
    assert tied.factors == "A 768² · G 50257 diagonal, used in both orientations"
    shared = [line for line in reports[2] if "A " in line.factors and "(of " in line.factors]
    assert len(shared) == 18  # two of the three 1×1 convolutions on the input of each of nine inception modules
    without = report_of(googlenet, torch.zeros(IMAGE, device="meta"), sharing={"*": "reduce"})
    assert all(line.covered for line in without)
    assert without.bytes == reports[2].bytes


@pytest.mark.parametrize("name", ["cifar_convnet", "resnet20", "autoencoder", "gpt", "vit", "googlenet"])
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce", "solver": "inverse"}])
def test_one_step_of_a_small_one(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes: dict[str, dict[str, Any]] = {
        "autoencoder": {"sizes": (64, 16, 8)},
        "gpt": {"vocabulary": 11, "context": 8, "layers": 2, "heads": 2, "width": 16},
        "vit": {"image": 16, "patch": 8, "width": 16, "layers": 2, "heads": 2, "num_classes": 5},
        "googlenet": {"batch_norm": False, "num_classes": 5},
    }
    shapes = {"autoencoder": (4, 64), "gpt": (4, 8), "vit": (4, 3, 16, 16), "googlenet": (2, 3, 32, 32)}
    model = models.build(name, **sizes.get(name, {}))
    shape = shapes.get(name, (4, 3, 32, 32))
    x = torch.randint(0, 11, shape) if name == "gpt" else torch.randn(shape)
    small = {} if name != "googlenet" else {"max_factor_size": 256}  # no minute of eigh in a test
    predictive = "bernoulli" if name == "autoencoder" else "categorical"
    kfac = KFAC(model, kl_clip=None, predictive=predictive, **options, **small)
    output = model(x)
    output.logsumexp(-1).mean().backward()
    kfac.step()
    assert all(line.covered for line in kfac.report())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
