# recperf on a CPU:  docker build --tag recperf .
# The C parts are compiled on first use into the cache volume, so the image has a compiler.
FROM python:3.11.9-slim-bookworm AS build
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH
# torch first and alone: it changes seldom, and resolved together with others a newer one may be taken.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch==$TORCH"
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt ".[data,mlperf,baselines]"

FROM python:3.11.9-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc=4:12.2.* libc6-dev=2.36-* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home recperf \
    && mkdir --parents /home/recperf/runs /cache \
    && chown -R recperf:recperf /home/recperf/runs /cache
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH RECPERF_HOME=/cache
USER 1000:1000
WORKDIR /home/recperf
VOLUME ["/home/recperf/runs", "/cache"]
HEALTHCHECK NONE
ENTRYPOINT ["recperf"]
CMD ["--help"]
