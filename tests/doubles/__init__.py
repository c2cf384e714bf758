"""Doubles of libcuda and libnccl over host memory, compiled against the official headers."""
