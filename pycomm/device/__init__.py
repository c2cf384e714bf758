"""Device arrays: from a call to NCCL and kernels on a stream, and what looks after them there."""

__all__: list[str] = []
