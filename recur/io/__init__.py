"""Weights and models of other libraries: one module a file format."""
