"""Lookups that the tables need beside Django's own."""

from __future__ import annotations

from typing import Any

from django.db.models.lookups import In


class IntegerIn(In):
    """`in` without the numbers that the column cannot hold: no row has them, and SQLite's driver refuses them. Django has this for
    `exact` and the comparisons alone.
    """

    rhs: Any

    def process_rhs(self, compiler: Any, connection: Any) -> Any:
        """The values as SQL."""
        if self.rhs_is_direct_value():
            lowest, highest = connection.ops.integer_field_range(self.lhs.output_field.get_internal_type())
            self.rhs = [each for each in self.rhs if not isinstance(each, int) or lowest <= each <= highest]
        return super().process_rhs(compiler, connection)
