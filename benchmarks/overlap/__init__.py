"""What decompositions off the critical path are worth."""
