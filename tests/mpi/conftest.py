"""For tests that run on the ranks of an MPI job."""

from support.ranks import comm, together

__all__ = ["comm", "together"]
