"""`mlx_lm_mtp doctor`: what a model's head is, what it accepts, and whether it pays.

::

    examine -> Findings -> verdict -> report
"""
