"""The process that looks after one node: starts ranks, watches them, reports."""
