# One image for every command of `dragoman`: serve (the default), web, reconcile, deploy, migrate, status, ...
#
#   docker build -t dragoman .                           for CPUs
#   docker build -t dragoman --build-arg DEVICE=cuda .   for CUDA devices
#
# It runs as a numeric user without privileges. Its root may be read-only: it writes below /data and /tmp alone.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG DEVICE=cpu

# The environment, by the lock with hashes, and the wheel. What it needs to build stays here.
FROM ${PYTHON_IMAGE} AS builder
ARG DEVICE
WORKDIR /src
COPY requirements/serve.lock requirements/otel.lock requirements/redis.lock requirements/torch-cuda.lock requirements/
COPY tools/release/install.py tools/release/
COPY pyproject.toml ./
RUN python tools/release/install.py /opt/dragoman requirements/serve.lock --torch ${DEVICE}
RUN python tools/release/install.py /opt/dragoman requirements/otel.lock
RUN python tools/release/install.py /opt/dragoman requirements/redis.lock
COPY setup.py README.md LICENSE ./
COPY dragoman dragoman
COPY config config
COPY engine engine
COPY inference inference
COPY management management
COPY models models
RUN /opt/dragoman/bin/python -m pip wheel . --no-deps --no-build-isolation --no-index --wheel-dir /dist
RUN /opt/dragoman/bin/python -m pip install --no-deps --no-index /dist/*.whl

# What the load tests need beside it (`docker build --target loadtest .`).
FROM builder AS loadtest-builder
COPY requirements/loadtest.lock requirements/
RUN python tools/release/install.py /opt/dragoman requirements/loadtest.lock

# The CPU's kernels are compiled by Numba within the worker: there is no compiler.
FROM ${PYTHON_IMAGE} AS base-cpu

# Triton calls a C compiler when a kernel is first launched.
FROM ${PYTHON_IMAGE} AS base-cuda
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

FROM base-${DEVICE} AS dragoman
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="Dragoman" \
      org.opencontainers.image.description="One inference engine, every serving dialect." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
# The folders below /secrets are where the compose file mounts volumes, which take over their owner.
RUN groupadd --gid 10001 dragoman \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin dragoman \
 && install -d -o 10001 -g 10001 -m 0750 /data /secrets /secrets/database /secrets/redis /secrets/metrics /secrets/grafana /secrets/loadtest
COPY --from=builder /opt/dragoman /opt/dragoman
# Compiled kernels and models from the hub stay in the volume, so that only the first start waits for them.
ENV PATH=/opt/dragoman/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/data \
    XDG_CACHE_HOME=/data/cache \
    HF_HOME=/data/huggingface \
    DRAGOMAN_DATA_DIR=/data \
    DRAGOMAN_HOST=0.0.0.0
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8000 8001 8080 8085 7070 7071 1025 1026 1027
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=180s --retries=3 CMD ["dragoman", "health"]
ENTRYPOINT ["dragoman"]
CMD ["serve"]

FROM dragoman AS loadtest
COPY --from=loadtest-builder /opt/dragoman /opt/dragoman
COPY loadtests /loadtests/loadtests
USER root
RUN install -d -o 10001 -g 10001 -m 0750 /results
USER 10001:10001
WORKDIR /loadtests
HEALTHCHECK NONE
# The load tests take their key from a variable.
ENTRYPOINT ["sh", "-c", "LOAD_API_KEY=$(cat ${LOAD_API_KEY_FILE:-/dev/null}) exec python -m loadtests \"$@\"", "loadtests"]
CMD ["--help"]

FROM dragoman
