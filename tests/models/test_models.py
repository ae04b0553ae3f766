"""The models have the published sizes and shapes, and a loss on them reaches every parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import models
from natgrad.models.googlenet import TABLE


def on_meta(name: str, **options: Any) -> nn.Module:
    """A network without memory."""
    with torch.device("meta"):
        return models.build(name, **options)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def images(count: int, side: int, device: str = "cpu") -> Tensor:
    return torch.randn(count, 3, side, side, device=device)


def convolution(inputs: int, outputs: int, kernel: int, *, bias: bool = True) -> int:
    return inputs * outputs * kernel**2 + bias * outputs


GPT_TINY = {"vocabulary": 17, "context": 8, "layers": 2, "heads": 2, "width": 12}
VIT_TINY = {"image": 8, "patch": 4, "layers": 2, "heads": 2, "width": 12, "num_classes": 5}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # He et al. 2015, table 6, in millions: 0.27, 0.46, 0.66, 0.85, 1.7
        ("resnet20", {}, 269_722),
        ("resnet32", {}, 464_154),
        ("resnet44", {}, 658_586),
        ("resnet56", {}, 853_018),
        ("resnet110", {}, 1_727_962),
        # torchvision
        ("resnet18", {}, 11_689_512),
        ("resnet34", {}, 21_797_672),
        ("resnet50", {}, 25_557_032),
        ("resnet101", {}, 44_549_160),
        ("resnet152", {}, 60_192_808),
        ("alexnet", {}, 61_100_840),
        ("vgg16", {}, 138_357_544),
        ("vgg16", {"batch_norm": True}, 138_365_992),
        ("vit", {}, 86_567_656),
        ("vit", {"pool": "mean"}, 86_567_656 - 2 * 768),  # without the class token and its position
        # Caffe's bvlc_googlenet, without and with auxiliary heads
        ("googlenet", {}, 6_998_552),
        ("googlenet", {"auxiliary": True}, 13_378_280),
        # GPT-2 small
        ("gpt", {}, 124_439_808),
        ("gpt", {"tied": False}, 124_439_808 + 50257 * 768),
        # Ba, Grosse & Martens 2017, section 6.1, and Hinton & Salakhutdinov 2006: by hand
        ("digits_convnet", {}, (9 + 1) * 32 + (288 + 1) * 64 + (1024 + 1) * 10),
        ("cifar_convnet", {}, (75 + 1) * 32 + (800 + 1) * 32 + (800 + 1) * 64 + (1024 + 1) * 10),
        (
            "autoencoder",
            {},
            785 * 1000 + 1001 * 500 + 501 * 250 + 251 * 30 + 31 * 250 + 251 * 500 + 501 * 1000 + 1001 * 784,
        ),
    ],
)
def test_published_sizes(name: str, options: dict[str, Any], expected: int) -> None:
    assert size(on_meta(name, **options)) == expected


@pytest.mark.parametrize("batch_norm", [False, True])
def test_googlenet_is_table_1(batch_norm: bool) -> None:
    # A norm has a gain and a bias a channel where the convolution had a bias.
    extra = 1 if batch_norm else 0
    layers = [(3, 64, 7), (64, 64, 1), (64, 192, 3)]
    channels = 192
    for row in TABLE.values():
        layers += [(channels, row.one, 1), (channels, row.reduce_three, 1), (row.reduce_three, row.three, 3)]
        layers += [(channels, row.reduce_five, 1), (row.reduce_five, row.five, 5), (channels, row.pool, 1)]
        channels = row.one + row.three + row.five + row.pool
    expected = sum(convolution(*layer) + extra * layer[1] for layer in layers) + 1025 * 1000
    assert channels == 1024
    assert size(on_meta("googlenet", batch_norm=batch_norm)) == expected


@pytest.mark.parametrize(
    ("name", "side", "classes"),
    [
        *((name, 32, 10) for name in ("cifar_convnet", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110")),
        *((name, 224, 1000) for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")),
        *((name, 224, 1000) for name in ("alexnet", "googlenet", "vgg16", "vit")),
    ],
)
def test_one_logit_a_class(name: str, side: int, classes: int) -> None:
    model = on_meta(name)
    assert model(images(2, side, "meta")).shape == (2, classes)
    assert on_meta(name, num_classes=7)(images(2, side, "meta")).shape == (2, 7)


def test_every_model_is_tested_here() -> None:
    tested = {"resnet18", "resnet20", "resnet32", "resnet34", "resnet44", "resnet50", "resnet56", "resnet101"}
    tested |= {"resnet110", "resnet152", "alexnet", "autoencoder", "cifar_convnet", "googlenet", "gpt", "vgg16", "vit"}
    tested |= {"digits_convnet"}
    assert set(models.names()) == tested


def _chunks_of_two(features: int) -> nn.Module:
    return models.ChunkedBatchNorm2d(features, 2)


def _groups(features: int) -> nn.Module:
    return nn.GroupNorm(4, features)


def _gpt_tokens() -> Tensor:
    return torch.arange(2 * 8).view(2, 8)


@pytest.mark.parametrize(
    ("name", "options", "inputs"),
    [
        ("digits_convnet", {}, lambda: torch.randn(3, 1, 8, 8)),
        ("cifar_convnet", {}, lambda: images(3, 32)),
        ("cifar_convnet", {"norm": _chunks_of_two}, lambda: images(4, 32)),
        ("resnet20", {}, lambda: images(2, 16)),
        ("resnet20", {"norm": None}, lambda: images(2, 16)),
        ("resnet20", {"norm": _chunks_of_two}, lambda: images(4, 16)),
        ("resnet18", {"num_classes": 3}, lambda: images(2, 64)),
        ("resnet50", {"num_classes": 3, "norm": _groups}, lambda: images(2, 64)),
        ("resnet50", {"num_classes": 3, "norm": None}, lambda: images(2, 64)),
        ("googlenet", {"num_classes": 3}, lambda: images(2, 64)),
        ("googlenet", {"num_classes": 3, "batch_norm": True}, lambda: images(2, 64)),
        ("googlenet", {"num_classes": 3, "norm": _chunks_of_two}, lambda: images(4, 64)),
        ("autoencoder", {"sizes": (12, 9, 4)}, lambda: torch.rand(3, 12)),
        ("autoencoder", {"sizes": (12, 9, 4), "activation": "tanh"}, lambda: torch.rand(3, 3, 4)),
        ("gpt", GPT_TINY, _gpt_tokens),
        ("gpt", {**GPT_TINY, "tied": False, "dropout": 0.1}, _gpt_tokens),
        ("vit", VIT_TINY, lambda: images(3, 8)),
        ("vit", {**VIT_TINY, "pool": "mean", "dropout": 0.1}, lambda: images(3, 8)),
    ],
)
def test_gradients_reach_every_parameter(name: str, options: dict[str, Any], inputs: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    model = models.build(name, **options)
    out = model(inputs())
    (out * torch.randn_like(out)).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


# Building by name


def test_the_nearest_name_is_guessed() -> None:
    with pytest.raises(ValueError, match=r"name must be one of .* got 'googlnet' \(did you mean 'googlenet'\?\)"):
        models.build("googlnet")


def test_options_that_a_model_does_not_have() -> None:
    with pytest.raises(
        TypeError, match=r"resnet20 has no option 'num_clases' \(did you mean 'num_classes'\?\); it takes"
    ):
        models.build("resnet20", num_clases=3)
    with pytest.raises(TypeError, match="gpt has no option 'norm'; it takes vocabulary, context, layers"):
        models.build("gpt", norm=None)


# ResNets


def test_cifar_resnet_refuses_other_depths() -> None:
    with pytest.raises(ValueError, match="6n \\+ 2"):
        models.cifar_resnet(depth=18)


def test_resnet50_strides_on_the_3x3_convolutions() -> None:
    strided = [
        module.kernel_size
        for name, module in on_meta("resnet50").named_modules()
        if isinstance(module, nn.Conv2d) and module.stride == (2, 2) and "layer" in name and "downsample" not in name
    ]
    assert strided == [(3, 3)] * 3


def test_resnets_have_torchvisions_names() -> None:
    state = on_meta("resnet50").state_dict()
    assert len(state) == 320
    assert {"conv1.weight", "bn1.running_var", "layer1.0.downsample.1.bias", "layer4.2.conv3.weight", "fc.bias"} <= set(
        state
    )


def test_identity_shortcuts_subsample_and_pad_with_zeros() -> None:
    # With its last normalisation at zero a block is its shortcut.
    block = models.cifar_resnet(depth=8).get_submodule("layer2.0")
    assert isinstance(block.bn2, nn.BatchNorm2d)
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_without_norm_convolutions_have_biases_and_signals_keep_their_scale() -> None:
    torch.manual_seed(0)
    model = models.resnet56(norm=None)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(convolution.bias is not None for convolution in convolutions)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    with torch.no_grad():
        assert 0.01 < model(images(4, 32)).std() < 10


# AlexNet and GoogLeNet


def test_alexnet_flattens_6_by_6_maps() -> None:
    assert on_meta("alexnet").get_submodule("features")(images(1, 224, "meta")).shape == (1, 256, 6, 6)


def test_batch_norm_follows_every_convolution() -> None:
    for name, convolutions in (("alexnet", 5), ("vgg16", 13), ("googlenet", 57)):
        modules = [type(module) for module in on_meta(name, batch_norm=True).modules()]
        norms = [index for index, module in enumerate(modules) if module is nn.BatchNorm2d]
        assert len(norms) == modules.count(nn.Conv2d) == convolutions
        assert all(modules[index - 1] is nn.Conv2d for index in norms)
        assert nn.BatchNorm2d not in [type(module) for module in on_meta(name).modules()]


def test_inception_maps_have_the_sizes_of_table_1() -> None:
    shapes = {}
    model = on_meta("googlenet")
    for name in TABLE:
        model.get_submodule(f"inceptions.{name}").register_forward_hook(
            lambda module, inputs, output, name=name: shapes.update({name: tuple(output.shape[1:])})
        )
    model(images(1, 224, "meta"))
    assert shapes == {
        "3a": (256, 28, 28),
        "3b": (480, 28, 28),
        "4a": (512, 14, 14),
        "4b": (512, 14, 14),
        "4c": (512, 14, 14),
        "4d": (528, 14, 14),
        "4e": (832, 14, 14),
        "5a": (832, 7, 7),
        "5b": (1024, 7, 7),
    }


def test_inception_branches_read_the_same_tensor() -> None:
    inception = on_meta("googlenet").get_submodule("inceptions.3a")
    read = []
    for name in ("one.0", "reduce_three.0", "reduce_five.0"):
        inception.get_submodule(name).register_forward_hook(lambda module, inputs, output: read.append(inputs[0]))
    x = torch.randn(1, 192, 8, 8, device="meta")
    inception(x)
    assert len(read) == 3
    assert all(tensor is x for tensor in read)


def test_auxiliary_heads_speak_in_training_only() -> None:
    model = on_meta("googlenet", auxiliary=True, num_classes=5)
    out = model(images(2, 224, "meta"))
    assert isinstance(out, models.GoogLeNetOutput)
    assert [tensor.shape for tensor in out] == [(2, 5)] * 3
    assert isinstance(model.eval()(images(2, 224, "meta")), Tensor)


# Autoencoder


@pytest.mark.parametrize(("activation", "bias", "scale"), [("sigmoid", 0.0, 1.0), ("tanh", 0.5, 0.25)])
def test_autoencoder_starts_sparse(activation: str, bias: float, scale: float) -> None:
    torch.manual_seed(0)
    model = models.Autoencoder(sizes=(100, 200, 10), activation=activation)
    weight, biases = model.get_parameter("encoder.0.weight"), model.get_parameter("encoder.0.bias")
    assert (weight.count_nonzero(1) == 15).all()
    assert weight[weight != 0].std().item() == pytest.approx(scale, rel=0.1)
    assert (biases == bias).all()
    assert model.get_parameter("decoder.0.weight").count_nonzero() == 200 * 10


def test_autoencoder_has_a_linear_code_and_logits() -> None:
    model = models.Autoencoder()
    linear = [(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]
    sizes = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    assert linear == list(pairwise(sizes))
    assert isinstance(model.encoder[-1], nn.Linear)
    assert isinstance(model.decoder[-1], nn.Linear)
    assert model(torch.rand(2, 1, 28, 28)).shape == (2, 784)


def test_autoencoder_errors() -> None:
    with pytest.raises(ValueError, match="activation must be one of 'sigmoid', 'tanh', got 'relu'"):
        models.Autoencoder(activation="relu")
    with pytest.raises(ValueError, match="two positive numbers"):
        models.Autoencoder(sizes=(784,))


# GPT and ViT


def test_gpt_gives_logits_at_every_position_that_depend_on_what_came_before() -> None:
    torch.manual_seed(0)
    model = models.GPT(**GPT_TINY).eval()
    tokens = torch.randint(17, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 17
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 17)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()


def test_gpt_attention_is_the_textbooks() -> None:
    torch.manual_seed(0)
    attention = models.GPT(**GPT_TINY).double().get_submodule("blocks.0.attention")
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    query, key, value = attention.qkv(x).chunk(3, dim=-1)
    heads = []
    for part in (slice(0, 6), slice(6, 12)):
        scores = query[..., part] @ key[..., part].mT / 6**0.5
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ value[..., part])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, -1)))


def test_gpt_ties_its_head_to_its_embedding() -> None:
    tied, untied = models.GPT(**GPT_TINY), models.GPT(**GPT_TINY, tied=False)
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight


def test_gpt_starts_at_a_uniform_guess() -> None:
    torch.manual_seed(0)
    logits = models.GPT(**GPT_TINY, tied=False)(_gpt_tokens())
    loss = functional.cross_entropy(logits.flatten(0, 1), _gpt_tokens().flatten())
    assert loss.item() == pytest.approx(math.log(17), rel=0.05)


def test_transformer_errors() -> None:
    with pytest.raises(ValueError, match="a sequence of 9 tokens does not fit into a context of 8"):
        models.GPT(**GPT_TINY)(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="width must be a multiple of heads, got width=12 and heads=5"):
        models.GPT(**{**GPT_TINY, "heads": 5})
    with pytest.raises(ValueError, match="image must be a multiple of patch, got image=8 and patch=3"):
        models.ViT(**{**VIT_TINY, "patch": 3})
    with pytest.raises(ValueError, match="images must be 8×8, got 12×8"):
        models.ViT(**VIT_TINY)(torch.randn(1, 3, 12, 8))
    with pytest.raises(ValueError, match="pool must be one of 'token', 'mean', got 'max'"):
        models.ViT(**VIT_TINY, pool="max")
