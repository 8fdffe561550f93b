"""What a chat template reads of a message, and what it leaves out."""
