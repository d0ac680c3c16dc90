"""Every test process computes with one thread, as the ranks do: another number of threads gives other last bits."""

import torch

torch.set_num_threads(1)
