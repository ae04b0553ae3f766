"""The training loop behind ``natgrad train``, and the folder of a run."""
