from __future__ import annotations

import copy

import pytest
import torch

from natgrad import recipes
from natgrad.compare.contenders import entries, named
from natgrad.recipes import RecipeError

DIGITS = recipes.load("digits")
GPT = recipes.load("text-gpt", ["data.path=text.txt"])


def one(spec: str, recipe=DIGITS):
    return entries(recipe, [spec])[0]


def test_names_are_separated_by_commas_but_for_those_in_lists():
    assert named(["sgd, adamw", "kfac"]) == ["sgd", "adamw", "kfac"]
    assert named(["sgd,kfac+kfac.exclude=['a','b'],adamw"]) == ["sgd", "kfac+kfac.exclude=['a','b']", "adamw"]


def test_sgd_gets_the_momentum_that_kfac_does_without_and_adamw_its_own_rate():
    assert one("sgd").recipe.optimizer.options == {"momentum": 0.9}
    assert not one("sgd").uses_kfac
    adamw = one("adamw").recipe.optimizer
    assert (adamw.name, adamw.lr, adamw.options) == ("adamw", 1e-3, {})


def test_an_sgd_that_is_meant_to_have_no_momentum_has_none():
    plain = recipes.load("digits", ["kfac.enabled=false"])
    assert one("sgd", plain).recipe == plain


def test_kfac_is_the_recipe_itself_and_its_variants_change_what_they_say():
    assert one("kfac").recipe == DIGITS
    variant = one("kfac-sampled-reduce-inverse")
    assert variant.name == "K-FAC (sampled, reduce, inverse)"
    assert (variant.recipe.kfac.fisher, variant.recipe.kfac.sharing, variant.recipe.kfac.solver) == (
        "sampled",
        "reduce",
        "inverse",
    )


def test_kfac_in_front_of_adamw_bounds_the_step_that_is_really_taken():
    entry = one("kfac-adamw")
    assert entry.name == "K-FAC + AdamW"
    assert (entry.recipe.optimizer.name, entry.recipe.optimizer.lr) == ("adamw", 1e-3)
    assert (entry.recipe.kfac.region_of, entry.recipe.kfac.kl_clip) == ("step", 1e-3)


def test_a_recipe_of_another_optimizer_keeps_its_schedule():
    sgd = one("sgd", GPT).recipe.optimizer
    assert sgd.lr["schedule"] == GPT.optimizer.lr["schedule"]
    assert sgd.lr["value"] == pytest.approx(0.05)
    assert one("kfac", GPT).recipe == GPT
    assert one("kfac", GPT).name == "K-FAC + AdamW"


def test_muon_takes_the_matrices_inside_a_transformer_and_is_refused_where_there_are_none():
    assert one("muon", GPT).name == "Muon"
    with pytest.raises(RecipeError, match="Muon is for the matrices .* and digits_convnet has none"):
        one("muon")


def test_any_class_can_join_with_its_own_default_rate():
    entry = one("torch.optim:RMSprop")
    assert entry.name == "RMSprop"
    assert entry.centre() == {"lr": 0.01}


def test_any_field_can_be_changed_for_one_contender():
    entry = one("kfac+kfac.factor_update_steps=20+kfac.damping=1e+0")
    assert entry.recipe.kfac.factor_update_steps == 20
    assert entry.recipe.kfac.damping == 1.0
    assert entry.name == "K-FAC (factor_update_steps=20, damping=1e+0)"


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (["sdg"], "did you mean 'sgd'"),
        (["kfac-sample"], "did you mean 'sampled'"),
        (["kfac-eigen-inverse"], "eigen and inverse exclude each other"),
        (["kfac-muon"], "no such variant"),
        (["no.such:Class"], "cannot be imported"),
        (["torch.optim:SDG"], "cannot be imported"),
        (["kfac+kfac.dampin=1"], "kfac.dampin=1: .*did you mean 'damping'"),
        (["kfac+nonsense"], "not an override|no field"),
        (["kfac+training.epochs=3"], "training.epochs is the same for all"),
        (["kfac+data.flip=true"], "data.flip is the same for all"),
        (["sgd", "sgd"], "are the same"),
        (["kfac", "kfac-sgd"], "are the same"),
        ([], "nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(specs, says):
    with pytest.raises(RecipeError, match=says):
        entries(DIGITS, specs)


def test_folders_are_plain_names_and_never_shared():
    found = entries(DIGITS, ["torch.optim:RMSprop", "kfac+kfac.damping=0.1", "kfac+kfac.damping=0.2"])
    assert [entry.slug for entry in found] == ["torch.optim-RMSprop", "kfac-kfac.damping=0.1", "kfac-kfac.damping=0.2"]


def test_the_centre_is_the_recipes_and_settings_keep_the_shape_of_schedules():
    entry = one("kfac", recipes.load("cifar10-convnet"))
    assert entry.centre() == {"lr": 0.1, "damping": 1e-3}
    changed = entry.with_settings({"lr": 0.2, "damping": 0.01})
    assert changed.optimizer.lr == {"schedule": "cosine", "value": 0.2, "end": pytest.approx(2e-4)}
    assert changed.kfac.damping == pytest.approx(0.01)
    assert changed.kfac.kl_clip == entry.recipe.kfac.kl_clip


def test_what_a_contender_names_itself_is_not_swept():
    assert one("kfac+kfac.damping=0.01").centre() == {"lr": 0.3}
    assert one("kfac+kfac.damping=0.01").with_settings({"lr": 0.6}).kfac.damping == 0.01
    assert one("sgd+optimizer.lr=0.02").centre() == {}


def test_damping_that_adapts_is_not_swept_and_plain_optimizers_have_none():
    assert one("kfac+kfac.damping=adaptive").centre() == {"lr": 0.3}
    assert one("kfac").centre() == {"lr": 0.3, "damping": 1e-3}
    assert one("sgd").centre() == {"lr": 0.05}


def test_plain_optimizers_are_searched_around_rates_that_were_not_chosen_for_kfac():
    convnet = recipes.load("cifar10-convnet")
    assert one("sgd", convnet).centre() == {"lr": pytest.approx(0.05)}
    assert one("sgd", convnet).recipe.optimizer.options == convnet.optimizer.options
    assert one("adamw", GPT).centre() == {"lr": pytest.approx(1e-3)}
    plain = recipes.load("digits", ["kfac.enabled=false", "optimizer.lr=0.7"])
    assert one("sgd", plain).centre() == {"lr": 0.7}


# Muon


def models():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
    )


def test_muon_takes_inner_matrices_and_adamw_the_rest_with_one_learning_rate():
    from natgrad.recipes.muon import Muon, split

    model = models()
    matrices, others = split(model)
    assert [tuple(one.shape) for one in matrices] == [(6, 8)]
    assert [tuple(one.shape) for one in others] == [(5, 4), (6,), (3, 6), (3,)]
    ours = Muon(model, lr=0.1)
    twin = models()
    muon = torch.optim.Muon([twin[2].weight], lr=0.05, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(split(twin)[1], lr=0.05, weight_decay=0.01)
    for group in ours.param_groups:
        group["lr"] = 0.05
    x, y = torch.randint(5, (7, 2)), torch.randint(3, (7,))
    for _ in range(3):
        for network, optimizers in ((model, [ours]), (twin, [muon, adamw])):
            network.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_muon_goes_on_from_its_state_bit_for_bit():
    from natgrad.recipes.muon import Muon

    x, y = torch.randint(5, (7, 2)), torch.randint(3, (7,))

    def step(model, optimizer):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    model = models()
    optimizer = Muon(model, lr=0.1)
    step(model, optimizer)
    other = models()
    resumed = Muon(other, lr=0.7)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # else they would share it
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.1]
    for group in (*optimizer.param_groups, *resumed.param_groups):
        group["lr"] = 0.03
    step(model, optimizer)
    step(other, resumed)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_muon_leaves_tables_and_bare_matrices_alone_and_takes_those_of_attention():
    from natgrad.recipes.muon import split

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = torch.nn.Parameter(torch.zeros(3, 4))
            self.tokens = torch.nn.Embedding(5, 4)
            self.attention = torch.nn.MultiheadAttention(4, 2)
            self.head = torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.tokens.weight

    model = Model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, others = split(model)
    assert {names[id(one)] for one in matrices} == {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert len(matrices) + len(others) == len(list(model.parameters()))
