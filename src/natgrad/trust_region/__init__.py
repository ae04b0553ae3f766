"""How far to step: the KL cap, its curvature, the step really taken, and damping that adapts to it."""
