"""Modules that compute on DTensors: regions, the layouts at their borders, linear layers and embeddings."""
