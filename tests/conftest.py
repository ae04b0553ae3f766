"""For all tests: one thread. Threads that wait for each other take most of the time of such small models, and nearly
all of it where another process uses a core.
"""

import torch

torch.set_num_threads(1)
