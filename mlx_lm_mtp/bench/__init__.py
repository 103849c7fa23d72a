"""`mlx_lm_mtp bench`: stock and drafted decoding side by side, in one process.

::

    subject -> measure ( decode, costs ) -> figures -> report, plot
"""
