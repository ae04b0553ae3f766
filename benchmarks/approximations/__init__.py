"""What the papers' approximations cost and save."""
