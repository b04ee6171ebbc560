"""Models whose answer is a vector or a score: embeddings, rerankers, classifiers, reward models."""
