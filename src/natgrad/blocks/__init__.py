"""Fisher blocks: running averages of factors, one block per weight (or slice) and its bias."""
