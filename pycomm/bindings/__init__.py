"""The edge to C: libraries found, loaded and called by ctypes, under their exact C names."""

__all__: list[str] = []
