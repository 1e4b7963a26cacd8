"""Training in 8 bits: recipes, the autograd Functions that run them, conversion and monitoring."""
