"""How is a span asked for, where a wrong answer shows by nothing but its size?

By several requests, and not all of one size: one answer to all of them is then too long or too short for one at least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MIN_SPAN_NBYTES", "Requests", "cut"]

Int64Array = npt.NDArray[np.int64]

MIN_SPAN_NBYTES = 64
"""Shorter spans are not cut: little would be left to tell one part from another."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests that bring spans, in their order; int64 columns.

    Attributes
    ----------
    span
        Row of the span that a request brings a part of.
    start
        First byte in that span.
    nbytes
        Its size in bytes.
    """

    span: Int64Array
    start: Int64Array
    nbytes: Int64Array

    @property
    def stop(self) -> Int64Array:
        """First byte in the span behind the request."""
        return self.start + self.nbytes


def cut(span_nbytes: Int64Array, max_nbytes: int) -> Requests:
    """Cut spans into requests of about equal size: at least two a span, and not all of one size.

    Parameters
    ----------
    span_nbytes
        Sizes of spans, shape (n,), in bytes. There are no requests for those below `MIN_SPAN_NBYTES`.
    max_nbytes
        Largest request, in bytes, at least `MIN_SPAN_NBYTES`.
    """
    n_parts = np.maximum(-(-span_nbytes // (max_nbytes - 1)), 2)
    n_parts[span_nbytes < MIN_SPAN_NBYTES] = 0
    span = np.repeat(np.arange(len(span_nbytes)), n_parts)
    number = np.arange(len(span)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    total, parts = span_nbytes[span], n_parts[span]
    is_even = total % parts == 0

    start, stop = (i * total // parts + ((i == 1) & is_even) for i in (number, number + 1))
    return Requests(span, start, stop - start)
