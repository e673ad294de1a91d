"""Grafana dashboards, alert rules and what puts them in place, all generated from Python."""
