"""What accompanies a run: checkpoints, trackers."""
