"""Ways for chunks of state to get from one node's arena to another's."""
