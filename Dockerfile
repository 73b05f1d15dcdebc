FROM python:3.11-slim-bookworm
WORKDIR /app
COPY requirements/serve.lock requirements/
COPY pyproject.toml ./
COPY scripts/install.py scripts/
RUN python scripts/install.py /opt/venv requirements/serve.lock --torch
COPY . .
ENV DRAGOMAN_DATA_DIR=/data DRAGOMAN_HOST=0.0.0.0 PATH=/opt/venv/bin:$PATH
RUN useradd --create-home dragoman && mkdir /data && chown dragoman /data
USER dragoman
VOLUME /data
EXPOSE 8000 8001 8080 8085 7070 7071 1025 1026 1027
STOPSIGNAL SIGTERM
CMD ["python", "-W", "ignore", "manage.py", "serve"]
