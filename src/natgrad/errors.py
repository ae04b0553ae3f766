"""What natgrad warns with."""


class NatgradWarning(UserWarning):
    """Something went wrong that training survives: a failed decomposition, a NaN batch, an empty one."""
