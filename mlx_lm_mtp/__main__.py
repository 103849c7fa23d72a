"""`python -m mlx_lm_mtp` is the script `mlx_lm_mtp`."""

from .cli import main

main()
