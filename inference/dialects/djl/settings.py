"""The settings of DJL Serving's plane."""

from __future__ import annotations

from pydantic import Field

from inference.planes.declaration import DialectSettings


class DjlSettings(DialectSettings):
    """DRAGOMAN_DJL_*."""

    djl_port: int = Field(8085, ge=0, le=65535, description="Port of DJL Serving's plane; 0 switches it off.")
