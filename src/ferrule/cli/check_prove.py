"""``ferrule check --prove``: what holds of an op for all sizes that its rule allows."""

from __future__ import annotations

import sys

import click

from ..check.proofs.prove import prove
from ..check.proofs.verdicts import COUNTEREXAMPLE, PROPERTIES
from .subject import find_op


def run_proof(target: str) -> None:
    """Print what is proved of an op, and end the program: with 0 where all is, with 1 where a call
    refutes something, with 2 where something is not supported.

    Args:
        target: as ``"file.py:op"``.
    """
    proof = prove(find_op(target).value)
    click.echo(str(proof))
    if proof.proved:
        return
    refuted = any(getattr(proof, name).status == COUNTEREXAMPLE for name in PROPERTIES)
    sys.exit(1 if refuted else 2)
