"""Messages generated from grpc_service.proto by `make protocol`; do not edit them."""
