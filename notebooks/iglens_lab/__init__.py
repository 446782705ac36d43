"""What the notebooks share and the method does not need."""
