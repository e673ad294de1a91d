"""What a recording shows to Prometheus."""
