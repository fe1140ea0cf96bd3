"""Adapters for frameworks that own the training loop; each an optional extra."""
