"""Rows in, ids and masks out: readers, chat rendering, resumable loading, packing and length balancing."""
