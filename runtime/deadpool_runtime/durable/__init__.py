"""The durable checkpoint: a copy of the state on a shared disk, for losses no replica survives."""
