"""What SageMaker's clients send in headers, to whichever server is in the container."""

from __future__ import annotations

ADAPTER = "x-amzn-sagemaker-adapter-identifier"
"""Names the adapter, before whatever the body names."""
