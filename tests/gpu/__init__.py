"""Checks for a machine with one GPU; ``run.sh`` runs them."""
