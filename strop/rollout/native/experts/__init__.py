"""Experts that tokens visit while the native engine samples (router replay)."""
