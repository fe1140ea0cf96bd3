"""Whether an allocation, a cluster or this machine can keep a job alive: facts, rules, a table."""
