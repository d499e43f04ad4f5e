"""The keys of gRPC metadata that both sides of a call know."""

ROUTING_KEY = "x-prefix-id"  # by it a router sends the calls of one prefix to one server
STATUS_DETAILS_KEY = "grpc-status-details-bin"  # the google.rpc.Status of an error
