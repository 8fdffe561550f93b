"""What the native engine does on a CPU only."""
