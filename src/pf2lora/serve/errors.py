"""What a caller is told when a request cannot be served: OpenAI's error format, which its client libraries know."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is not served: the HTTP status and one line; `param` is the body's field that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def kind(self) -> str:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def no_model(name: str) -> ApiError:
    """The same for a model that is not there and one that is another's: who the others are is nobody's business."""
    return ApiError(
        404,
        f"there is no model {name[:80]!r}, or this token may not use it (/v1/models lists those it may)",
        param="model",
        code="model_not_found",
    )


def busy() -> ApiError:
    return ApiError(429, "too many requests are waiting; try again in a moment", code="queue_full")


def too_many() -> ApiError:
    return ApiError(503, "too many requests at once; try again in a moment", code="overloaded")


def too_slow(seconds: float) -> ApiError:
    return ApiError(504, f"not finished within {seconds:g} seconds (--timeout)", code="timeout")


def gone_away() -> ApiError:
    """For the log alone: nobody is there to read it."""
    return ApiError(499, "the caller went away")


def broken() -> ApiError:
    return ApiError(503, "the server has failed and must be started again", code="failed")


def closing() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
