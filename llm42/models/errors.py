"""Errors of model loading; each message names the file and the field or tensor."""

from __future__ import annotations
