"""What can go wrong with a request, as the caller sees it.

    RequestError
    ├── InvalidRequest      a field is out of range                    INVALID_ARGUMENT    400
    ├── ModelNotFound       that model is not served                   NOT_FOUND           404
    ├── Overloaded          no room now; retry later                   RESOURCE_EXHAUSTED  429
    ├── Unavailable         no live target within the time allowed     UNAVAILABLE         503
    ├── DeadlineExceeded    the request's own deadline passed          DEADLINE_EXCEEDED   504
    └── SequenceFailed      the target could not compute it            INTERNAL            500

`services.errors` holds the table from class to code.
"""

from __future__ import annotations


class RequestError(Exception):
    """Ends one request; the message is fit for the user."""


class InvalidRequest(RequestError):
    """`field` is named as in the API; the message says the allowed range."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFound(RequestError):
    pass


class Overloaded(RequestError):
    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(RequestError):
    pass


class DeadlineExceeded(RequestError):
    pass


class SequenceFailed(RequestError):
    pass
