"""Prometheus' side: alerting rules, PromQL, histograms, and what the operator tells of itself."""
