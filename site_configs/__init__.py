"""Site files that come with DEADPOOL (YAML)."""
