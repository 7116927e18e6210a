# The sidecar as an image: locked dependencies without the development ones, checked by hash; an unprivileged user.
#
# A tag of the base image may move. Pin its digest, as your registry tells it (docker buildx imagetools inspect
# python:3.11-slim):
#
#   docker build --build-arg BASE_IMAGE=python:3.11-slim@sha256:DIGEST .
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
# Kernels are compiled for this processor, or the build machine's. On another one the first start compiles them once more.
# "generic" runs everywhere, with slower checksums; give containers the same values.
ARG NUMBA_CPU_NAME=
ARG NUMBA_CPU_FEATURES=
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_VIRTUALENV=1
COPY requirements-build.lock requirements-runtime.lock ./
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes -r requirements-build.lock \
 && python -m venv /opt/tiered \
 && /opt/tiered/bin/pip install --require-hashes -r requirements-runtime.lock
COPY pyproject.toml README.md LICENSE ./
COPY tiered tiered
COPY uploader uploader
COPY fetcher fetcher
COPY rocketmq_tiered rocketmq_tiered
# Nothing is downloaded here: the locked hatchling builds the wheel, whose dependencies are installed.
RUN /opt/build/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /src/dist . \
 && /opt/tiered/bin/pip install --no-index --no-deps --compile /src/dist/*.whl \
 && /opt/tiered/bin/tiered compile

FROM ${BASE_IMAGE}
# uid 3000, as in the broker's images: it can read the store and create pins beside its files.
RUN groupadd --gid 3000 rocketmq \
 && useradd --uid 3000 --gid 3000 --no-create-home --home-dir /var/lib/rocketmq-tiered --shell /usr/sbin/nologin rocketmq \
 && install -d -o rocketmq -g rocketmq -m 0700 /var/lib/rocketmq-tiered
COPY --from=build /opt/tiered /opt/tiered
# Everything that is written is below the volume: the root file system may be read-only.
ENV PATH=/opt/tiered/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/var/lib/rocketmq-tiered/numba \
    TIERED_PROCESS__STATE_DIR=/var/lib/rocketmq-tiered/state
USER 3000:3000
VOLUME /var/lib/rocketmq-tiered
EXPOSE 10919
# SIGTERM drains within process.drain_timeout_ms (30 s): `docker stop` must allow that long.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tiered"]
CMD ["run"]
