"""TorchServe's gRPC services, and their REST twins on planes of their own."""
