"""natgrad: distributed K-FAC for PyTorch.

Two lines make a training loop second-order::

    kfac = natgrad.KFAC(model, damping=1e-3)
    kfac.attach(optimizer)  # or call kfac.step() before optimizer.step()

The way of the data, one package a stage: ``capture`` finds where each parameter is used, ``statistics`` turns
activations and derivatives into sums over rows,
``blocks`` keeps the running averages, ``solve`` decomposes them, at once or beside training (``overlap``),
``precondition`` replaces the gradients.

Vocabulary
    use         one product, convolution or look-up with a weight, or broadcast of a vector, in one forward pass
    rows        a use's (activation, derivative) pairs: one a case, place or token
    case        one element of a batch; its places or tokens may count as rows (expand) or be averaged first (reduce)
    factor      the mean of a aᵀ (input side) or g gᵀ (output side) over rows
    block       the Fisher block of a weight and its bias: scale · input factor ⊗ output factor; of a vector: one factor
    form        how a block is factored and what its rows are
    scale       rows per loss term, R / N
    side        the solved form of a factor: eigenbasis or inverse
    stack       several equal matrices handled as one: groups of a convolution, layers of one shape
"""

from natgrad import models, optim, roles, schedules
from natgrad.averaging import PolyakAverage
from natgrad.clock import Clock
from natgrad.dcp import read_dcp
from natgrad.distribute.costs import Costs
from natgrad.distribute.strategy import Strategy
from natgrad.errors import NatgradWarning
from natgrad.kfac import KFAC
from natgrad.log import Log
from natgrad.overlap.options import Background, Staggered
from natgrad.precondition.buffers import Grafting
from natgrad.statistics.predictive import Bernoulli, Categorical, Gaussian
from natgrad.trust_region.adaptive_damping import AdaptiveDamping
from natgrad.trust_region.region import TrustRegion

__version__ = "0.1.0"
__all__ = [
    "KFAC",
    "AdaptiveDamping",
    "Background",
    "Bernoulli",
    "Categorical",
    "Clock",
    "Costs",
    "Gaussian",
    "Grafting",
    "Log",
    "NatgradWarning",
    "PolyakAverage",
    "Staggered",
    "Strategy",
    "TrustRegion",
    "__version__",
    "models",
    "optim",
    "read_dcp",
    "roles",
    "schedules",
]
