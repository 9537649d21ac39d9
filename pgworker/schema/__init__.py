"""The schema in the database: which migrations there are, which are applied, applying them, what a role needs."""

from __future__ import annotations

from pgworker.schema.apply import check, migrate, pending
from pgworker.schema.files import Migration, migrations, parse
from pgworker.schema.script import grants, render

__all__ = ["Migration", "check", "grants", "migrate", "migrations", "parse", "pending", "render"]
