"""Cases for a trainer: digits, CIFAR-10, folders of images and a text file, in batches that repeat bit for bit.

Everything random follows from the seed, the number of the epoch and the case, never from a global generator, the
number of workers or ranks, or where one starts::

    place = data.Place(device=torch.device("cuda"))
    with contextlib.closing(data.load(options, seed=0, place=place)) as cases:
        for x, y in cases.train.epoch(0, batch=128):
            ...

Nothing of the library imports this package, which needs ``pip install "natgrad[cli]"``.
"""

from natgrad.data.base import Data, DataError, MissingData, Place, Split
from natgrad.data.loading import load
from natgrad.data.made_up import synthetic

__all__ = ["Data", "DataError", "MissingData", "Place", "Split", "load", "synthetic"]
