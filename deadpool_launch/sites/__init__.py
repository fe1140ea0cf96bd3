"""What is particular to a cluster: site files, how they are found, merged and shown."""
