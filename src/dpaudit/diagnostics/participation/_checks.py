"""All tests of the batches."""

from __future__ import annotations

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics.participation._overlap import batch_overlap, repeated_batches
from dpaudit.diagnostics.participation._rate import duplicate_examples, favoured_example, sample_rate
from dpaudit.diagnostics.participation._record import ParticipationRecord
from dpaudit.diagnostics.participation._spread import batch_sizes, participation_counts

__all__ = ["participation_checks"]


def participation_checks(record: ParticipationRecord, claimed: float | None) -> list[Check]:
    """Those that can be made with what is known: the claimed rate, and who was in the batches."""
    if record.num_steps == 0:
        return []
    found: list[Check | None] = [batch_sizes(record)]
    if claimed is not None:
        found.append(sample_rate(record, claimed))
    if record.has_members:
        found += [
            participation_counts(record),
            batch_overlap(record),
            repeated_batches(record),
            duplicate_examples(record),
        ]
        if claimed is not None:
            found.append(favoured_example(record, claimed))
    return [check for check in found if check is not None]
