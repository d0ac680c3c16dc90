"""What can be measured on a machine with one CUDA device, in ten minutes: ``make gpu``."""
