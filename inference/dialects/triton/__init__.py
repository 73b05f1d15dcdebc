"""Triton's dialect: KServe's v2 protocol with Triton's extensions, over HTTP and gRPC."""
