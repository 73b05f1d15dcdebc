"""How a worker of a deployment is chosen for a request: pure rules, each in its file, and the balancer that applies them."""
