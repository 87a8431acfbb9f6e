"""Adapters for trainers of other libraries, one module for each; each is imported only on request."""
