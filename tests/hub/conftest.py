"""Tests of packages start as those of the backend do."""

from tests.backend.conftest import fresh_dynamo

__all__ = ["fresh_dynamo"]
