"""Live metrics: one table of what is measured, and the Prometheus endpoint that a recorder opens on request."""
