"""Calls that a rule allows: drawn, judged, shrunk to a test; and the gate, one verdict of all."""
