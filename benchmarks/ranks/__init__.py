"""What spreading K-FAC's work over ranks saves: balance, traffic and times."""
