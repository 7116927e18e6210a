# The sidecar as an image: locked dependencies without the development ones, an unprivileged user.
FROM python:3.11-slim AS build
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
# The lock also pins development tools. As constraints (without hashes) it pins only what is installed.
RUN sed -E 's/[[:space:]]*\\$//; /^[[:space:]]*--hash/d' requirements.lock > constraints.txt \
 && python -m venv /opt/tiered
COPY tiered tiered
COPY uploader uploader
COPY fetcher fetcher
COPY server server
COPY sidecar sidecar
COPY pipeline pipeline
COPY rocketmq_tiered rocketmq_tiered
RUN /opt/tiered/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt .

FROM python:3.11-slim
# uid 3000, as in the broker's images: it can read the store and create pins beside its files.
RUN groupadd --gid 3000 rocketmq \
 && useradd --uid 3000 --gid 3000 --create-home rocketmq \
 && install -d -o rocketmq -g rocketmq /var/lib/rocketmq-tiered
COPY --from=build /opt/tiered /opt/tiered
ENV PATH=/opt/tiered/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/lib/rocketmq-tiered/numba \
    TIERED_PROCESS__STATE_DIR=/var/lib/rocketmq-tiered/state
USER rocketmq
VOLUME /var/lib/rocketmq-tiered
EXPOSE 10919
# SIGTERM drains within process.drain_timeout_ms (30 s): `docker stop` must allow that long.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tiered"]
CMD ["run"]
