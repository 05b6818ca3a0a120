"""Observers: audits of training runs of other libraries, one package per library.

:func:`observe_library` audits a library of your own: it needs a :class:`Library`, which passes an
:class:`~dpaudit.recording.ObservedStep` for each release.
"""

from dpaudit.observers._session import AuditedSteps, AuditOptions, AuditSession, Library, observe_library

__all__ = ["AuditOptions", "AuditSession", "AuditedSteps", "Library", "observe_library"]
