"""Arithmetic on one rank, by kind of memory."""
