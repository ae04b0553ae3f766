"""The training loop behind ``natgrad train``, and the folder of a run.

``natgrad.training.weights(path)`` reads the weights of a checkpoint for a model of your own script.
"""

from natgrad.training.checkpoints import CheckpointError, weights

__all__ = ["CheckpointError", "weights"]
