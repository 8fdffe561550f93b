"""Metrics: functions from tensors and lists to {metric name: float}, with the metric names of verl."""
