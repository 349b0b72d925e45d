"""Run several engines, each in its own process, on one machine or a cluster."""
