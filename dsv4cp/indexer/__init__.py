"""Lightning indexer: scores, top-k selection and their gradients."""
