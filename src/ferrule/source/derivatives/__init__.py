"""Derivatives of Metal bodies, as Metal bodies: read into nodes, and followed."""
