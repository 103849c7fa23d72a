"""The kit's oracle, under the name that tests have for it."""

from mlx_lm_mtp.testing.oracle import (
    Result,
    contents,
    differences,
    random_state,
    same_bits,
    stock,
)

__all__ = ["Result", "contents", "differences", "random_state", "same_bits", "stock"]
