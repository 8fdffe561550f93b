"""Loops, and how a configuration becomes one."""
