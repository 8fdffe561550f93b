"""Episodes with several sequences or players: their rows, their credit, and policies of their own."""
