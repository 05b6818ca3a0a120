"""The names of data in what is shown, where other data than the paper's were used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dpaudit.experiments.reproduction._picture import Panel, Picture, Table
from dpaudit.experiments.reproduction._values import Row, Rows

__all__ = ["Labels"]


class Labels:
    """Says "location for Purchase" where nothing is Purchase.

    >>> Labels({"Purchase": "location for Purchase"}).rows([{"column": "Purchase", "epsilon": 1.0}])
    [{'column': 'location for Purchase', 'epsilon': 1.0}]
    """

    def __init__(self, stand_ins: Mapping[str, str]) -> None:
        self._stand_ins = stand_ins

    def rows(self, rows: Rows) -> list[Row]:
        """As they are written."""
        return [
            {name: self._text(value) if isinstance(value, str) else value for name, value in row.items()}
            for row in rows
        ]

    def picture(self, picture: Picture) -> Picture:
        """As it is drawn."""
        return replace(picture, panels=[self._panel(panel) for panel in picture.panels])

    def tables(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        """As they are printed."""
        return tuple(self._table(table) for table in tables)

    def _text(self, text: str) -> str:
        for paper, used in self._stand_ins.items():
            text = text.replace(paper, used)
        return text

    def _texts(self, texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._text(text) for text in texts)

    def _panel(self, panel: Panel) -> Panel:
        return replace(
            panel,
            title=self._text(panel.title),
            categories=self._texts(panel.categories),
            series=[replace(one, label=self._text(one.label)) for one in panel.series],
        )

    def _table(self, table: Table) -> Table:
        if table.names_papers:
            return table
        rows = [self._texts(row) for row in table.rows]
        return replace(table, header=self._texts(table.header), rows=rows)
