"""Messages generated from grpc_service.proto by `make protocol`; nobody edits them."""
