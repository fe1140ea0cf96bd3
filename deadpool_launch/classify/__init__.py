"""Which kind of fault an error, an exit or a line of a log shows: rules in YAML, a pure choice."""
