"""Sizes that random cases draw: interpreted any, on a device a few, as each kind of size compiles another program."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

FEW = (1, 5, 16, 77, 300, 1025, 3000)


def sizes(most: int) -> st.SearchStrategy[int]:
    """1 to `most`."""
    return (
        st.sampled_from([size for size in FEW if size <= most])
        if torch.cuda.is_available()
        else st.integers(1, most)
    )
