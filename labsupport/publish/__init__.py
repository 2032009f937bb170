"""The life of a number: recorded in a notebook, gathered by a run, published, and checked again."""
