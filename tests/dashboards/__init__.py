"""Tests of the dashboards: what they ask, how they look, whether Prometheus and Grafana take them."""
