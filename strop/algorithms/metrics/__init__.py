"""Numbers for the log: functions from tensors and lists to {metric name: float}, under the names verl's users
know."""
