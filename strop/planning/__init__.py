"""Memory and time of a run before it starts: arithmetic over model shapes and settings, without torch or a
GPU."""
