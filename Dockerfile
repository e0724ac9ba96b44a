# syntax=docker/dockerfile:1.7
#
#   make images                                                                        operator, gateway and server
#   make images IMAGES=server BUILD_ARGS="--build-arg TORCH_CPU_INDEX_URL=…"           a server for CPUs, gigabytes smaller
#
# Each image holds what its extra needs and no more: the operator's no torch, the server's no Kubernetes client. What builds wheels
# stays in the build stages; the final ones get a finished environment and run as a numeric, unprivileged user.

ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS wheel
ARG PIP_INDEX_URL
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY planner planner
COPY server server
COPY operator operator
COPY gateway gateway
COPY local local
COPY benchmarks benchmarks
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON} AS environment
ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/llmservice
ENV PATH=/opt/llmservice/bin:$PATH
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels

FROM environment AS operator-environment
RUN pip install --constraint /constraints.txt "$(echo /wheels/*.whl)[operator]"

FROM environment AS gateway-environment
RUN pip install --constraint /constraints.txt "$(echo /wheels/*.whl)[gateway]"

# The index of torch's CPU builds (torch's own install page names it). Without it pip takes the default build for Linux, which brings
# the CUDA libraries and runs on a CPU as well; the GPU's driver is the node's.
FROM environment AS server-environment
ARG TORCH_CPU_INDEX_URL=
RUN PIP_EXTRA_INDEX_URL="$TORCH_CPU_INDEX_URL" \
    pip install --constraint /constraints.txt "$(echo /wheels/*.whl)[server,otel]"

FROM python:${PYTHON} AS runtime
ENV PATH=/opt/llmservice/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
WORKDIR /tmp
# A number, so that `runAsNonRoot` can be checked without reading the image's passwd.
USER 65532:65532
ENTRYPOINT ["llmservice"]

FROM runtime AS operator
COPY --from=operator-environment /opt/llmservice /opt/llmservice
EXPOSE 8080 8081
CMD ["operator"]

FROM runtime AS gateway
COPY --from=gateway-environment /opt/llmservice /opt/llmservice
EXPOSE 8080 8001
CMD ["gateway"]

# Triton, which torch's CUDA build brings, builds its launchers with a C compiler when a kernel is first used.
FROM runtime AS server
ARG TORCH_CPU_INDEX_URL=
USER 0:0
RUN test -n "$TORCH_CPU_INDEX_URL" || { \
    apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; }
USER 65532:65532
COPY --from=server-environment /opt/llmservice /opt/llmservice
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000 8001
CMD ["serve", "--help"]
