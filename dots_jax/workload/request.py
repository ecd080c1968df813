"""One request of a workload."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Request:
    """A request, in tokens.

    Attributes:
      context: tokens that are there before the first decode step, at least 1.
      output: tokens to decode, at least 1.
    """

    context: int
    output: int

    @property
    def tokens(self) -> int:
        """Its length when it finishes."""
        return self.context + self.output
