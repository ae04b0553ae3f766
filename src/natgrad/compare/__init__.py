"""`natgrad compare`: does K-FAC pay for this model? Contenders tuned alike, run on the same seeds, and judged."""
