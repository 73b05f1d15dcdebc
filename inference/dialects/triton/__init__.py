"""Triton's dialect, which is KServe's v2 protocol with Triton's extensions, over HTTP and over gRPC."""
