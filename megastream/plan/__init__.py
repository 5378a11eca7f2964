"""Plans: pure functions from two layouts to the pieces that travel between them."""

from megastream.plan.build import build_plan
from megastream.plan.coverage import CoverageError, prove_coverage
from megastream.plan.types import Copy, Piece, Plan, Transform, Unit

__all__ = ["Copy", "CoverageError", "Piece", "Plan", "Transform", "Unit", "build_plan", "prove_coverage"]
