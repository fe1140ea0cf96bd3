"""``policy.yaml``: what sites and users settle once for all of their jobs."""
