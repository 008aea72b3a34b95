"""What the documentation shows must run, and what it points to must exist."""
