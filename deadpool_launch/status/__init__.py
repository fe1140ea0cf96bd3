"""How a job stands while it runs: a screen, its events, figures for Prometheus."""
