"""What the controller's driver does with its hands: processes, files, and faults of a rehearsal."""
